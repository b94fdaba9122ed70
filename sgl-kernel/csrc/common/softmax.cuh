// Parts of the online softmax. Logits are in base 2 (scaled by log2 e), because exp2 is one instruction.
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

// Reductions over the four lanes that hold one row of an mma accumulator.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffff, v, 2));
}

__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffff, v, 1);
  return v + __shfl_xor_sync(0xffffffff, v, 2);
}

// Turns a raw q.k into a base-2 logit. Without a cap that is s * factor. With a cap, capped() gives the logit and
// factor is 1. tanh is computed from exp2, because the cap would multiply tanh.approx's error of 2^-11.
struct LogitScale {
  float factor, in, cap;  // cap is 0 if there is none

  // For kInOnly: `in` serves both cases, which saves a register.
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

// Raises the running maximum only if a tile exceeds it by more than 2^8. Probabilities stay below 2^8, in range for
// fp16, and the accumulators are rarely rescaled. Returns the factor to multiply them by.
constexpr float kRescaleThreshold = 8.f;

__device__ __forceinline__ float raise_max(float& row_max, float top, float threshold = kRescaleThreshold) {
  if (!(top > row_max + threshold)) return 1.f;
  const float shrink = fast_exp2(row_max - top);  // row_max == -inf: 0, and the accumulators are 0 as well
  row_max = top;
  return shrink;
}

// What to subtract from a row's exponents. It is 0 if the row has attended to nothing, so that exp2(-inf - 0) is 0.
__device__ __forceinline__ float exponent_base(float row_max) { return row_max == neg_inf() ? 0.f : row_max; }

// The result of one attention row.
struct RowResult {
  float scale;  // o = accumulator * scale
  float lse2;   // base-2 LSE
};

// `sink2` is the base-2 sink logit, or -inf if there is none. A row that attends to nothing and has no sink gets scale
// 0 and LSE -inf.
__device__ __forceinline__ RowResult finish_row(float row_max, float row_sum, float sink2) {
  const float top = fmaxf(row_max, sink2);
  if (top == neg_inf()) return {0.f, neg_inf()};
  const float shrink = row_max == neg_inf() ? 0.f : exp2f(row_max - top);
  const float total = row_sum * shrink + (sink2 == neg_inf() ? 0.f : exp2f(sink2 - top));
  return {shrink / total, top + log2f(total)};
}

}  // namespace ddtree
