// Launcher that the instantiations specialize; ../launch.cuh calls it on sm_90.
#pragma once

#include "../launch.cuh"
#include "gqa_sm90.cuh"

namespace ddtree {

template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_sm90(const TreeVerifyParams& p, const Launch& launch) {
  if constexpr (kD <= 128) {
    using Wide = GqaSm90Traits<T, kFp8, kD, 2>;
    if (packed_rows(p.max_rows, p.h_q, p.h_kv) > 64)
      return launch_partial<Wide>(gqa_sm90_partial_kernel<Wide>, p, launch);
  }
  using Traits = GqaSm90Traits<T, kFp8, kD, 1>;
  return launch_partial<Traits>(gqa_sm90_partial_kernel<Traits>, p, launch);
}

}  // namespace ddtree
