#include "tree_recurrent/launch_verify.cuh"

namespace ddtree {

cudaError_t launch_verify_fp32(const RecurrentVerifyParams& params, cudaStream_t stream) {
  return launch_head_size<float, false>(params, stream);
}

}  // namespace ddtree
