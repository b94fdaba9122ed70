// Entry points of the tree-verify CUDA kernels: they plan the splits and pick the instantiation for a launch. No torch
// here: api.cc checks tensors and fills the params struct.
#pragma once

#include <cuda_runtime_api.h>

#include "tree_verify/params.h"
#include "tree_verify/plan.h"

namespace ddtree {

// Chooses the splits for the static shape in `p` (bs, num_nodes, heads, head sizes) on the current device. Ignores all
// other fields.
cudaError_t plan_num_splits(const TreeVerifyParams& p, int* num_splits);

// Enqueue the op on `stream` of the current device: the partial kernel, then combine if p.num_splits > 1. They neither
// allocate nor synchronize, and read nothing on the host except the struct. q, o, KV rows and their strides must be
// 16-byte aligned, and p.kv_dtype must be p.q_dtype or kFloat8E4M3. Return the launch's status, or
// cudaErrorInvalidValue if no instantiation has these types and head sizes or the workspace is smaller than
// workspace_bytes(p).
cudaError_t launch_gqa(const TreeVerifyParams& p, cudaStream_t stream);
cudaError_t launch_mla(const TreeVerifyParams& p, cudaStream_t stream);

}  // namespace ddtree
