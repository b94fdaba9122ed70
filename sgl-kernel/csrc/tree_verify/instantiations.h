// Launchers for one element type and head size. dispatch.cu calls them; the files in instantiations/ and sm90/ define
// them.
#pragma once

#include <cuda_runtime_api.h>

#include "tree_verify/params.h"

namespace ddtree {

// What the plan needs to know about the partial kernel of a launch.
struct KernelShape {
  int tile_m;                     // packed rows per block
  int blocks_per_multiprocessor;  // resident blocks on the current device
};

// Enqueues on `stream`. If `shape` is given, only describes the partial kernel.
struct Launch {
  cudaStream_t stream = nullptr;
  KernelShape* shape = nullptr;
};

// Whether the current device runs the kernels in sm90/. SGLANG_DDTREE_SM90=0 turns them off, so that tests and timings
// can run the common kernels on sm_90.
bool use_sm90();

// In instantiations/: partial and combine.
template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_typed(const TreeVerifyParams& p, const Launch& launch);
template <typename T, bool kFp8>
cudaError_t launch_mla_typed(const TreeVerifyParams& p, const Launch& launch);

// In sm90/: only the partial kernel.
template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_sm90(const TreeVerifyParams& p, const Launch& launch);
template <typename T, bool kFp8>
cudaError_t launch_mla_sm90(const TreeVerifyParams& p, const Launch& launch);

}  // namespace ddtree
