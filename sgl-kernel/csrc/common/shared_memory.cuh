// Shared memory by 32-bit address. Plain C++ accesses make the compiler form the address anew from special registers in
// hot loops that are short of registers.
#pragma once

#include <cstdint>

namespace ddtree {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// An address that the compiler keeps instead of forming it anew.
__device__ __forceinline__ uint32_t pinned_smem_address(const void* p) {
  uint32_t address;
  asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(smem_address(p)));
  return address;
}

// a * b + c that the compiler leaves inside a loop.
__device__ __forceinline__ uint32_t multiply_add(int a, int b, uint32_t c) {
  uint32_t v;
  asm volatile("mad.lo.u32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_float4(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared_u32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_u32(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ float load_shared_float(uint32_t address) {
  return __uint_as_float(load_shared_u32(address));
}

__device__ __forceinline__ void store_shared_float(uint32_t address, float v) {
  store_shared_u32(address, __float_as_uint(v));
}

}  // namespace ddtree
