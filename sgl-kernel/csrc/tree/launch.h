// Launchers of the draft-tree kernels. They neither allocate nor synchronize, so a graph can capture them.
#pragma once

#include <cuda_runtime_api.h>

#include "tree/params.h"

namespace ddtree {

void launch_build(const BuildParams& params, cudaStream_t stream);
void launch_accept(const AcceptParams& params, cudaStream_t stream);
void launch_commit(const CommitParams& params, cudaStream_t stream);

}  // namespace ddtree
