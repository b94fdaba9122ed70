// Picks the verify kernel for the head size and the number of nodes. Instantiated once per state type in verify_*.cu.
#pragma once

#include "tree_recurrent/launch_verify.h"
#include "tree_recurrent/verify.cuh"

namespace ddtree {

constexpr int kMaxSharedBytes = 101376;  // of a block, on sm_120

// Warps per block. More share the work on A and M; fewer spread a small batch over the multiprocessors.
template <typename Traits>
cudaError_t choose_warps(const RecurrentVerifyParams& p, int* warps) {
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const auto blocks = [&](int count) {
    const int columns = kColumnsPerWarp * count;
    return int64_t(p.bs) * p.h_v * ((p.d_v + columns - 1) / columns);
  };
  *warps = kVerifyThreads / 32;
  while (*warps > 2 && (blocks(*warps) < 2 * multiprocessors || Traits::shared_bytes(*warps) > kMaxSharedBytes)) {
    *warps /= 2;
  }
  return status;
}

template <typename Traits>
cudaError_t launch_traits(const RecurrentVerifyParams& p, cudaStream_t stream) {
  static_assert(Traits::shared_bytes(2) <= kMaxSharedBytes);
  int warps = 0;
  cudaError_t status = choose_warps<Traits>(p, &warps);
  const int shared = Traits::shared_bytes(warps), columns = kColumnsPerWarp * warps;
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(recurrent_verify_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  }
  if (status != cudaSuccess) return status;
  const dim3 grid((p.d_v + columns - 1) / columns, p.h_v, p.bs);
  recurrent_verify_kernel<Traits><<<grid, 32 * warps, shared, stream>>>(p);
  return cudaGetLastError();
}

template <typename State, int kDk, bool kChannel>
cudaError_t launch_nodes(const RecurrentVerifyParams& p, cudaStream_t stream) {
  if (p.num_nodes <= 16) return launch_traits<VerifyTraits<State, kDk, 1, kChannel>>(p, stream);
  if (p.num_nodes <= 32) return launch_traits<VerifyTraits<State, kDk, 2, kChannel>>(p, stream);
  if (p.num_nodes <= 48) return launch_traits<VerifyTraits<State, kDk, 3, kChannel>>(p, stream);
  return launch_traits<VerifyTraits<State, kDk, 4, kChannel>>(p, stream);
}

template <typename State, bool kChannel>
cudaError_t launch_head_size(const RecurrentVerifyParams& p, cudaStream_t stream) {
  switch (p.d_k) {
    case 64: return launch_nodes<State, 64, kChannel>(p, stream);
    case 128: return launch_nodes<State, 128, kChannel>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace ddtree
