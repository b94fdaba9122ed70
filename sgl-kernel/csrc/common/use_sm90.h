// The switch between the kernels in the sm90/ folders (wgmma) and the common ones.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

namespace ddtree {

// Whether the current device runs the kernels in sm90/. SGLANG_DDTREE_SM90=0 turns them off, so that tests and timings
// can run the common kernels on sm_90.
inline bool use_sm90() {
  const char* wanted = std::getenv("SGLANG_DDTREE_SM90");
  if (wanted != nullptr && std::strcmp(wanted, "0") == 0) return false;
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

}  // namespace ddtree
