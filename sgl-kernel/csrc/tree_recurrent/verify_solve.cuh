// U and O of the verify kernel: each warp solves for its own columns of the state.
#pragma once

#include "tree_recurrent/state_fragment.cuh"
#include "tree_recurrent/verify_system.cuh"

namespace ddtree {

template <typename Traits>
struct VerifySolve : VerifySystem<Traits> {
  using Base = VerifySystem<Traits>;
  using Base::Base, Base::kDk, Base::kTiles;
  using Base::node_set, Base::k_row, Base::q_row, Base::decay_row, Base::block, Base::slab, Base::stashed;
  using Base::p, Base::nodes, Base::lane, Base::head, Base::row0, Base::delta;
  using typename Base::NodeSet;

  // The address that this lane gives to ldmatrix for a 16x16 block.
  __device__ __forceinline__ int lane_offset() const {
    return block_offset((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
  }

  // d [16 columns of S, 16 nodes t] += u^T [16, nodes of tile j] block^T, each operand in two parts.
  __device__ __forceinline__ void multiply(float (&d)[2][4], const uint32_t (&hi)[4], const uint32_t (&lo)[4], int part,
                                           int index) const {
    uint32_t b_hi[4], b_lo[4];
    ldmatrix_x4(b_hi, smem_address(block(part, index) + lane_offset()));
    ldmatrix_x4(b_lo, smem_address(block(part + 1, index) + lane_offset()));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mma_m16n8k16<__nv_bfloat16>(d[h], hi, b_hi[2 * h], b_hi[2 * h + 1]);
      mma_m16n8k16<__nv_bfloat16>(d[h], hi, b_lo[2 * h], b_lo[2 * h + 1]);
      mma_m16n8k16<__nv_bfloat16>(d[h], lo, b_hi[2 * h], b_hi[2 * h + 1]);
    }
  }

  __device__ __forceinline__ void stash(int tile, const uint32_t (&hi)[4], const uint32_t (&lo)[4]) const {
    stashed(tile)[0] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    stashed(tile)[32] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
  }
  __device__ __forceinline__ void unstash(int tile, uint32_t (&hi)[4], uint32_t (&lo)[4]) const {
    const uint4 x = stashed(tile)[0], y = stashed(tile)[32];
    hi[0] = x.x, hi[1] = x.y, hi[2] = x.z, hi[3] = x.w;
    lo[0] = y.x, lo[1] = y.y, lo[2] = y.z, lo[3] = y.w;
  }

  // An accumulator [16 columns, 16 nodes] as an A operand in two parts.
  __device__ __forceinline__ static void split_operand(const float (&d)[2][4], uint32_t (&hi)[4], uint32_t (&lo)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) split2(d[h][2 * r], d[h][2 * r + 1], hi[2 * h + r], lo[2 * h + r]);
    }
  }

