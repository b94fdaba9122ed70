// Launcher that the instantiations specialize; ../launch.cuh calls it on sm_90.
#pragma once

#include "../launch.cuh"
#include "mla_sm90.cuh"

namespace ddtree {

template <typename T, bool kFp8>
cudaError_t launch_mla_sm90(const TreeVerifyParams& p, const Launch& launch) {
  using Traits = MlaSm90Traits<T, kFp8>;
  return launch_partial<Traits>(mla_sm90_partial_kernel<Traits>, p, launch);
}

}  // namespace ddtree
