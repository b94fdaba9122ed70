// Outputs of all nodes of a request's tree for one value head, from the stored state S_0 [d_k, d_v] alone.
//
// With the path sums G, the norms' reciprocals r and every matrix over nodes t, s:
//   A_ts = beta_t r_t r_s exp(G_t - G_s) k_t.k_s   s a strict ancestor of t     M_ts = r_q,t r_s exp(G_t - G_s) q_t.k_s
//   (I + A) U = W,  W_t = beta_t (v_t - exp(G_t) r_t k_t S_0)                  s an ancestor of t, or t
//   O_t = exp(G_t) r_q,t q_t S_0 + (M U)_t + skip v_t
// Without a delta rule U = W = beta v. All exponents are at most 0.
//
// A block of threads owns 16 columns of the state per warp. It computes A, M and the inverses of A's diagonal blocks
// once (verify_system.cuh). Each warp computes the rest for itself (verify_solve.cuh). Products are transposed, so that
// columns of the state are rows: S_0 goes from global memory straight into the registers of an mma's A operand, and U^T
// turns from an accumulator into an A operand without moving. q and k are bf16 as they come, so they are exact. fp32
// operands are split into two bf16 parts.
//
// A value that is not finite must only reach the descendants of its node, but 0 * NaN is NaN. So A and M are masked by
// selection. A node whose u is not finite contributes zero to the products, and its descendants' outputs become NaN.
#pragma once

#include "tree_recurrent/verify_solve.cuh"

namespace ddtree {

// Grid: (slices of the columns, value heads, requests). A block has `column_warps` warps with columns of the state,
// then helpers, which only share the work on A and M.
template <typename Traits>
__global__ void __maxnreg__(Traits::kRegisters)
    recurrent_verify_kernel(const __grid_constant__ RecurrentVerifyParams p, int column_warps) {
  extern __shared__ __align__(16) char smem[];
  const VerifySolve<Traits> block(p, column_warps, smem);
  // No load here waits for another.
  const int64_t slot = load_index(p.state_indices, blockIdx.z);
  block.load_inputs();
  const auto gates = block.read_gates();
  if (slot < 0) {
    cp_async_wait_all();
    block.zero_outputs();
    return;
  }
  const int column = (block.slice * column_warps + block.warp) * kColumnsPerWarp;
  const bool active = block.warp < column_warps && column < p.d_v;

  StateFragment<typename Traits::State, Traits::kDk> state;
  float of_k[2][4], of_q[2][4];
  if (active) state.load(p.states, slot, block.head, column);
  block.set_gates(gates);
  if constexpr (Traits::kChannel) block.load_channel_gates();
  cp_async_wait_all();
  __syncthreads();

  if (block.writes_keys()) block.keep_keys();
  block.compute_norms();
  if constexpr (!Traits::kChannel) block.sum_gates();
  __syncthreads();

  if constexpr (Traits::kChannel) {
    block.make_system_by_channel();
    __syncthreads();
    for (int tile = block.first_task(); tile < Traits::kTiles; tile += block.warps) block.invert_diagonal(tile);
    block.scale_channels();
  } else {
    if (Traits::kStateFirst && active) {
      state.split();
      block.template multiply_state<true, true>(0, state, of_k, of_q);
    }
    block.make_system();
  }
  __syncthreads();

  if (!active) return;
  if constexpr (!Traits::kStateFirst) state.split();
  block.solve(state, column, of_k, of_q);
  block.store_o(column);
}

}  // namespace ddtree
