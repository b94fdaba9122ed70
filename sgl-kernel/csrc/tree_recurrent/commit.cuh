// The accepted path into the states, in place: the recurrence S = diag(exp(g)) S + k u^T, token by token, with the
// state in registers. Once through, reading and writing each state once.
#pragma once

#include "tree_recurrent/device.cuh"

namespace ddtree {

constexpr int kCommitThreads = 128;
constexpr int kCommitRows = 16;  // columns of S per thread, four channels of each

template <typename State, int kDk>
struct CommitTraits {
  static constexpr int kLanes = kDk / 4;  // a column of S: four neighbouring channels per lane
  static constexpr int kColumns = kCommitThreads / kLanes * kCommitRows;  // per block
};

template <typename State>
__device__ __forceinline__ void load_4(const State* at, int64_t stride, float (&x)[4]) {
  if (stride == 1) {
    if constexpr (sizeof(State) == 4) {
      const float4 v = *reinterpret_cast<const float4*>(at);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(at);
      x[0] = low_float(v.x), x[1] = high_float(v.x), x[2] = low_float(v.y), x[3] = high_float(v.y);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = float(at[i * stride]);
}

template <typename State>
__device__ __forceinline__ void store_4(State* at, int64_t stride, const float (&x)[4]) {
  if (stride == 1) {
    if constexpr (sizeof(State) == 4) {
      *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      *reinterpret_cast<uint2*>(at) = make_uint2(pack2<__nv_bfloat16>(x[0], x[1]), pack2<__nv_bfloat16>(x[2], x[3]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) at[i * stride] = State(x[i]);
}

// Grid: (value heads x slices of the columns, requests, layers).
template <typename State, int kDk>
__global__ void __launch_bounds__(kCommitThreads, 3)
    recurrent_commit_kernel(const __grid_constant__ RecurrentCommitParams p) {
  using Traits = CommitTraits<State, kDk>;
  const int slice = blockIdx.x / p.h_v, head = blockIdx.x % p.h_v, key_head = head / p.heads_per_key;
  const int request = blockIdx.y, layer = blockIdx.z;
  const int64_t slot = load_index(p.state_indices, request);
  const int length = min(p.lengths[request], p.block_size);
  if (slot < 0 || length <= 0) return;
  const int64_t track = load_index(p.track_indices, request), track_position = load_index(p.track_positions, request);

  const int channel = threadIdx.x % Traits::kLanes * 4;
  const int column = slice * Traits::kColumns + threadIdx.x / Traits::kLanes * kCommitRows;
  if (column >= p.d_v) return;
  const auto address = [&](int64_t to_slot) {
    return static_cast<State*>(p.states.data) + layer * p.states.stride_layer + to_slot * p.states.stride_slot +
           head * p.states.stride_h + column * p.states.stride_v + channel * p.states.stride_k;
  };
  const auto store = [&](int64_t to_slot, const float (&state)[kCommitRows][4]) {
    int64_t stride = p.states.stride_v;
    asm volatile("" : "+l"(stride));  // else sixteen addresses stay in registers from the loads to here
    State* at = address(to_slot);
#pragma unroll
    for (int row = 0; row < kCommitRows; ++row) store_4(at + row * stride, p.states.stride_k, state[row]);
  };

  float state[kCommitRows][4];
#pragma unroll
  for (int row = 0; row < kCommitRows; ++row)
    load_4(address(slot) + row * p.states.stride_v, p.states.stride_k, state[row]);
  const int64_t* path = p.path + int64_t(request) * p.block_size;
  for (int i = 0; i < length; ++i) {
    const int64_t node = int64_t(request) * p.num_nodes + path[i];
    float k[4], factor[4];
    load_4(static_cast<const __nv_bfloat16*>(p.k.data) + layer * p.k_stride_layer + (node * p.h_k + key_head) * kDk +
               channel,
           1, k);
    const float* g = p.g + layer * p.g_stride_layer;
    if (p.per_channel) {
      load_4(g + (node * p.h_v + head) * kDk + channel, 1, factor);
#pragma unroll
      for (float& x : factor) x = expf(x);
    } else {
      const float decay = expf(g[node * p.h_v + head]);
#pragma unroll
      for (float& x : factor) x = decay;
    }
    const auto* u =
        reinterpret_cast<const float4*>(p.u + layer * p.u_stride_layer + (node * p.h_v + head) * p.d_v + column);
#pragma unroll
    for (int quad = 0; quad < kCommitRows / 4; ++quad) {
      const float4 values = u[quad];
      const float u_rows[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[4 * quad + r][e] = factor[e] * state[4 * quad + r][e] + k[e] * u_rows[r];
      }
    }
    if (track >= 0 && i == track_position) store(track, state);
  }
  store(slot, state);
}

}  // namespace ddtree
