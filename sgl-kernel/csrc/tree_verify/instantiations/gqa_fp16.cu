#include "tree_verify/kernel_launch.cuh"

namespace ddtree {
#define DDTREE_INSTANTIATE(size) \
  template cudaError_t launch_gqa_typed<__half, false, size>(const TreeVerifyParams&, const Launch&);
DDTREE_GQA_HEAD_SIZES(DDTREE_INSTANTIATE)
}  // namespace ddtree
