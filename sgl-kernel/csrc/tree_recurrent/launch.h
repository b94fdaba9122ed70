// Launchers of the kernels for draft trees over recurrent layers. They allocate nothing and do not wait, so they can be
// captured.
#pragma once

#include <cuda_runtime_api.h>

#include "tree_recurrent/params.h"

namespace ddtree {

cudaError_t launch(const RecurrentVerifyParams& params, cudaStream_t stream);
cudaError_t launch(const RecurrentCommitParams& params, cudaStream_t stream);
cudaError_t launch(const ConvVerifyParams& params, cudaStream_t stream);
cudaError_t launch(const ConvCommitParams& params, cudaStream_t stream);

}  // namespace ddtree
