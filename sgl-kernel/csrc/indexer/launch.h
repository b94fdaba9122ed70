// Launchers of the indexer's kernels. They allocate nothing and do not wait, so a graph can capture them.
#pragma once

#include <cuda_runtime_api.h>

#include "indexer/params.h"

namespace ddtree {

cudaError_t launch(const IndexLogitsParams& params, cudaStream_t stream);
cudaError_t launch_sm90(const IndexLogitsParams& params, cudaStream_t stream);  // what launch() calls on sm_90
cudaError_t launch(const StoreIndexKeysParams& params, cudaStream_t stream);

}  // namespace ddtree
