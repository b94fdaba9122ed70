// The accepted path into the states, in place: the recurrence S = diag(exp(g)) S + k u^T, token by token, with the
// state in registers. Each state is read once and written once. The path's k, u and g go through shared memory, so that
// the recurrence waits for memory once per 16 tokens and not once per token.
#pragma once

#include "common/cp_async.cuh"
#include "tree_recurrent/device.cuh"

namespace ddtree {

constexpr int kCommitThreads = 128;
constexpr int kCommitSteps = 16;   // tokens of the path in shared memory
constexpr int kCommitValues = 32;  // of the state, per thread

template <typename State, int kDk_, bool kChannel_>
struct CommitTraits {
  static constexpr int kDk = kDk_;
  static constexpr bool kChannel = kChannel_;                       // one decay per key channel
  static constexpr int kChannels = kVectorBytes / sizeof(State);    // per thread, of each of its columns
  static constexpr int kRows = kCommitValues / kChannels;           // columns of S per thread
  static constexpr int kLanes = kDk / kChannels;                    // threads that share a column
  static constexpr int kColumns = kCommitThreads / kLanes * kRows;  // per block
  static constexpr int kDecays = kChannel ? kDk : 1;                // per token
};

// kVectorBytes of neighbouring values, at once where they are contiguous. That access is in assembly, because the
// compiler would merge it with the other one: into loads and stores of single values.
template <typename State>
__device__ __forceinline__ uint4 load_values(const State* at, int64_t stride) {
  uint4 values;
  if (stride == 1) {
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "l"(at)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kVectorBytes / int(sizeof(State)); ++i) reinterpret_cast<State*>(&values)[i] = at[i * stride];
  }
  return values;
}

template <typename State>
__device__ __forceinline__ void store_values(State* at, int64_t stride, uint4 values) {
  if (stride == 1) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(values.x), "r"(values.y), "r"(values.z),
                 "r"(values.w)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kVectorBytes / int(sizeof(State)); ++i) at[i * stride] = reinterpret_cast<State*>(&values)[i];
  }
}

// What up to kCommitSteps tokens of the path do to a block's columns.
template <typename Traits>
struct __align__(16) CommitTokens {
  __nv_bfloat16 k[kCommitSteps][Traits::kDk];
  float u[kCommitSteps][Traits::kColumns];
  float decay[kCommitSteps][Traits::kDecays];

  __device__ __forceinline__ void load(const RecurrentCommitParams& p, int first, int count, int head,
                                       int first_column) {
    const int request = blockIdx.y, layer = blockIdx.z, key_head = head / p.heads_per_key;
    const int64_t* path = p.path + int64_t(request) * p.block_size + first;
    const auto row = [&](int step) { return int64_t(request) * p.num_nodes + path[step]; };

    constexpr int kKeyChunks = Traits::kDk / 8, kColumnChunks = Traits::kColumns / 4;
    const auto* keys = static_cast<const __nv_bfloat16*>(p.k.data) + layer * p.k_stride_layer + key_head * Traits::kDk;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * kKeyChunks; i += kCommitThreads) {
      const int step = i / kKeyChunks, channel = i % kKeyChunks * 8;
      cp_async_16(smem_address(&k[step][channel]), keys + row(step) * p.h_k * Traits::kDk + channel, true);
    }
    const float* values = p.u + layer * p.u_stride_layer + head * p.d_v + first_column;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * kColumnChunks; i += kCommitThreads) {
      const int step = i / kColumnChunks, column = i % kColumnChunks * 4;
      if (first_column + column < p.d_v) {
        cp_async_16(smem_address(&u[step][column]), values + row(step) * p.h_v * p.d_v + column, true);
      }
    }
    const float* gates = p.g + layer * p.g_stride_layer + head * Traits::kDecays;
    constexpr int kGroup = Traits::kChannel ? 4 : 1, kGroups = Traits::kDecays / kGroup;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * kGroups; i += kCommitThreads) {
      const int step = i / kGroups, channel = i % kGroups * kGroup;
#pragma unroll
      for (int e = 0; e < kGroup; ++e) {
        decay[step][channel + e] = expf(gates[row(step) * p.h_v * Traits::kDecays + channel + e]);
      }
    }
    cp_async_wait_all();
  }
};

