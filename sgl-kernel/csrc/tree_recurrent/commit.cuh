// The accepted path into the states, in place: S = w S_0 + sum over the path's tokens t of w_t k_t u_t^T. w_t is the
// decay from t to the end of the path, and w that of the whole path. Each state is read once and written once. k, u and
// g go through shared memory, 16 tokens at a time, the last ones first. A state inside the path is that of a shorter
// path.
#pragma once

#include "common/cp_async.cuh"
#include "tree_recurrent/device.cuh"

namespace ddtree {

constexpr int kCommitThreads = 128;
constexpr int kCommitSteps = 16;  // tokens of the path in shared memory

// kContiguous: of the channels of a column.
template <typename State, int kDk_, bool kChannel_, bool kContiguous>
struct CommitTraits {
  static constexpr int kDk = kDk_;
  static constexpr bool kChannel = kChannel_;                     // one decay per key channel
  static constexpr int kChannels = kVectorBytes / sizeof(State);  // per thread, of each of its columns
  // Whether strides and decays leave registers for more columns per thread. These need fewer instructions per value,
  // and a bf16 state hides only half as many as an fp32 state.
  static constexpr bool kSpare = kContiguous && !kChannel;
  static constexpr int kRows = kSpare ? 8 : 32 / kChannels;         // columns of S per thread
  static constexpr int kLanes = kDk / kChannels;                    // threads that share a column
  static constexpr int kColumns = kCommitThreads / kLanes * kRows;  // per block
  static constexpr int kDecays = kChannel ? kDk : 1;                // per token
  // Blocks per multiprocessor without spills.
  static constexpr int kBlocks = kSpare == std::is_same_v<State, float> ? 5 : 4;
};

// kVectorBytes of neighbouring values, at once where they are contiguous. The compiler would split such a store into
// single values, hence the assembly.
template <bool kContiguous, typename State>
__device__ __forceinline__ uint4 load_values(const State* at, int64_t stride) {
  if constexpr (kContiguous) return *reinterpret_cast<const uint4*>(at);
  uint4 values;
#pragma unroll
  for (int i = 0; i < kVectorBytes / int(sizeof(State)); ++i) reinterpret_cast<State*>(&values)[i] = at[i * stride];
  return values;
}

template <bool kContiguous, typename State>
__device__ __forceinline__ void store_values(State* at, int64_t stride, uint4 values) {
  if constexpr (kContiguous) {
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

  // `row`: of k, u and g, of the token whose number, from the first one, is the thread's lane. Whole warps take part.
  __device__ __forceinline__ void load(const RecurrentCommitParams& p, int row, int count, int head, int first_column) {
    // Calls f(token, chunk, the token's row) for `chunks` chunks of each token.
    const auto for_chunks = [&](int chunks, auto f) {
#pragma unroll 1
      for (int done = 0; done < count * chunks; done += kCommitThreads) {
        const int i = done + int(threadIdx.x), step = i / chunks;
        const int64_t of_step = __shfl_sync(0xffffffff, row, step & 31);
        if (step < count) f(step, i % chunks, of_step);
      }
    };
    const int layer = blockIdx.z, key_head = head / p.heads_per_key;
    const auto* keys = static_cast<const __nv_bfloat16*>(p.k.data) + layer * p.k_stride_layer + key_head * Traits::kDk;
    for_chunks(Traits::kDk / 8, [&](int step, int chunk, int64_t row) {
      cp_async_16(smem_address(&k[step][8 * chunk]), keys + row * p.h_k * Traits::kDk + 8 * chunk, true);
    });
    const float* values = p.u + layer * p.u_stride_layer + head * p.d_v + first_column;
    for_chunks(Traits::kColumns / 4, [&](int step, int chunk, int64_t row) {
      if (first_column + 4 * chunk < p.d_v) {
        cp_async_16(smem_address(&u[step][4 * chunk]), values + row * p.h_v * p.d_v + 4 * chunk, true);
      }
    });
    const float* gates = p.g + layer * p.g_stride_layer + head * Traits::kDecays;
    constexpr int kGroup = Traits::kChannel ? 4 : 1;
    for_chunks(Traits::kDecays / kGroup, [&](int step, int group, int64_t row) {
#pragma unroll
      for (int e = 0; e < kGroup; ++e) {
        const int channel = kGroup * group + e;
        decay[step][channel] = expf(gates[row * p.h_v * Traits::kDecays + channel]);
      }
    });
    cp_async_wait_all();
  }
};

// Grid: (value heads x slices of the columns, requests, layers).
template <typename State, int kDk, bool kChannel, bool kContiguous>
__global__ void __launch_bounds__(kCommitThreads, CommitTraits<State, kDk, kChannel, kContiguous>::kBlocks)
    recurrent_commit_kernel(const __grid_constant__ RecurrentCommitParams p) {
  using Traits = CommitTraits<State, kDk, kChannel, kContiguous>;
  constexpr int kChannels = Traits::kChannels, kRows = Traits::kRows;
  __shared__ CommitTokens<Traits> tokens;
  const int slice = blockIdx.x / p.h_v, head = blockIdx.x % p.h_v, request = blockIdx.y;
  // None of these loads waits for another.
  const int64_t slot = load_index(p.state_indices, request);
  const int length = min(p.lengths[request], p.block_size);
  const int64_t track = load_index(p.track_indices, request), track_position = load_index(p.track_positions, request);
  const auto row_from = [&](int first) {
    const int step = min(first + int(threadIdx.x & 31), p.block_size - 1);
    return request * p.num_nodes + int(p.path[int64_t(request) * p.block_size + step]);
  };
  const int first_row = row_from(0);
  if (slot < 0 || length <= 0) return;

  const int channel = threadIdx.x % Traits::kLanes * kChannels;
  const int first_column = slice * Traits::kColumns, local_column = threadIdx.x / Traits::kLanes * kRows;
  const bool active = first_column + local_column < p.d_v;
  // Calls f(column, address of its values, stride of the channels). The compiler must not see that the strides are
  // the same for loads and stores: it would keep all addresses in registers from the one to the other.
  const auto for_columns = [&](int64_t of_slot, auto f) {
    int64_t stride_v = p.states.stride_v, stride_k = p.states.stride_k;
    asm volatile("" : "+l"(stride_v), "+l"(stride_k));
    State* at = static_cast<State*>(p.states.data) + blockIdx.z * p.states.stride_layer +
                of_slot * p.states.stride_slot + head * p.states.stride_h + (first_column + local_column) * stride_v +
                channel * stride_k;
#pragma unroll
    for (int column = 0; column < kRows; ++column) f(column, at + column * stride_v, stride_k);
  };
  uint4 before[kRows];
  if (active) {
    for_columns(slot,
                [&](int i, const State* at, int64_t stride) { before[i] = load_values<kContiguous>(at, stride); });
  }
  bool loaded = false;
  // Writes the state after the path's first `end` tokens. What is before joins it last, so nothing else waits for it.
  const auto commit = [&](int64_t to_slot, int end) {
    float state[kRows][kChannels] = {}, after[kChannels];  // the decay from a token to the last one
#pragma unroll
    for (int e = 0; e < kChannels; ++e) after[e] = 1.f;
    for (int first = (end - 1) / kCommitSteps * kCommitSteps; first >= 0; first -= kCommitSteps) {
      const int count = min(end - first, kCommitSteps);
      // The tokens before must have been read. The first ones do not wait for warps that still request their states.
      if (loaded) __syncthreads();
      loaded = true;
      tokens.load(p, first ? row_from(first) : first_row, count, head, first_column);
      __syncthreads();
#pragma unroll 1
      for (int step = count - 1; step >= 0; --step) {
        float k[kChannels];
#pragma unroll
        for (int e = 0; e < kChannels; e += 4) {
          const uint2 raw = *reinterpret_cast<const uint2*>(&tokens.k[step][channel + e]);
          k[e] = low_float(raw.x), k[e + 1] = high_float(raw.x), k[e + 2] = low_float(raw.y),
          k[e + 3] = high_float(raw.y);
        }
#pragma unroll
        for (int e = 0; e < kChannels; ++e) {
          k[e] *= after[e];
          after[e] *= tokens.decay[step][kChannel ? channel + e : 0];
        }
#pragma unroll
        for (int i = 0; i < kRows; i += 4) {
          const float4 u = *reinterpret_cast<const float4*>(&tokens.u[step][local_column + i]);
#pragma unroll
          for (int e = 0; e < kChannels; ++e) {
            state[i][e] += k[e] * u.x, state[i + 1][e] += k[e] * u.y;
            state[i + 2][e] += k[e] * u.z, state[i + 3][e] += k[e] * u.w;
          }
        }
      }
    }
    if (!active) return;
    for_columns(to_slot, [&](int i, State* at, int64_t stride) {
      float x[kChannels];
      unpack<State>(before[i], x);
#pragma unroll
      for (int e = 0; e < kChannels; ++e) x[e] = state[i][e] + after[e] * x[e];
      store_values<kContiguous>(at, stride, pack<State>(x));
    });
  };
  if (track >= 0 && track_position >= 0 && track_position < length) commit(track, int(track_position) + 1);
  commit(slot, length);
}

}  // namespace ddtree
