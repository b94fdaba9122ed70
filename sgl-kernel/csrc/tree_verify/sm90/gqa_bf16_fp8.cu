#include "tree_verify/sm90/launch_gqa_sm90.cuh"

namespace ddtree {
#define DDTREE_INSTANTIATE(size) \
  template cudaError_t launch_gqa_sm90<__nv_bfloat16, true, size>(const TreeVerifyParams&, const Launch&);
DDTREE_GQA_HEAD_SIZES(DDTREE_INSTANTIATE)
}  // namespace ddtree