// Grid: (value heads x slices of the columns, requests, layers).
template <typename State, int kDk, bool kChannel>
__global__ void __launch_bounds__(kCommitThreads, 6)
    recurrent_commit_kernel(const __grid_constant__ RecurrentCommitParams p) {
  using Traits = CommitTraits<State, kDk, kChannel>;
  constexpr int kChannels = Traits::kChannels, kRows = Traits::kRows;
  __shared__ CommitTokens<Traits> tokens;
  const int slice = blockIdx.x / p.h_v, head = blockIdx.x % p.h_v, request = blockIdx.y;
  const int64_t slot = load_index(p.state_indices, request);
  const int length = min(p.lengths[request], p.block_size);
  if (slot < 0 || length <= 0) return;
  const int64_t track = load_index(p.track_indices, request), track_position = load_index(p.track_positions, request);

  const int channel = threadIdx.x % Traits::kLanes * kChannels;
  const int first_column = slice * Traits::kColumns, local_column = threadIdx.x / Traits::kLanes * kRows;
  const bool active = first_column + local_column < p.d_v;
  uint4 loaded[kRows];  // not unpacked before the tokens are loaded too, so that both loads take place at once
  float state[kRows][kChannels];
  // Calls f(column, address of its values, stride of the channels). The compiler must not see that the strides are
  // the same for loads and stores: it would keep all addresses in registers from the one to the other.
  const auto for_columns = [&](int64_t of_slot, auto f) {
    int64_t stride_v = p.states.stride_v, stride_k = p.states.stride_k;
    asm volatile("" : "+l"(stride_v), "+l"(stride_k));
    State* at = static_cast<State*>(p.states.data) + blockIdx.z * p.states.stride_layer +
                of_slot * p.states.stride_slot + head * p.states.stride_h + (first_column + local_column) * stride_v +
                channel * stride_k;
#pragma unroll
    for (int row = 0; row < kRows; ++row) f(row, at + row * stride_v, stride_k);
  };
  const auto load = [&](int row, const State* at, int64_t stride) { loaded[row] = load_values(at, stride); };
  const auto store = [&](int row, State* at, int64_t stride) { store_values(at, stride, pack<State>(state[row])); };

  if (active) for_columns(slot, load);
  tokens.load(p, 0, min(length, kCommitSteps), head, first_column);
  __syncthreads();
#pragma unroll
  for (int row = 0; row < kRows; ++row) unpack<State>(loaded[row], state[row]);
  for (int first = 0; first < length; first += kCommitSteps) {
    const int count = min(length - first, kCommitSteps);
    if (first) {
      __syncthreads();  // the tokens before are read
      tokens.load(p, first, count, head, first_column);
      __syncthreads();
    }
    if (!active) continue;
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      float k[kChannels], decay[kChannels];
#pragma unroll
      for (int e = 0; e < kChannels; e += 4) {
        const uint2 raw = *reinterpret_cast<const uint2*>(&tokens.k[step][channel + e]);
        k[e] = low_float(raw.x), k[e + 1] = high_float(raw.x), k[e + 2] = low_float(raw.y),
        k[e + 3] = high_float(raw.y);
      }
#pragma unroll
      for (int e = 0; e < kChannels; ++e) decay[e] = tokens.decay[step][kChannel ? channel + e : 0];
#pragma unroll
      for (int row = 0; row < kRows; row += 4) {
        const float4 values = *reinterpret_cast<const float4*>(&tokens.u[step][local_column + row]);
        const float u[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int e = 0; e < kChannels; ++e) state[row + r][e] = decay[e] * state[row + r][e] + k[e] * u[r];
        }
      }
      if (track >= 0 && first + step == track_position) for_columns(track, store);
    }
  }
  if (active) for_columns(slot, store);
}

}  // namespace ddtree
