#include "tree_recurrent/launch_verify.cuh"

namespace ddtree {

cudaError_t launch_verify_bf16(const RecurrentVerifyParams& params, cudaStream_t stream) {
  return launch_head_size<__nv_bfloat16, false>(params, stream);
}

}  // namespace ddtree
