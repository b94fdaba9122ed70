// Launches the GQA partial kernel of sm_90. The instantiations specialize it; kernel_launch.cuh calls it.
#pragma once

#include "tree_verify/kernel_launch.cuh"
#include "tree_verify/sm90/gqa_fp8_sm90.cuh"
#include "tree_verify/sm90/gqa_sm90.cuh"

namespace ddtree {

template <typename T, bool kSplit, int kD>
cudaError_t launch_gqa_fp8_sm90(const TreeVerifyParams& p, const Launch& launch) {
  if constexpr (kD <= 128) {
    using Wide = GqaFp8Sm90Traits<T, kSplit, kD, 2>;
    if (packed_rows(p.num_nodes, p.h_q, p.h_kv) > 64)
      return launch_paged<Wide>(gqa_fp8_sm90_partial_kernel<Wide>, p, launch);
  }
  using Traits = GqaFp8Sm90Traits<T, kSplit, kD, 1>;
  return launch_paged<Traits>(gqa_fp8_sm90_partial_kernel<Traits>, p, launch);
}

template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_sm90(const TreeVerifyParams& p, const Launch& launch) {
  if constexpr (kFp8) {
    return exact_fp8() ? launch_gqa_fp8_sm90<T, true, kD>(p, launch) : launch_gqa_fp8_sm90<T, false, kD>(p, launch);
  } else {
    if constexpr (kD <= 128) {
      using Wide = GqaSm90Traits<T, kD, 2>;
      if (packed_rows(p.num_nodes, p.h_q, p.h_kv) > 64)
        return launch_paged<Wide>(gqa_sm90_partial_kernel<Wide>, p, launch);
    }
    using Traits = GqaSm90Traits<T, kD, 1>;
    return launch_paged<Traits>(gqa_sm90_partial_kernel<Traits>, p, launch);
  }
}

}  // namespace ddtree
