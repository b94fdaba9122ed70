// What launch.cu calls and the instantiations define.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace ddtree {

// What the plan needs to know of the partial kernel that serves a launch.
struct KernelShape {
  int tile_m;                     // packed rows a block
  int blocks_per_multiprocessor;  // that fit the current device
};

// Enqueue on `stream`, or, with `shape` given, only describe the partial kernel.
struct Launch {
  cudaStream_t stream = nullptr;
  KernelShape* shape = nullptr;
};

// Whether the current device runs the kernels in sm90/. SGLANG_DDTREE_SM90=0 in the environment says
// no, for tests and timings of the common kernels on such a device.
bool use_sm90();

// In instantiations/.
template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_typed(const TreeVerifyParams& p, const Launch& launch);
template <typename T, bool kFp8>
cudaError_t launch_mla_typed(const TreeVerifyParams& p, const Launch& launch);

// In sm90/: the partial kernel alone.
template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_sm90(const TreeVerifyParams& p, const Launch& launch);
template <typename T, bool kFp8>
cudaError_t launch_mla_sm90(const TreeVerifyParams& p, const Launch& launch);

}  // namespace ddtree
