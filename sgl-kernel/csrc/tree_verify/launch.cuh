// Launchers that the instantiations specialize; launch.cu picks one by type and head size.
#pragma once

#include "combine.cuh"
#include "gqa_partial.cuh"
#include "launch.h"
#include "mla_partial.cuh"

namespace ddtree {

#define DDTREE_RETURN_IF_FAILED(expr)           \
  do {                                          \
    const cudaError_t status_ = (expr);         \
    if (status_ != cudaSuccess) return status_; \
  } while (0)

template <typename Kernel>
cudaError_t launch_partial(Kernel kernel, const TreeVerifyParams& p, int blocks_y, int threads, int shared_bytes,
                           cudaStream_t stream) {
  DDTREE_RETURN_IF_FAILED(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<dim3(p.b * p.num_splits, blocks_y), threads, shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int kD>
cudaError_t launch_combine(const TreeVerifyParams& p, cudaStream_t stream) {
  if (p.num_splits == 1) return cudaSuccess;
  combine_kernel<T, kD><<<dim3(p.total_rows, p.h_q), kCombineThreads, p.b * p.num_splits * sizeof(float), stream>>>(p);
  return cudaGetLastError();
}

template <typename T, bool kFp8, int kD, int kTileM>
cudaError_t launch_gqa_tile(const TreeVerifyParams& p, cudaStream_t stream) {
  using Traits = GqaTraits<T, kFp8, kD, kTileM>;
  const int m_tiles = (packed_rows(p.max_rows, p.h_q, p.h_kv) + kTileM - 1) / kTileM;
  DDTREE_RETURN_IF_FAILED(
      launch_partial(gqa_partial_kernel<Traits>, p, p.h_kv * m_tiles, Traits::kThreads, Traits::kSharedBytes, stream));
  return launch_combine<T, kD>(p, stream);
}

template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_typed(const TreeVerifyParams& p, cudaStream_t stream) {
  switch (gqa_tile_m(packed_rows(p.max_rows, p.h_q, p.h_kv), kD)) {
    case 16: return launch_gqa_tile<T, kFp8, kD, 16>(p, stream);
    case 64: return launch_gqa_tile<T, kFp8, kD, 64>(p, stream);
    default:
      if constexpr (kD <= 128) return launch_gqa_tile<T, kFp8, kD, 128>(p, stream);
      return cudaErrorInvalidValue;
  }
}

template <typename T, bool kFp8>
cudaError_t launch_mla_typed(const TreeVerifyParams& p, cudaStream_t stream) {
  using Traits = MlaTraits<T, kFp8>;
  const int m_tiles = (p.max_rows * p.h_q + Traits::kTileM - 1) / Traits::kTileM;
  DDTREE_RETURN_IF_FAILED(
      launch_partial(mla_partial_kernel<Traits>, p, m_tiles, Traits::kThreads, Traits::kSharedBytes, stream));
  return launch_combine<T, kMlaVDim>(p, stream);
}

}  // namespace ddtree
