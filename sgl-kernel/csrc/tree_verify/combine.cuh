// Combine: o = sum over a request's chunks of 2^(lse_c - lse) o_c. The denominator includes the sink.
// Grid: x = row of q, y = query head, z = part of the value dimensions. Each thread holds four dimensions. Each group
// of threads takes every kGroups-th chunk, then the groups are added in a fixed order. Rows of requests with one chunk
// need no combine: the partial kernel has written their output.
#pragma once

#include "common/pdl.cuh"
#include "tree_verify/epilogue.cuh"

namespace ddtree {

constexpr int kCombineThreads = 256;

// MLA has few rows, and they are large. Four blocks per row keep enough loads in flight on each multiprocessor.
template <int kD>
constexpr int kCombineColumns = kD > 256 ? 128 : kD;

template <typename T, int kD>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ TreeVerifyParams p) {
  constexpr int kGroupThreads = kCombineColumns<kD> / 4, kGroups = kCombineThreads / kGroupThreads;
  extern __shared__ float weights[];  // [chunks of the request], at most bs * num_splits
  __shared__ float4 sums[kGroups][kGroupThreads];
  __shared__ float reduced[2][kCombineThreads / 32];
  const int t = blockIdx.x, head = blockIdx.y, tid = threadIdx.x, lane = tid & 31;
  const RowChunks chunks = find_row_chunks(p, t);
  // Everything above reads only inputs. Every block waits: otherwise the op could end before its partials.
  wait_for_primary();
  if (chunks.request < 0 || chunks.num_chunks <= 1) return;

  const int64_t first = (int64_t(chunks.first_item) * p.num_nodes + chunks.node) * p.h_q + head;
  const int64_t stride = int64_t(p.num_nodes) * p.h_q;
  const float* lse = partial_lse(p);
  float top = neg_inf();
  for (int c = tid; c < chunks.num_chunks; c += kCombineThreads) {
    weights[c] = lse[first + c * stride];
    top = fmaxf(top, weights[c]);
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, mask));
  if (lane == 0) reduced[0][tid / 32] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kCombineThreads / 32; ++w) top = fmaxf(top, reduced[0][w]);
  const float base = top == neg_inf() ? 0.f : top;
  float sum = 0.f;
  for (int c = tid; c < chunks.num_chunks; c += kCombineThreads) {
    weights[c] = fast_exp2(weights[c] - base);
    sum += weights[c];
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
  if (lane == 0) reduced[1][tid / 32] = sum;
  __syncthreads();
  sum = 0.f;
#pragma unroll
  for (int w = 0; w < kCombineThreads / 32; ++w) sum += reduced[1][w];
  const RowResult result = finish_row(top, sum, sink_logit2(p, head));

  const int group = tid / kGroupThreads, d = blockIdx.z * kCombineColumns<kD> + tid % kGroupThreads * 4;
  float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
  if (group < kGroups) {
    const float* partial = static_cast<const float*>(p.workspace) + first * kD + d;
#pragma unroll 8
    for (int c = group; c < chunks.num_chunks; c += kGroups) {
      const float4 v = *reinterpret_cast<const float4*>(partial + c * stride * kD);
      const float weight = weights[c];
      acc.x += weight * v.x, acc.y += weight * v.y, acc.z += weight * v.z, acc.w += weight * v.w;
    }
    sums[group][tid % kGroupThreads] = acc;
  }
  __syncthreads();
  if (group != 0) return;
#pragma unroll
  for (int g = 1; g < kGroups; ++g) {
    const float4 v = sums[g][tid];
    acc.x += v.x, acc.y += v.y, acc.z += v.z, acc.w += v.w;
  }
  T* out = static_cast<T*>(p.o) + t * p.o_stride_t + head * p.o_stride_h + d;
  *reinterpret_cast<uint2*>(out) = make_uint2(pack2<T>(acc.x * result.scale, acc.y * result.scale),
                                              pack2<T>(acc.z * result.scale, acc.w * result.scale));
  if (d == 0 && p.lse) p.lse[int64_t(t) * p.h_q + head] = result.lse2 * kLn2;
}

// Combine for few chunks per row: each thread computes all of its row's weights itself. Grid: x = row of q, y = group
// of query heads. A head takes d_v / 4 threads, and a block holds as many heads as fit.
constexpr int kFewSplits = 8;

template <int kD>
constexpr int kCombineHeads = kCombineThreads / (kD / 4);

template <typename T, int kD>
__global__ void __launch_bounds__(kCombineThreads) combine_few_kernel(const __grid_constant__ TreeVerifyParams p) {
  constexpr int kHeadThreads = kD / 4;
  const int t = blockIdx.x, head = blockIdx.y * kCombineHeads<kD> + threadIdx.x / kHeadThreads;
  const int d = threadIdx.x % kHeadThreads * 4;
  const RowChunks chunks = find_row_chunks(p, t);
  wait_for_primary();
  if (chunks.request < 0 || chunks.num_chunks <= 1) return;
  if (threadIdx.x / kHeadThreads >= kCombineHeads<kD> || head >= p.h_q) return;

  const int64_t first = (int64_t(chunks.first_item) * p.num_nodes + chunks.node) * p.h_q + head;
  const int64_t stride = int64_t(p.num_nodes) * p.h_q;
  const float* lse = partial_lse(p) + first;
  const float* partial = static_cast<const float*>(p.workspace) + first * kD + d;
  float top = neg_inf();
#pragma unroll 4
  for (int c = 0; c < chunks.num_chunks; ++c) top = fmaxf(top, lse[c * stride]);
  const float base = exponent_base(top);
  float sum = 0.f;
  float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int c = 0; c < chunks.num_chunks; ++c) {
    const float4 v = *reinterpret_cast<const float4*>(partial + c * stride * kD);
    const float weight = fast_exp2(lse[c * stride] - base);
    sum += weight;
    acc.x += weight * v.x, acc.y += weight * v.y, acc.z += weight * v.z, acc.w += weight * v.w;
  }
  const RowResult result = finish_row(top, sum, sink_logit2(p, head));
  T* out = static_cast<T*>(p.o) + t * p.o_stride_t + head * p.o_stride_h + d;
  *reinterpret_cast<uint2*>(out) = make_uint2(pack2<T>(acc.x * result.scale, acc.y * result.scale),
                                              pack2<T>(acc.z * result.scale, acc.w * result.scale));
  if (d == 0 && p.lse) p.lse[int64_t(t) * p.h_q + head] = result.lse2 * kLn2;
}

}  // namespace ddtree
