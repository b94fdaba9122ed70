// mbarrier objects in shared memory (sm_80 and later), for producers and consumers that must not wait for each other as
// a block barrier makes them. A waiter names the parity of the phase it waits for; on a fresh barrier the phase of
// parity 1 counts as complete.
#pragma once

#include <cstdint>

namespace ddtree {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}

// Arrives once all cp.async copies that this thread has queued are written. Counts as one of the init's arrivals.
__device__ __forceinline__ void mbarrier_arrive_after_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace ddtree
