// Operands of fp8 products in the common kernels: mma.sync m16n8k32, e4m3 x e4m3. Q and P are rounded as in sm_90's
// kernels (e4m3_scale, kE4m3Headroom).
//
// P V contracts tokens, and a fragment of B holds four consecutive ones per dimension, but a pool's row holds one
// token. ldmatrix.trans gives each lane two tokens of two dimensions per register. One byte permute per register of B
// then separates the dimensions. On sm_120 that is two permutes (4 cycles of a scheduler's integer pipe) and four
// additions per product (16 cycles of its tensor core), so they hide behind the products, and no V is copied or
// converted. P in bf16 would need V in 16 bits: two conversions per register, and products that take twice as long.
#pragma once

#include "common/fp8.cuh"
#include "common/mma_sm80.cuh"
#include "common/softmax.cuh"

namespace ddtree {

// Of eight values in 16 bits.
template <typename T>
__device__ __forceinline__ float abs_max(uint4 v) {
  float top = 0.f;
#pragma unroll
  for (const uint32_t word : {v.x, v.y, v.z, v.w}) {
    const float2 pair = unpack2<T>(word);
    top = fmaxf(top, fmaxf(fabsf(pair.x), fabsf(pair.y)));
  }
  return top;
}

// Four values in 16 bits, times `scale`, to e4m3.
template <typename T>
__device__ __forceinline__ uint32_t round_e4m3(uint32_t low, uint32_t high, float scale) {
  const float2 a = unpack2<T>(low), b = unpack2<T>(high);
  return to_e4m3x4(a.x * scale, a.y * scale, b.x * scale, b.y * scale);
}

// A quarter of 32 kSteps dimensions of a row of Q. Four lanes share the row; lane % 4 == c holds dimensions
// 32 k + 16 i + 4 c .. + 3.
template <typename T, int kSteps>
struct QuarterRow {
  uint2 values[kSteps][2];

  __device__ __forceinline__ void load(const T* row, bool exists) {
    row += threadIdx.x % 4 * 4;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        values[k][i] = exists ? *reinterpret_cast<const uint2*>(row + k * 32 + i * 16) : make_uint2(0, 0);
    }
  }

  __device__ __forceinline__ float abs_max() const {
    float top = 0.f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint2* const v = values[k];
      top = fmaxf(top, ddtree::abs_max<T>(make_uint4(v[0].x, v[0].y, v[1].x, v[1].y)));
    }
    return top;
  }

  // Rounds the row, times `scale`, to its half of fragments of A: half 0 is row lane / 4, half 1 is row lane / 4 + 8.
  template <int kCount>
  __device__ __forceinline__ void round(float scale, uint32_t (&frag)[kCount][4], int half) const {
    static_assert(kCount >= kSteps);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) frag[k][i * 2 + half] = round_e4m3<T>(values[k][i].x, values[k][i].y, scale);
    }
  }
};

// raise_max() for weights that are rounded to e4m3. They use the whole range of the type, so there is no threshold.
__device__ __forceinline__ float raise_max_e4m3(float& row_max, float top) {
  return raise_max(row_max, top - kE4m3Headroom, 0.f);
}

// The fragment of A from the weights of 32 tokens, four fragments of D. Byte 4 c + 2 i + e of a half's 16 tokens is
// token 8 i + 2 c + e, because lane c has that token's weight. ValuesE4m3 has V in the same order.
__device__ __forceinline__ void weights_e4m3(const float (&s)[4][4], uint32_t (&p)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const low = s[i / 2 * 2] + i % 2 * 2;
    const float* const high = s[i / 2 * 2 + 1] + i % 2 * 2;
    p[i] = to_e4m3x4(low[0], low[1], high[0], high[1]);
  }
}

// Fragments of B from what ldmatrix_x4_trans loads of 32 tokens and 16 dimensions of V: lane 4 g + c has tokens
// 8 i + 2 c, + 1 of dimensions 2 g, + 1 in register i.
struct ValuesE4m3 {
  uint32_t even[2], odd[2];  // dimensions 2 n and 2 n + 1

  __device__ __forceinline__ explicit ValuesE4m3(const uint32_t (&loaded)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      even[i] = __byte_perm(loaded[2 * i], loaded[2 * i + 1], 0x6420);
      odd[i] = __byte_perm(loaded[2 * i], loaded[2 * i + 1], 0x7531);
    }
  }

  // Adds P V in fp32. The accumulators of fp8 products may keep as few as 14 bits, which is enough for 32 tokens, but
  // not for thousands.
  __device__ __forceinline__ void add_product(float (&o_even)[4], float (&o_odd)[4], const uint32_t (&p)[4]) const {
    float a[4] = {}, b[4] = {};
    mma_m16n8<__nv_fp8_e4m3>(a, p, even[0], even[1]);
    mma_m16n8<__nv_fp8_e4m3>(b, p, odd[0], odd[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) o_even[i] += a[i], o_odd[i] += b[i];
  }
};

// The four consecutive dimensions that a lane has of one of its two rows, from the accumulators of a ValuesE4m3.
__device__ __forceinline__ float4 even_odd(const float (&even)[4], const float (&odd)[4], int half) {
  return make_float4(even[half * 2], odd[half * 2], even[half * 2 + 1], odd[half * 2 + 1]);
}

}  // namespace ddtree
