// Launchers of the draft-tree kernels. They allocate nothing and do not wait, so they can be captured.
#pragma once

#include <cuda_runtime_api.h>

#include "tree/params.h"

namespace ddtree {

void launch_build(const BuildParams& params, cudaStream_t stream);
void launch_accept(const AcceptParams& params, cudaStream_t stream);
void launch_commit(const CommitParams& params, cudaStream_t stream);

}  // namespace ddtree