  // Zeroes the nodes of a tile that have a value that is not finite, or are in `known`. Returns them to all lanes.
  __device__ __forceinline__ uint32_t drop_bad(float (&d)[2][4], uint32_t known) const {
    const int c = lane & 3;
    uint32_t mine = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!is_finite(d[h][e]) || !is_finite(d[h][2 + e])) mine |= 1u << (8 * h + 2 * c + e);
      }
    }
    const uint32_t bad = known | __reduce_or_sync(0xffffffff, mine);
    if (bad) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (bad >> (8 * h + 2 * c + e) & 1) d[h][e] = d[h][2 + e] = 0.f;
        }
      }
    }
    return bad;
  }

  // v of tile i: [h][..] as an accumulator has it, columns of S by nodes.
  __device__ __forceinline__ void read_v(int tile, float (&v)[2][4]) const {
    uint32_t raw[4];
    ldmatrix_x4_trans(raw, smem_address(slab(16 * tile + (lane >> 4) * 8 + (lane & 7)) + (lane >> 3 & 1) * 16));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) v[h][2 * r] = low_float(raw[2 * h + r]), v[h][2 * r + 1] = high_float(raw[2 * h + r]);
    }
  }

  __device__ __forceinline__ void write_o(int tile, const float (&o)[2][4]) const {
    uint32_t raw[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) raw[2 * h + r] = pack2<__nv_bfloat16>(o[h][2 * r], o[h][2 * r + 1]);
    }
    stmatrix_x4_trans(smem_address(slab(16 * tile + (lane >> 4) * 8 + (lane & 7)) + (lane >> 3 & 1) * 16), raw);
  }

  // k S_0, q S_0 or both of a tile of nodes for this warp's columns.
  template <bool kOfK, bool kOfQ>
  __device__ __forceinline__ void multiply_state(int tile, const StateFragment<typename Traits::State, kDk>& state,
                                                 float (&of_k)[2][4], float (&of_q)[2][4]) const {
    constexpr bool kSplit = StateFragment<typename Traits::State, kDk>::kSplit;
    const int g = lane / 4, c = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (kOfK) of_k[h][e] = 0.f;
        if constexpr (kOfQ) of_q[h][e] = 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < kDk / 32; ++i) {
      uint32_t hi[2][4], lo[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.operand(i, half, 0, hi[half]);
        if constexpr (kSplit) state.operand(i, half, 1, lo[half]);
      }
      const int at = chunk_offset(g, 4 * i + c);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * tile + 8 * h + g;
        uint4 k_low{}, q_low{};
        if constexpr (Traits::kChannel) {
          const uint4 x = *reinterpret_cast<const uint4*>(decay_row(row) + decay_offset(g, 32 * i + 8 * c));
          const uint4 y = *reinterpret_cast<const uint4*>(decay_row(row) + decay_offset(g, 32 * i + 8 * c + 4));
          k_low = {__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410), __byte_perm(y.x, y.y, 0x5410),
                   __byte_perm(y.z, y.w, 0x5410)};
          q_low = {__byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x7632), __byte_perm(y.x, y.y, 0x7632),
                   __byte_perm(y.z, y.w, 0x7632)};
        }
        const auto accumulate = [&](float (&d)[4], const char* data, const uint4& low) {
          const uint4 x = *reinterpret_cast<const uint4*>(data + at);
          mma_m16n8k16<__nv_bfloat16>(d, hi[0], x.x, x.y);
          mma_m16n8k16<__nv_bfloat16>(d, hi[1], x.z, x.w);
          if constexpr (kSplit) {
            mma_m16n8k16<__nv_bfloat16>(d, lo[0], x.x, x.y);
            mma_m16n8k16<__nv_bfloat16>(d, lo[1], x.z, x.w);
          }
          if constexpr (Traits::kChannel) {
            mma_m16n8k16<__nv_bfloat16>(d, hi[0], low.x, low.y);
            mma_m16n8k16<__nv_bfloat16>(d, hi[1], low.z, low.w);
          }
        };
        if (kOfK && delta) accumulate(of_k[h], k_row(row), k_low);
        if constexpr (kOfQ) accumulate(of_q[h], q_row(row), q_low);
      }
    }
  }

  // U and O of this warp's columns, one tile of nodes after the other. o stays in the slab. If kStateFirst, of_k and
  // of_q already hold the products of the first tile.
  __device__ __forceinline__ void solve(const StateFragment<typename Traits::State, kDk>& state, int column,
                                        float (&of_k)[2][4], float (&of_q)[2][4]) const {
    const int g = lane / 4, c = lane & 3;
    const float skip = p.skip.data ? load_float(p.skip, 0, head) : 0.f;
    NodeSet bad = node_set(nodes.bad);
    uint32_t u_hi[Traits::kWide ? 1 : kTiles][4], u_lo[Traits::kWide ? 1 : kTiles][4];
    // Adds u of tile j times a block.
    const auto add_product = [&](float (&d)[2][4], int i, int j, int part) {
      if constexpr (Traits::kWide) {
        if (j < i) {
          uint32_t hi[4], lo[4];
          unstash(j, hi, lo);
          multiply(d, hi, lo, part, block_index(i, j));
        } else {
          multiply(d, u_hi[0], u_lo[0], part, block_index(i, j));
        }
      } else {
        multiply(d, u_hi[j], u_lo[j], part, block_index(i, j));
      }
    };
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float v[2][4], u[2][4];
      if (i > 0 || !Traits::kStateFirst) multiply_state<true, !Traits::kWide>(i, state, of_k, of_q);
      read_v(i, v);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int n = 16 * i + 8 * h + 2 * c + (e & 1);
          float x = v[h][e];
          if (delta) x -= (Traits::kChannel ? 1.f : nodes.decay[n]) * nodes.k_factor[n] * of_k[h][e];
          u[h][e] = nodes.beta[n] * x;
        }
      }
      uint32_t bad_here = drop_bad(u, uint32_t(bad >> 16 * i) & 0xffff);
      if (delta) {
#pragma unroll
        for (int j = 0; j < i; ++j) add_product(u, i, j, 0);
        uint32_t hi[4], lo[4];
        split_operand(u, hi, lo);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int e = 0; e < 4; ++e) u[h][e] = 0.f;
        }
        multiply(u, hi, lo, 0, block_index(i, i));
        bad_here = drop_bad(u, bad_here);
      }
      bad |= NodeSet(bad_here) << 16 * i;
      split_operand(u, u_hi[Traits::kWide ? 0 : i], u_lo[Traits::kWide ? 0 : i]);
      if (Traits::kWide && i + 1 < kTiles) stash(i, u_hi[0], u_lo[0]);
      float o[2][4];
      const auto keep_u = [&](int h, int e) {
        const int local = 8 * h + 2 * c + (e & 1), n = 16 * i + local;
        if (n < p.num_nodes) {
          p.u_kept[((row0 + n) * p.h_v + head) * p.d_v + column + g + 4 * (e & 2)] =
              bad_here >> local & 1 ? quiet_nan() : u[h][e] * nodes.k_factor[n];
        }
      };
      const auto begin_o = [&](int h, int e) {
        const int n = 16 * i + 8 * h + 2 * c + (e & 1);
        o[h][e] = (Traits::kChannel ? 1.f : nodes.decay[n]) * nodes.q_factor[n] * of_q[h][e];
        if (p.skip.data) o[h][e] += skip * v[h][e];
      };
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (!Traits::kWide) begin_o(h, e);
          keep_u(h, e);
        }
      }
      if constexpr (Traits::kWide) {  // not earlier, because too few registers are free
        multiply_state<false, true>(i, state, of_k, of_q);
        if (p.skip.data) read_v(i, v);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int e = 0; e < 4; ++e) begin_o(h, e);
        }
      }
#pragma unroll
      for (int j = 0; j <= i; ++j) add_product(o, i, j, 2);
      if (bad) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (nodes.mask[16 * i + 8 * h + 2 * c + (e & 1)] & bad) o[h][e] = quiet_nan();
          }
        }
      }
      write_o(i, o);
    }
  }

  __device__ __forceinline__ void store_o(int column) const {
    __syncwarp();
    for (int i = lane; i < 2 * p.num_nodes; i += 32) {
      auto* out = static_cast<__nv_bfloat16*>(const_cast<void*>(p.o.data)) + (row0 + i / 2) * p.o.stride_t +
                  head * p.o.stride_h + column + i % 2 * 8;
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(slab(i / 2) + i % 2 * 16);
    }
  }
};

}  // namespace ddtree
