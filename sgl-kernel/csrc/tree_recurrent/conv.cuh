// The short convolution over a tree's paths, and its window moved to the end of the accepted path.
#pragma once

#include "tree_recurrent/device.cuh"

namespace ddtree {

constexpr int kConvThreads = 128;
constexpr int kConvNodes = 8;  // per block: they share the weights
constexpr int kConvBytes = 16;

template <typename T>
__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[kConvBytes / sizeof(T)]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      x[2 * i] = low_float(words[i]), x[2 * i + 1] = high_float(words[i]);
    } else {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&x)[kConvBytes / sizeof(T)]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else {
      words[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// Grid: (16-byte groups of channels, groups of nodes, requests).
template <typename T, int kWidth>
__global__ void __launch_bounds__(kConvThreads) conv_verify_kernel(const __grid_constant__ ConvVerifyParams p) {
  constexpr int kChannels = kConvBytes / sizeof(T);
  const int channel = (blockIdx.x * kConvThreads + threadIdx.x) * kChannels, request = blockIdx.z;
  if (channel >= p.dim) return;
  const int64_t row0 = int64_t(request) * p.num_nodes, slot = load_index(p.state_indices, request);
  const auto out = [&](int node) {
    auto* base = static_cast<T*>(const_cast<void*>(p.out.data));
    return reinterpret_cast<uint4*>(base + (row0 + node) * p.out.stride_t + channel);
  };
  const int begin = blockIdx.y * kConvNodes, end = min(begin + kConvNodes, p.num_nodes);
  if (slot < 0) {
    for (int node = begin; node < end; ++node) *out(node) = make_uint4(0, 0, 0, 0);
    return;
  }

  float weight[kChannels][kWidth], bias[kChannels];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    bias[i] = p.bias.data ? load_float(p.bias, 0, 0, channel + i) : 0.f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weight[i][j] = load_float(p.weight, channel + i, 0, j);
  }
  const T* window = static_cast<const T*>(p.window.data) + slot * p.window.stride_slot + channel * p.window.stride_h;
  const auto load = [&](int node, uint4& raw) {
    raw = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.x.data) + (row0 + node) * p.x.stride_t + channel);
  };
  for (int node = begin; node < end; ++node) {
    float sum[kChannels];
    uint4 raw;
    load(node, raw);
    *reinterpret_cast<uint4*>(static_cast<T*>(p.x_kept) + (row0 + node) * p.dim + channel) = raw;
    float x[kChannels];
    unpack<T>(raw, x);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) sum[i] = bias[i] + weight[i][kWidth - 1] * x[i];
    int source = node, past_root = 0;
#pragma unroll
    for (int j = 1; j < kWidth; ++j) {
      if (source >= 0) source = parent_of(p.ancestors + (row0 + source) * p.words, source);
      if (source >= 0) {
        load(source, raw);
        unpack<T>(raw, x);
      } else {
        ++past_root;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
          x[i] = float(window[i * p.window.stride_h + (kWidth - 1 - past_root) * p.window.stride_k]);
        }
      }
#pragma unroll
      for (int i = 0; i < kChannels; ++i) sum[i] += weight[i][kWidth - 1 - j] * x[i];
    }
    if (p.silu) {
#pragma unroll
      for (float& value : sum) value = value * sigmoid(value);
    }
    *out(node) = pack<T>(sum);
  }
}

// Grid: (channels, requests, layers).
template <typename T>
__global__ void __launch_bounds__(kConvThreads) conv_commit_kernel(const __grid_constant__ ConvCommitParams p) {
  const int channel = blockIdx.x * kConvThreads + threadIdx.x, request = blockIdx.y, layer = blockIdx.z;
  const int64_t slot = load_index(p.state_indices, request);
  const int length = min(p.lengths[request], p.block_size), stored = p.width - 1;
  if (channel >= p.dim || slot < 0 || length <= 0) return;
  const int64_t track = load_index(p.track_indices, request), track_position = load_index(p.track_positions, request);
  T* window = static_cast<T*>(p.window.data) + layer * p.window.stride_layer + channel * p.window.stride_h;
  const T* x = static_cast<const T*>(p.x.data) + layer * p.x_stride_layer + channel;
  const int64_t* path = p.path + int64_t(request) * p.block_size;

  T old[kMaxConvWidth - 1];
#pragma unroll
  for (int i = 0; i < kMaxConvWidth - 1; ++i) {
    if (i < stored) old[i] = window[slot * p.window.stride_slot + i * p.window.stride_k];
  }
  // Position i of the window that follows `count` inputs of the path.
  const auto shifted = [&](int count, int i) {
    const int at = count + i - stored;
    if (at >= 0) return x[(int64_t(request) * p.num_nodes + path[at]) * p.dim];
    T value = old[0];
#pragma unroll
    for (int s = 1; s < kMaxConvWidth - 1; ++s) {
      if (s == count + i) value = old[s];
    }
    return value;
  };
  const bool tracked = track >= 0 && track_position >= 0 && track_position < length;
#pragma unroll
  for (int i = 0; i < kMaxConvWidth - 1; ++i) {
    if (i >= stored) break;
    if (tracked) {
      window[track * p.window.stride_slot + i * p.window.stride_k] = shifted(int(track_position) + 1, i);
    }
    window[slot * p.window.stride_slot + i * p.window.stride_k] = shifted(length, i);
  }
}

}  // namespace ddtree
