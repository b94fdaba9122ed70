// Pieces of the online softmax. Logits are in base 2 (scaled by log2 e), so that exp2 is one instruction.
#pragma once

#include <cuda_runtime.h>

namespace ddtree {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The four lanes that hold one row of an mma accumulator.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffff, v, 2));
}

__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffff, v, 1);
  return v + __shfl_xor_sync(0xffffffff, v, 2);
}

// Raw q.k to a base-2 logit: s * factor, or with a cap first s = cap * tanh(s * in), then factor 1. tanh goes through
// exp2: tanh.approx's error of 2^-11 would be multiplied by the cap.
struct LogitScale {
  float factor, in, cap;  // cap == 0: none

  // For kInOnly: both cases through `in`, one register less to keep.
  __device__ __forceinline__ float operator()(float s) const {
    if (cap == 0.f) return s * in;
    return capped(s);
  }

  __device__ __forceinline__ float capped(float s) const {
    return cap - __fdividef(2.f * cap, 1.f + fast_exp2(s * in));
  }
};

template <bool kInOnly = false>
__device__ __forceinline__ LogitScale make_logit_scale(float sm_scale, float k_scale, float logit_cap) {
  if (logit_cap > 0.f) return {1.f, 2.f * kLog2E * sm_scale * k_scale / logit_cap, logit_cap * kLog2E};
  return {sm_scale * k_scale * kLog2E, kInOnly ? sm_scale * k_scale * kLog2E : 0.f, 0.f};
}

// The running maximum is raised only when a tile exceeds it by more than 2^8 (probabilities stay below 2^8, in range
// for fp16), so that the accumulators are rarely rescaled. Returns what to multiply them by.
constexpr float kRescaleThreshold = 8.f;

__device__ __forceinline__ float raise_max(float& row_max, float top) {
  if (!(top > row_max + kRescaleThreshold)) return 1.f;
  const float shrink = fast_exp2(row_max - top);  // row_max == -inf: 0, and the accumulators are 0 as well
  row_max = top;
  return shrink;
}

// The subtrahend of a row's exponents. Nothing attended yet: every exp2 is exp2(-inf).
__device__ __forceinline__ float exponent_base(float row_max) { return row_max == neg_inf() ? 0.f : row_max; }

// Running maximum, sum of one attention row, and what turns an unnormalized accumulator into its output.
struct RowResult {
  float scale;  // o = accumulator * scale
  float lse2;   // base-2 LSE
};

// `sink2`: the base-2 sink logit, -inf for none. Nothing attended (sum 0 and no sink) gives scale 0 and LSE -inf.
__device__ __forceinline__ RowResult finish_row(float row_max, float row_sum, float sink2) {
  const float top = fmaxf(row_max, sink2);
  if (top == neg_inf()) return {0.f, neg_inf()};
  const float shrink = row_max == neg_inf() ? 0.f : exp2f(row_max - top);
  const float total = row_sum * shrink + (sink2 == neg_inf() ? 0.f : exp2f(sink2 - top));
  return {shrink / total, top + log2f(total)};
}

}  // namespace ddtree
