// Depth of each draft-tree row from its ancestor words. The pattern of every op here: <op>.cc holds the host checks
// and the CPU key, <op>_cuda.cc the CUDA key, <op>.cu the kernel, which knows no torch.
#pragma once

#include <cstdint>

#include <torch/csrc/stable/tensor.h>

namespace ddtree {

// ancestors [T, words] int64, depth [T] int32: number of ancestors of each row, the root's own depth being 0.
void ancestor_depth_cpu(torch::stable::Tensor ancestors, torch::stable::Tensor depth);
void ancestor_depth_cuda(torch::stable::Tensor ancestors, torch::stable::Tensor depth);

// Shared by both keys.
void check_ancestor_depth(const torch::stable::Tensor& ancestors, const torch::stable::Tensor& depth);

}  // namespace ddtree
