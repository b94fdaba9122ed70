// Tensor maps (sm_90): how TMA reads a tensor in global memory. The driver encodes them on the host, from the tensor's
// address and strides alone, so a kernel that was captured with one may be replayed.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ddtree {

// Describes [slots][heads][row_bytes] bytes, which TMA reads in boxes of [box_slots][1][box_bytes]. box_bytes is 128 or
// 64. A box is written to shared memory in the swizzle of that width (wgmma.cuh), with zeros past the end of a row. The
// address and the strides (in bytes) must be multiples of 16.
inline cudaError_t encode_rows(CUtensorMap* map, const void* address, int64_t slots, int64_t slot_stride, int heads,
                               int64_t head_stride, int row_bytes, int box_slots, int box_bytes) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult query;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &query);
  if (status != cudaSuccess) return status;
  if (query != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t size[3] = {cuuint64_t(row_bytes), cuuint64_t(heads), cuuint64_t(slots)};
  // The stride of a dimension of size 1 means nothing, and may not be a valid one.
  const cuuint64_t strides[2] = {cuuint64_t(heads == 1 ? slot_stride : head_stride), cuuint64_t(slot_stride)};
  const cuuint32_t box[3] = {cuuint32_t(box_bytes), 1, cuuint32_t(box_slots)}, steps[3] = {1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
      map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(address), size, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace ddtree
