// Launcher of the index logits. It allocates nothing and does not wait, so a graph can capture it.
#pragma once

#include <cuda_runtime_api.h>

#include "index_logits/params.h"

namespace ddtree {

cudaError_t launch(const IndexLogitsParams& params, cudaStream_t stream);

}  // namespace ddtree
