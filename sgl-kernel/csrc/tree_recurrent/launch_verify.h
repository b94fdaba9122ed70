// What launch.cu calls and verify_*.cu define.
#pragma once

#include <cuda_runtime_api.h>

#include "tree_recurrent/params.h"

namespace ddtree {

cudaError_t launch_verify_fp32(const RecurrentVerifyParams& params, cudaStream_t stream);
cudaError_t launch_verify_bf16(const RecurrentVerifyParams& params, cudaStream_t stream);
cudaError_t launch_verify_channel_fp32(const RecurrentVerifyParams& params, cudaStream_t stream);
cudaError_t launch_verify_channel_bf16(const RecurrentVerifyParams& params, cudaStream_t stream);

}  // namespace ddtree
