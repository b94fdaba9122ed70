// Entry points of the tree-verify CUDA kernels. No torch: api.cc checks tensors and fills the params struct.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "plan.h"

namespace ddtree {

// Splits for the static shape in `p` (b, max_rows, heads, head sizes) on the current device. The other fields are not
// read.
cudaError_t plan_num_splits(const TreeVerifyParams& p, int* num_splits);

// Enqueue the op on `stream` of the current device: partial kernel, then combine when p.num_splits > 1. No allocation,
// no synchronization, nothing read on the host but the struct itself. q, o, KV rows and their strides are 16-byte
// aligned. Returns cudaErrorInvalidValue for a combination of types and head sizes that has no instantiation, or for a
// workspace smaller than workspace_bytes(p); otherwise the launch's status.
// p.kv_dtype is p.q_dtype or kFloat8E4M3.
cudaError_t launch_gqa(const TreeVerifyParams& p, cudaStream_t stream);
cudaError_t launch_mla(const TreeVerifyParams& p, cudaStream_t stream);

}  // namespace ddtree
