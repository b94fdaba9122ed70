#include "common/cuda_call.h"
#include "tree/ancestor_depth.cuh"
#include "tree/ancestor_depth.h"

namespace ddtree {

void ancestor_depth_cuda(torch::stable::Tensor ancestors, torch::stable::Tensor depth) {
  check_ancestor_depth(ancestors, depth);
  CudaCall call(ancestors);
  launch_ancestor_depth(reinterpret_cast<const uint64_t*>(ancestors.const_data_ptr<int64_t>()),
                        depth.mutable_data_ptr<int32_t>(), ancestors.size(0), ancestors.size(1), call.stream());
  CudaCall::check("ddtree_ancestor_depth");
}

}  // namespace ddtree
