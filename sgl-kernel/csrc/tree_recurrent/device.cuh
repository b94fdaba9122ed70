// What the kernels for recurrent layers share: reads by runtime type, index arrays, and operands in two bf16 parts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/mma_sm80.cuh"
#include "tree_recurrent/params.h"
#include "tree_recurrent/parent.h"

namespace ddtree {

__device__ __forceinline__ float load_float(DType type, const void* data, int64_t i) {
  switch (type) {
    case DType::kBFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case DType::kFloat16: return __half2float(static_cast<const __half*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

// A float as it is in memory, to be decoded once other loads are under way too. A missing array gives 0.
__device__ __forceinline__ uint32_t load_bits(const FloatArray& array, int64_t row, int64_t head) {
  const int64_t i = row * array.stride_t + head * array.stride_h;
  if (array.data == nullptr) return 0;
  if (array.type == DType::kFloat32) return static_cast<const uint32_t*>(array.data)[i];
  return static_cast<const uint16_t*>(array.data)[i];
}

__device__ __forceinline__ float decode_bits(DType type, uint32_t bits) {
  switch (type) {
    case DType::kBFloat16: return __uint_as_float(bits << 16);
    case DType::kFloat16: return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    default: return __uint_as_float(bits);
  }
}

__device__ __forceinline__ float load_float(const FloatArray& array, int64_t row, int64_t head, int64_t i = 0) {
  return load_float(array.type, array.data, row * array.stride_t + head * array.stride_h + i);
}

// A missing array holds -1: no slot, no position.
__device__ __forceinline__ int64_t load_index(const IndexArray& array, int64_t i) {
  if (array.data == nullptr) return -1;
  return array.is_64 ? static_cast<const int64_t*>(array.data)[i] : static_cast<const int32_t*>(array.data)[i];
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > kSoftplusThreshold ? x : log1pf(expf(x)); }
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fffffff); }

__device__ __forceinline__ float low_float(uint32_t bf16x2) { return __uint_as_float(bf16x2 << 16); }
__device__ __forceinline__ float high_float(uint32_t bf16x2) { return __uint_as_float(bf16x2 & 0xffff0000); }

// Two floats as bf16 and what that leaves, again as bf16: together 16 bits of mantissa, an error of 2^-18 at most.
__device__ __forceinline__ void split2(float x, float y, uint32_t& hi, uint32_t& lo) {
  hi = pack2<__nv_bfloat16>(x, y);
  lo = pack2<__nv_bfloat16>(x - low_float(hi), y - high_float(hi));
}

// Four 8x8 matrices to shared memory, each transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Volatile, so that the loads stay where they are written: long before their use.
__device__ __forceinline__ uint4 load_global_16(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

constexpr int kVectorBytes = 16;  // of one access to memory

template <typename T>
__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[kVectorBytes / sizeof(T)]) {
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
__device__ __forceinline__ uint4 pack(const float (&x)[kVectorBytes / sizeof(T)]) {
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

}  // namespace ddtree
