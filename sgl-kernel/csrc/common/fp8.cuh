// e4m3 to bf16 / fp16. Both hold every e4m3 value exactly, so KV scales can be applied to S and O instead.
#pragma once

#include <cuda_fp8.h>

#include "mma_sm80.cuh"

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

}  // namespace ddtree
