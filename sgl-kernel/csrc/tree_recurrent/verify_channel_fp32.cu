#include "tree_recurrent/launch_verify.cuh"

namespace ddtree {

cudaError_t launch_verify_channel_fp32(const RecurrentVerifyParams& params, cudaStream_t stream) {
  return launch_head_size<float, true>(params, stream);
}

}  // namespace ddtree
