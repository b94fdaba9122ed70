// The softmax of the sm_90 kernels: a warpgroup holds the scores of 64 rows as wgmma leaves them (wgmma.cuh).
#pragma once

#include "common/softmax.cuh"
#include "tree_verify/tree_mask.cuh"

namespace ddtree {

// Sets the scores of tokens that a row does not attend to to -inf. A warp holds 16 rows; this lane looks up those of
// node `node` = that of row lane % 16, and 32 tokens at a time.
template <int kTileN>
__device__ __forceinline__ void mask_scores(const TreeVerifyParams& p, const WorkItem& work, int node, int token0,
                                            float (&s)[kTileN / 2]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < (kTileN + 63) / 64; ++i) {
    const int begin = token0 + i * 64 + lane / 16 * 32, left = work.end - begin;
    uint32_t row_mask = tree_mask(p, work.request, node, begin);
    if (left < 32) row_mask &= left > 0 ? (1u << left) - 1 : 0u;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = i * 2; w < min(i * 2 + 2, kTileN / 32); ++w) {
        const uint32_t mask = __shfl_sync(0xffffffff, row_mask, w % 2 * 16 + half * 8 + lane / 4) >> lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(mask >> (n * 8 + e) & 1)) s[(w * 4 + n) * 4 + half * 2 + e] = neg_inf();
        }
      }
    }
  }
}

// Turns the scores of this thread's two rows into probabilities relative to 2^row_max, and updates the sums. `factor`
// turns a score into a base-2 logit. The maximum is kept `headroom` below the largest logit, and is raised if that
// exceeds it by more than `threshold`. Returns what to multiply earlier results by. A warp has its
// scheduler almost to itself, so rows are interleaved and each has several chains of maxima and sums.
template <int kTileN>
__device__ __forceinline__ float2 online_softmax(float (&s)[kTileN / 2], const float (&factor)[2], float headroom,
                                                 float threshold, float (&row_max)[2], float (&row_sum)[2]) {
  float top[2][4];  // [half][chain]
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int chain = 0; chain < 4; ++chain) top[half][chain] = s[chain / 2 * 4 + half * 2 + chain % 2];
  }
#pragma unroll
  for (int n = 2; n < kTileN / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 2; ++e) top[half][n % 2 * 2 + e] = fmaxf(top[half][n % 2 * 2 + e], s[n * 4 + half * 2 + e]);
    }
  }
  float shrink[2], base[2], sum[2][2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    shrink[half] = quad_max(fmaxf(fmaxf(top[half][0], top[half][1]), fmaxf(top[half][2], top[half][3])));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shrink[half] = raise_max(row_max[half], fmaf(shrink[half], factor[half], -headroom), threshold);
    base[half] = exponent_base(row_max[half]);
  }
#pragma unroll
  for (int n = 0; n < kTileN / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[n * 4 + half * 2 + e];
        x = fast_exp2(fmaf(x, factor[half], -base[half]));
        sum[half][e] += x;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) row_sum[half] = row_sum[half] * shrink[half] + (sum[half][0] + sum[half][1]);
  return make_float2(shrink[0], shrink[1]);
}

}  // namespace ddtree
