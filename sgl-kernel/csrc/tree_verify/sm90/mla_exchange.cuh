// What the two consumer groups of sm_90's MLA kernels pass each other through the mailbox in shared memory. Thread t of
// one group and thread t of the other hold the same rows.
#pragma once

#include "common/softmax.cuh"

namespace ddtree {

__device__ __forceinline__ void store_shared_16(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_shared_pair(uint32_t to, const float (&v)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(v[0]), "f"(v[1]) : "memory");
}

__device__ __forceinline__ void load_shared_pair(uint32_t from, float (&v)[2]) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(from) : "memory");
}

// Takes the maxima that a thread of the other group posted. Returns the factors to multiply O by, bit for bit what the
// softmax returned there.
__device__ __forceinline__ float2 take_maxima(uint32_t from, float (&row_max)[2], float (&row_sum)[2]) {
  float raised[2], shrink[2];
  load_shared_pair(from, raised);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shrink[half] = raised[half] == row_max[half] ? 1.f : fast_exp2(row_max[half] - raised[half]);
    row_max[half] = raised[half];
    row_sum[half] *= shrink[half];
  }
  return make_float2(shrink[0], shrink[1]);
}

// Adds the sums of the other group, which summed its own tiles. Both groups end with the same maximum. `thread`: in the
// group. Uses the block's barrier of the groups, for the second and third time.
template <typename Block>
__device__ __forceinline__ void add_other_sums(const Block& block, uint32_t mailbox, int group, int thread,
                                               float (&row_sum)[2]) {
  const uint32_t sums = mailbox + thread * 8;
  float other[2];
  block.meet(1);  // the last reader of the mailbox has finished
  store_shared_pair(sums + group * 1024, row_sum);
  block.meet(2);
  load_shared_pair(sums + (group ^ 1) * 1024, other);
#pragma unroll
  for (int half = 0; half < 2; ++half) row_sum[half] = quad_sum(row_sum[half] + other[half]);
}

}  // namespace ddtree
