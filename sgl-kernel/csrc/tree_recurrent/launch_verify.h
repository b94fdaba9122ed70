// What launch.cu calls and verify_*.cu define.
#pragma once

#include <cuda_runtime_api.h>

#include "tree_recurrent/params.h"

namespace ddtree {

// Of the current device.
inline cudaError_t count_multiprocessors(int* count) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  return status == cudaSuccess ? cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device) : status;
}

cudaError_t launch_verify_fp32(const RecurrentVerifyParams& params, cudaStream_t stream);
cudaError_t launch_verify_bf16(const RecurrentVerifyParams& params, cudaStream_t stream);
cudaError_t launch_verify_channel_fp32(const RecurrentVerifyParams& params, cudaStream_t stream);
cudaError_t launch_verify_channel_bf16(const RecurrentVerifyParams& params, cudaStream_t stream);

}  // namespace ddtree
