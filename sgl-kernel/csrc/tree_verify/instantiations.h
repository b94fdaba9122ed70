// Launchers for one element type and head size. dispatch.cu calls them; the files in instantiations/ and sm90/ define
// them.
#pragma once

#include <cuda_runtime_api.h>

#include "common/use_sm90.h"
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

// Whether kernels for fp8 KV keep all bits of Q and P (SGLANG_DDTREE_FP8=exact).
bool exact_fp8();

// Whether the common kernels multiply fp8 KV as it is stored, with Q and P rounded to fp8. Otherwise they convert it to
// 16 bits, which is exact. sm_100 has no fp8 mma.sync, so every warp would convert all of its operands, and a block
// with more than 16 rows would be slower. sm_90 has none either, but there the common kernels are for tests.
bool common_multiplies_fp8();

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
