// Launches the GQA partial kernel of sm_90. The instantiations specialize it; kernel_launch.cuh calls it.
#pragma once

#include "tree_verify/kernel_launch.cuh"
#include "tree_verify/sm90/gqa_fp8_sm90.cuh"
#include "tree_verify/sm90/gqa_sm90.cuh"

namespace ddtree {

// Launches the kernel with one block per task, or fewer that take several (gqa_tasks.cuh). Tasks are ordered as the
// blocks of launch_partial().
template <typename Traits, typename Kernel>
cudaError_t launch_tasks(Kernel kernel, const TreeVerifyParams& p, const Launch& launch, const Pages& pages) {
  int blocks = 0;
  DDTREE_RETURN_IF_FAILED(task_blocks<Traits>(p, &blocks));
  return launch_grid<Traits>(dim3(blocks), kernel, p, launch, pages);
}

// For 16-bit KV and two warpgroups. The kernel for several tasks runs only if a block has several: with one task per
// block it takes 4 to 6% longer.
template <typename T, int kD, bool kPaged>
cudaError_t launch_gqa_wide_sm90(const TreeVerifyParams& p, const Launch& launch, const Pages& pages) {
  using One = GqaSm90Traits<T, kD, 2, kPaged>;
  using Several = GqaSm90Traits<T, kD, 2, kPaged, true>;
  int blocks = 0;
  DDTREE_RETURN_IF_FAILED(task_blocks<Several>(p, &blocks));
  return blocks < num_tasks<Several>(p) ? launch_tasks<Several>(gqa_sm90_tasks_kernel<Several>, p, launch, pages)
                                        : launch_partial<One>(gqa_sm90_partial_kernel<One>, p, launch, pages);
}

template <typename T, bool kSplit, int kD, int kWarpgroups>
cudaError_t launch_gqa_fp8_sm90(const TreeVerifyParams& p, const Launch& launch) {
  return with_pages(p, launch, [&](auto paged, const Pages& pages) {
    using Traits = GqaFp8Sm90Traits<T, kSplit, kD, kWarpgroups, decltype(paged)::value>;
    return launch_tasks<Traits>(gqa_fp8_sm90_partial_kernel<Traits>, p, launch, pages);
  });
}

template <typename T, bool kSplit, int kD>
cudaError_t launch_gqa_fp8_sm90(const TreeVerifyParams& p, const Launch& launch) {
  if constexpr (kD <= 128) {
    if (packed_rows(p.num_nodes, p.h_q, p.h_kv) > 64) return launch_gqa_fp8_sm90<T, kSplit, kD, 2>(p, launch);
  }
  return launch_gqa_fp8_sm90<T, kSplit, kD, 1>(p, launch);
}

template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_sm90(const TreeVerifyParams& p, const Launch& launch) {
  if constexpr (kFp8) {
    return exact_fp8() ? launch_gqa_fp8_sm90<T, true, kD>(p, launch) : launch_gqa_fp8_sm90<T, false, kD>(p, launch);
  } else {
    if constexpr (kD <= 128) {
      if (packed_rows(p.num_nodes, p.h_q, p.h_kv) > 64)
        return with_pages(p, launch, [&](auto paged, const Pages& pages) {
          return launch_gqa_wide_sm90<T, kD, decltype(paged)::value>(p, launch, pages);
        });
    }
    using Traits = GqaSm90Traits<T, kD, 1, false>;  // memory is the limit, and gathering is faster
    return launch_partial<Traits>(gqa_sm90_partial_kernel<Traits>, p, launch, Pages{});
  }
}

}  // namespace ddtree
