// Launches the MLA partial kernel of sm_90. The instantiations specialize it; kernel_launch.cuh calls it.
#pragma once

#include "tree_verify/kernel_launch.cuh"
#include "tree_verify/sm90/mla_fp8_sm90.cuh"
#include "tree_verify/sm90/mla_sm90.cuh"

namespace ddtree {

template <typename T, bool kFp8>
cudaError_t launch_mla_sm90(const TreeVerifyParams& p, const Launch& launch) {
  return with_pages(p, launch, [&](auto paged, const Pages& pages) {
    constexpr bool kPaged = decltype(paged)::value;
    if constexpr (kFp8) {
      using Fast = MlaFp8Sm90Traits<T, false, kPaged>;
      using Exact = MlaFp8Sm90Traits<T, true, kPaged>;
      return exact_fp8() ? launch_partial<Exact>(mla_fp8_sm90_partial_kernel<Exact>, p, launch, pages)
                         : launch_partial<Fast>(mla_fp8_sm90_partial_kernel<Fast>, p, launch, pages);
    } else {
      using Traits = MlaSm90Traits<T, kPaged>;
      return launch_partial<Traits>(mla_sm90_partial_kernel<Traits>, p, launch, pages);
    }
  });
}

}  // namespace ddtree
