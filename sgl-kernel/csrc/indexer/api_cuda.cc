#include "common/cuda_call.h"
#include "indexer/api.h"
#include "indexer/launch.h"

namespace ddtree {

void run_cuda(const IndexLogitsParams& params, const Tensor& like) {
  CudaCall call(like);
  CudaCall::check("ddtree_index_logits", launch(params, call.stream()));
}

void run_cuda(const StoreIndexKeysParams& params, const Tensor& like) {
  CudaCall call(like);
  CudaCall::check("ddtree_store_index_keys", launch(params, call.stream()));
}

}  // namespace ddtree
