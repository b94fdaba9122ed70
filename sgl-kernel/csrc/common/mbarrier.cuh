// mbarrier (sm_90): a barrier in shared memory whose arriving and waiting threads may differ. A phase completes after
// `count` arrivals. A waiting thread names the parity of the phase, 0 for the first. Arriving releases and waiting
// acquires.
#pragma once

#include <cstdint>

namespace ddtree {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Arrives once all cp.async copies that this thread has issued have landed. Counts as one of `count` arrivals.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and keeps the phase open until bulk copies have brought `bytes` bytes.
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Keeps the phase open until bulk copies have brought `bytes` bytes. Does not arrive.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Copies `bytes` bytes, a multiple of 16, from global to shared memory, for a phase that expects them.
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void* src, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(barrier)
               : "memory");
}

// Makes initialized barriers visible to bulk copies.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// The position in a ring of stages. `parity` is that of the phase that completes when the stage's data arrives.
template <int kStages>
struct RingPosition {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void skip(int count) {
    stage += count;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
};

}  // namespace ddtree
