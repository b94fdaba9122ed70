#include "common/cuda_call.h"
#include "index_logits/api.h"
#include "index_logits/launch.h"

namespace ddtree {

void run_cuda(const IndexLogitsParams& params, const Tensor& like) {
  CudaCall call(like);
  CudaCall::check("ddtree_index_logits", launch(params, call.stream()));
}

}  // namespace ddtree
