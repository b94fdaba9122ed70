// Converts between e4m3 and wider types, and multiplies in e4m3. bf16 and fp16 hold every e4m3 value exactly, so the KV
// scales are applied to S and O instead.
#pragma once

#include <cuda_fp8.h>

#include "common/mma_sm80.cuh"

namespace ddtree {

// Two e4m3 bytes to two T.
template <typename T>
__device__ __forceinline__ uint32_t e4m3x2_to_16bit(uint16_t v) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(v, __NV_E4M3);
  if constexpr (std::is_same_v<T, __half>) {
    return uint32_t(h.x) | uint32_t(h.y) << 16;
  } else {
    const float2 f = __half22float2(__half2(h));
    return pack2<T>(f.x, f.y);
  }
}

// Sixteen e4m3 bytes to sixteen T (two 16-byte vectors).
template <typename T>
__device__ __forceinline__ void e4m3x16_to_16bit(uint4 in, uint4& lo, uint4& hi) {
  lo.x = e4m3x2_to_16bit<T>(in.x & 0xffff), lo.y = e4m3x2_to_16bit<T>(in.x >> 16);
  lo.z = e4m3x2_to_16bit<T>(in.y & 0xffff), lo.w = e4m3x2_to_16bit<T>(in.y >> 16);
  hi.x = e4m3x2_to_16bit<T>(in.z & 0xffff), hi.y = e4m3x2_to_16bit<T>(in.z >> 16);
  hi.z = e4m3x2_to_16bit<T>(in.w & 0xffff), hi.w = e4m3x2_to_16bit<T>(in.w >> 16);
}

// Two values to e4m3 bytes, rounded to nearest; a is the low byte. Values beyond 448 become 448.
__device__ __forceinline__ uint32_t to_e4m3x2(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint32_t to_e4m3x4(float a, float b, float c, float d) {
  return to_e4m3x2(a, b) | to_e4m3x2(c, d) << 16;
}

// Splits two values below 256 into hi + lo, both e4m3. Eight bits of a normal value are kept, which is all of bf16.
__device__ __forceinline__ void split_e4m3x2(float2 v, uint32_t& hi, uint32_t& lo) {
  hi = to_e4m3x2(v.x, v.y);
  const float2 kept = unpack2<__half>(e4m3x2_to_16bit<__half>(hi));
  lo = to_e4m3x2(v.x - kept.x, v.y - kept.y);
}

// Four values in [0, 448) to hi + lo, each of four e4m3 bytes.
__device__ __forceinline__ void split_e4m3x4(float a, float b, float c, float d, uint32_t& hi, uint32_t& lo) {
  const __half2 halves[2] = {__floats2half2_rn(a, b), __floats2half2_rn(c, d)};
  hi = lo = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t kept = __nv_cvt_halfraw2_to_fp8x2(halves[i], __NV_SATFINITE, __NV_E4M3);
    const __half2 rest = __hsub2(halves[i], __half2(__nv_cvt_fp8x2_to_halfraw2(kept, __NV_E4M3)));
    hi |= kept << 16 * i;
    lo |= uint32_t(__nv_cvt_halfraw2_to_fp8x2(rest, __NV_SATFINITE, __NV_E4M3)) << 16 * i;
  }
}

// The power of two that brings a row with absolute maximum `top` into [1, 2), for conversion from bf16 to fp16. Its
// reciprocal is a power of two as well, so undoing the scale is exact.
__device__ __forceinline__ float range_scale(float top) {
  const uint32_t exponent = __float_as_uint(top) >> 23;
  return exponent == 0 || exponent >= 254 ? 1.f : __uint_as_float((254 - exponent) << 23);
}

// The power of two that brings a row of Q with absolute maximum `top` into [128, 256) before it is rounded to e4m3.
__device__ __forceinline__ float e4m3_scale(float top) { return 128.f * range_scale(top); }

// 1 / scale for a power of two, without the branches of a division.
__device__ __forceinline__ float reciprocal_of_power(float scale) {
  return __uint_as_float(0x7f000000 - __float_as_uint(scale));
}

// Softmax weights that are rounded to e4m3 are relative to 2^-kE4m3Headroom of the row's largest, which becomes 256.
constexpr float kE4m3Headroom = 8.f;

__device__ __forceinline__ float bf16x2_abs_max(uint32_t v) {
  return fmaxf(fabsf(__uint_as_float(v << 16)), fabsf(__uint_as_float(v & 0xffff0000)));
}

__device__ __forceinline__ uint32_t bf16x2_to_half2(uint32_t v, float scale) {
  return pack2<__half>(__uint_as_float(v << 16) * scale, __uint_as_float(v & 0xffff0000) * scale);
}

// mma.sync with k of 32 bytes: m16n8k16 in 16-bit types, m16n8k32 in e4m3 (__nv_fp8_e4m3). In e4m3 the fragments of A
// and B hold four values where those of mma_m16n8k16 hold two. sm_120 multiplies e4m3; on sm_90 and sm_100 ptxas
// converts the fragments to fp16 first.
template <typename T>
__device__ __forceinline__ void mma_m16n8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    mma_m16n8k16<T>(d, a, b0, b1);
  }
}

}  // namespace ddtree
