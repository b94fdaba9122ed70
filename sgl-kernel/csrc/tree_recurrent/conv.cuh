// The short convolution over a tree's paths, and its window moved to the end of the accepted path.
#pragma once

#include "tree_recurrent/device.cuh"

namespace ddtree {

constexpr int kConvThreads = 128;
constexpr int kConvNodes = 8;  // per block, at most: they share the weights

// kCount neighbouring floats of any type, from a multiple of 8 bytes on.
template <int kCount>
__device__ __forceinline__ void load_floats(const FloatArray& array, int64_t first, float (&x)[kCount]) {
  static_assert(kCount % 4 == 0);
  if (array.type == DType::kFloat32) {
    const auto* from = reinterpret_cast<const float2*>(static_cast<const float*>(array.data) + first);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) x[2 * i] = from[i].x, x[2 * i + 1] = from[i].y;
    return;
  }
  const bool bf16 = array.type == DType::kBFloat16;
  const auto* from = reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(array.data) + first);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const uint2 raw = from[i];
    const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const float2 half = __half22float2(reinterpret_cast<const __half2&>(words[w]));
      x[4 * i + 2 * w] = bf16 ? low_float(words[w]) : half.x;
      x[4 * i + 2 * w + 1] = bf16 ? high_float(words[w]) : half.y;
    }
  }
}

// What the nodes of a block read besides their own input.
template <typename T, int kWidth>
struct ConvSources {
  // [node][j]: the node's (j + 1)-th nearest ancestor; negative: that many positions before the root.
  int nodes[kConvNodes][kWidth - 1];
  uint4 window[kWidth - 1][kConvThreads];  // as `nodes` counts: the latest input first

  __device__ __forceinline__ bool find(const ConvVerifyParams& p, int64_t row0, int first, int count) {
    bool before_root = false;
    if (threadIdx.x < count) {
      const int node = first + threadIdx.x;
      const uint64_t* ancestors = p.ancestors + (row0 + node) * p.words;
      int source = node;
#pragma unroll
      for (int j = 0; j < kWidth - 1; ++j) {
        // parent_of in this node's words is its nearest ancestor before `source`.
        source = source >= 0 ? parent_of(ancestors, source) : source - 1;
        nodes[threadIdx.x][j] = source;
        before_root = before_root || source < 0;
      }
    }
    return __syncthreads_or(before_root);
  }

  // A thread reads its own channels only, so no barrier follows.
  __device__ __forceinline__ void load_window(const ConvVerifyParams& p, int64_t slot, int channel) {
    constexpr int kChannels = kVectorBytes / sizeof(T);
    const T* from = static_cast<const T*>(p.window.data) + slot * p.window.stride_slot + channel * p.window.stride_h;
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) {
      alignas(kVectorBytes) T values[kChannels];
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        values[i] = from[i * p.window.stride_h + (kWidth - 2 - j) * p.window.stride_k];
      }
      window[j][threadIdx.x] = reinterpret_cast<const uint4&>(values);
    }
  }
};

// Grid: (16-byte groups of channels, groups of nodes, requests).
template <typename T, int kWidth>
__global__ void __launch_bounds__(kConvThreads)
    conv_verify_kernel(const __grid_constant__ ConvVerifyParams p, int nodes_per_block) {
  constexpr int kChannels = kVectorBytes / sizeof(T);
  __shared__ ConvSources<T, kWidth> sources;
  const int channel = (blockIdx.x * kConvThreads + threadIdx.x) * kChannels, request = blockIdx.z;
  const bool active = channel < p.dim;
  const int64_t row0 = int64_t(request) * p.num_nodes, slot = load_index(p.state_indices, request);
  const auto out = [&](int node) {
    auto* base = static_cast<T*>(const_cast<void*>(p.out.data));
    return reinterpret_cast<uint4*>(base + (row0 + node) * p.out.stride_t + channel);
  };
  const int first = blockIdx.y * nodes_per_block, count = min(nodes_per_block, p.num_nodes - first);
  if (slot < 0) {
    for (int i = 0; active && i < count; ++i) *out(first + i) = make_uint4(0, 0, 0, 0);
    return;
  }

  float weight[kChannels * kWidth], bias[kChannels] = {};
  if (active) {
    load_floats(p.weight, int64_t(channel) * kWidth, weight);
    if (p.bias.data) load_floats(p.bias, channel, bias);
  }
  const bool before_root = sources.find(p, row0, first, count);
  if (!active) return;
  if (before_root) sources.load_window(p, slot, channel);

  const T* x_rows = static_cast<const T*>(p.x.data) + channel;
  for (int i = 0; i < count; ++i) {
    const int node = first + i;
    uint4 raw[kWidth];  // of the node and its nearest ancestors
    raw[0] = *reinterpret_cast<const uint4*>(x_rows + (row0 + node) * p.x.stride_t);
#pragma unroll
    for (int j = 1; j < kWidth; ++j) {
      const int source = sources.nodes[i][j - 1];
      const auto* row = reinterpret_cast<const uint4*>(x_rows + (row0 + source) * p.x.stride_t);
      raw[j] = *(source >= 0 ? row : &sources.window[-1 - source][threadIdx.x]);
    }
    *reinterpret_cast<uint4*>(static_cast<T*>(p.x_kept) + (row0 + node) * p.dim + channel) = raw[0];
    float sum[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) sum[c] = bias[c];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      float x[kChannels];
      unpack<T>(raw[j], x);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sum[c] += weight[c * kWidth + kWidth - 1 - j] * x[c];
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
