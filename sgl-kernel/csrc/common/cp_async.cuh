// cp.async (sm_80 and later): 16-byte copies from global to shared memory that bypass registers.
#pragma once

#include <cstdint>

namespace ddtree {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// An address that the compiler keeps in a register instead of recomputing it from special registers.
__device__ __forceinline__ uint32_t pinned_smem_address(const void* p) {
  uint32_t address;
  asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(smem_address(p)));
  return address;
}

// Copies 16 bytes. If !valid, writes 16 zero bytes and does not read `src`. Masked-out tokens must be zero, because
// their V is multiplied by a zero probability and 0 * NaN is NaN.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all copies of this thread.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ddtree
