// Launches the MLA partial kernel of sm_90. The instantiations specialize it; kernel_launch.cuh calls it.
#pragma once

#include "tree_verify/kernel_launch.cuh"
#include "tree_verify/sm90/mla_sm90.cuh"

namespace ddtree {

template <typename T, bool kFp8>
cudaError_t launch_mla_sm90(const TreeVerifyParams& p, const Launch& launch) {
  using Traits = MlaSm90Traits<T, kFp8>;
  return launch_partial<Traits>(mla_sm90_partial_kernel<Traits>, p, launch);
}

}  // namespace ddtree
