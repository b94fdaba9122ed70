#include "common/cuda_call.h"
#include "tree/api.h"
#include "tree/launch.h"

namespace ddtree {
namespace {

template <typename Params>
void launch(const char* op, void (*launcher)(const Params&, cudaStream_t), const Params& params, const Tensor& like) {
  CudaCall call(like);
  launcher(params, call.stream());
  CudaCall::check(op);
}

}  // namespace

void run_cuda(const BuildParams& params, const Tensor& like) { launch("ddtree_build", launch_build, params, like); }
void run_cuda(const AcceptParams& params, const Tensor& like) { launch("ddtree_accept", launch_accept, params, like); }
void run_cuda(const CommitParams& params, const Tensor& like) { launch("ddtree_commit", launch_commit, params, like); }

}  // namespace ddtree
