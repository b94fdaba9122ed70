// Picks the verify kernel for the head size and the number of nodes. Instantiated once per state type in verify_*.cu.
#pragma once

#include "tree_recurrent/launch_verify.h"
#include "tree_recurrent/verify.cuh"

namespace ddtree {

// Warps per block that have columns of the state: as many as share the work on A and M best, or as few as spread a
// small batch over the multiprocessors.
template <typename Traits>
int choose_column_warps(const RecurrentVerifyParams& p, int multiprocessors) {
  const auto blocks = [&](int warps) {
    const int columns = kColumnsPerWarp * warps;
    return int64_t(p.bs) * p.h_v * ((p.d_v + columns - 1) / columns);
  };
  int warps = 2;
  while (warps < Traits::kColumnWarps && kColumnsPerWarp * warps < p.d_v && blocks(warps) > multiprocessors) warps *= 2;
  return warps;
}

template <typename Traits>
cudaError_t launch_traits(const RecurrentVerifyParams& p, cudaStream_t stream) {
  int multiprocessors = 0;
  cudaError_t status = count_multiprocessors(&multiprocessors);
  const int column_warps = choose_column_warps<Traits>(p, multiprocessors);
  const int shared = Traits::shared_bytes(column_warps), columns = kColumnsPerWarp * column_warps;
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(recurrent_verify_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  }
  if (status != cudaSuccess) return status;
  const dim3 grid((p.d_v + columns - 1) / columns, p.h_v, p.bs);
  // Where a multiprocessor has one block, helpers cost nothing.
  const bool few = int64_t(grid.x) * grid.y * grid.z <= multiprocessors;
  const int warps = few ? Traits::kAllWarps : column_warps;
  recurrent_verify_kernel<Traits><<<grid, 32 * warps, shared, stream>>>(p, column_warps);
  return cudaGetLastError();
}

template <typename State, int kDk, int kTiles, bool kChannel>
cudaError_t launch_tiles(const RecurrentVerifyParams& p, cudaStream_t stream) {
  if constexpr (!kChannel && kTiles > 1) {
    using Wide = VerifyTraits<State, kDk, kTiles, false, true>;
    int device = 0, major = 0, multiprocessors = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess) status = count_multiprocessors(&multiprocessors);
    if (status != cudaSuccess) return status;
    // Measured on an H200: with fewer blocks than multiprocessors, blocks of four warps are a tenth faster.
    const int columns = kColumnsPerWarp * Wide::kColumnWarps;
    const int64_t blocks = int64_t(p.bs) * p.h_v * ((p.d_v + columns - 1) / columns);
    if (major == 9 && p.d_v > columns / 2 && blocks > multiprocessors) return launch_traits<Wide>(p, stream);
  }
  return launch_traits<VerifyTraits<State, kDk, kTiles, kChannel, false>>(p, stream);
}

template <typename State, int kDk, bool kChannel>
cudaError_t launch_nodes(const RecurrentVerifyParams& p, cudaStream_t stream) {
  if (p.num_nodes <= 16) return launch_tiles<State, kDk, 1, kChannel>(p, stream);
  if (p.num_nodes <= 32) return launch_tiles<State, kDk, 2, kChannel>(p, stream);
  if (p.num_nodes <= 48) return launch_tiles<State, kDk, 3, kChannel>(p, stream);
  return launch_tiles<State, kDk, 4, kChannel>(p, stream);
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
