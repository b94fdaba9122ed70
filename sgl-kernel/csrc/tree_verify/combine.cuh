// Combine: o = sum over a request's chunks of 2^(lse_c - lse) o_c. The denominator includes the sink. Rows of requests
// with one chunk need no combine: the partial kernel has written their output. A thread holds four dimensions. It loads
// up to kCombineLoads partial results before it needs the first, and the grid is about one wave, because every wave
// waits for the lengths, the LSEs and the partial results.
#pragma once

#include "common/pdl.cuh"
#include "tree_verify/epilogue.cuh"

namespace ddtree {

constexpr int kCombineThreads = 256, kCombineLoads = 8;

__device__ __forceinline__ void add_weighted(float4& sum, float weight, const float4& v) {
  sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
}

// Writes dimensions d .. d + 3 of the output. Whoever has d = 0 writes the LSE.
template <typename T>
__device__ __forceinline__ void write_combined(const TreeVerifyParams& p, int t, int head, int d, const float4& sum,
                                               const RowResult& result) {
  T* out = static_cast<T*>(p.o) + t * p.o_stride_t + head * p.o_stride_h + d;
  *reinterpret_cast<uint2*>(out) = make_uint2(pack2<T>(sum.x * result.scale, sum.y * result.scale),
                                              pack2<T>(sum.z * result.scale, sum.w * result.scale));
  if (d == 0 && p.lse) p.lse[int64_t(t) * p.h_q + head] = result.lse2 * kLn2;
}

// Grid: x = row of q, y = query head, z = part of the value dimensions, of kColumns. Each group of threads takes every
// kGroups-th chunk, then the groups are added in a fixed order.
template <typename T, int kD, int kColumns>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ TreeVerifyParams p) {
  constexpr int kGroupThreads = kColumns / 4, kGroups = kCombineThreads / kGroupThreads;
  extern __shared__ float weights[];  // [chunks of the request], at most bs * num_splits
  __shared__ float4 sums[kGroups][kGroupThreads];
  __shared__ float reduced[2][kCombineThreads / 32];
  const int t = blockIdx.x, head = blockIdx.y, tid = threadIdx.x, lane = tid & 31;
  const int group = tid / kGroupThreads, d = blockIdx.z * kColumns + tid % kGroupThreads * 4;
  const RowChunks chunks = find_row_chunks(p, t);
  // Everything above reads only inputs. Every block waits: otherwise the op could end before its partials.
  wait_for_primary();
  if (chunks.request < 0 || chunks.num_chunks <= 1) return;

  const int64_t first = (int64_t(chunks.first_item) * p.num_nodes + chunks.node) * p.h_q + head;
  const int64_t stride = int64_t(p.num_nodes) * p.h_q;
  const float* partial = static_cast<const float*>(p.workspace) + first * kD + d;
  float4 ahead[kCombineLoads];
#pragma unroll
  for (int i = 0; i < kCombineLoads; ++i) {
    const int c = group + i * kGroups;
    if (group < kGroups && c < chunks.num_chunks)
      ahead[i] = *reinterpret_cast<const float4*>(partial + c * stride * kD);
  }
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
  const float base = exponent_base(top);
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

  float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
  if (group < kGroups) {
#pragma unroll
    for (int i = 0; i < kCombineLoads; ++i) {
      const int c = group + i * kGroups;
      if (c < chunks.num_chunks) add_weighted(acc, weights[c], ahead[i]);
    }
#pragma unroll 8
    for (int c = group + kCombineLoads * kGroups; c < chunks.num_chunks; c += kGroups)
      add_weighted(acc, weights[c], *reinterpret_cast<const float4*>(partial + c * stride * kD));
    sums[group][tid % kGroupThreads] = acc;
  }
  __syncthreads();
  if (group != 0) return;
#pragma unroll
  for (int g = 1; g < kGroups; ++g) add_weighted(acc, 1.f, sums[g][tid]);
  write_combined<T>(p, t, head, d, acc, result);
}

// Combine for few chunks per row: each thread computes all of its rows' weights itself. Grid: x = row of q, y = group
// of query heads. A head takes d_v / 4 threads, and a block takes as many heads at a time as fit, kHeads times.
constexpr int kFewSplits = 8;

template <int kD>
constexpr int kCombineHeads = kCombineThreads / (kD / 4);

template <typename T, int kD, int kHeads>
__global__ void __launch_bounds__(kCombineThreads) combine_few_kernel(const __grid_constant__ TreeVerifyParams p) {
  constexpr int kHeadThreads = kD / 4, kBatch = kCombineLoads / kHeads;  // chunks whose loads are in flight
  const int t = blockIdx.x, head0 = blockIdx.y * kCombineHeads<kD> * kHeads + threadIdx.x / kHeadThreads;
  const int d = threadIdx.x % kHeadThreads * 4;
  const RowChunks chunks = find_row_chunks(p, t);
  wait_for_primary();
  if (chunks.request < 0 || chunks.num_chunks <= 1) return;
  if (threadIdx.x / kHeadThreads >= kCombineHeads<kD>) return;

  const int64_t stride = int64_t(p.num_nodes) * p.h_q;
  float top[kHeads], sum[kHeads];
  float4 acc[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) top[h] = neg_inf(), sum[h] = 0.f, acc[h] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int c0 = 0; c0 < chunks.num_chunks; c0 += kBatch) {
    const int64_t first = (int64_t(chunks.first_item + c0) * p.num_nodes + chunks.node) * p.h_q;
    float lse[kHeads][kBatch];
    float4 v[kHeads][kBatch];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = head0 + h * kCombineHeads<kD>;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t at = first + head + i * stride;
        lse[h][i] = neg_inf(), v[h][i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (head >= p.h_q || c0 + i >= chunks.num_chunks) continue;
        lse[h][i] = partial_lse(p)[at];
        v[h][i] = *reinterpret_cast<const float4*>(static_cast<const float*>(p.workspace) + at * kD + d);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float before = top[h];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) top[h] = fmaxf(top[h], lse[h][i]);
      const float base = exponent_base(top[h]), shrink = fast_exp2(before - base);
      sum[h] *= shrink, acc[h].x *= shrink, acc[h].y *= shrink, acc[h].z *= shrink, acc[h].w *= shrink;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = fast_exp2(lse[h][i] - base);
        sum[h] += weight;
        add_weighted(acc[h], weight, v[h][i]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = head0 + h * kCombineHeads<kD>;
    if (head < p.h_q) write_combined<T>(p, t, head, d, acc[h], finish_row(top[h], sum[h], sink_logit2(p, head)));
  }
}

}  // namespace ddtree
