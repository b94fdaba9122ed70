// Configures and launches the partial and combine kernels. The instantiations specialize these templates.
#pragma once

#include <type_traits>

#include "tree_verify/combine.cuh"
#include "tree_verify/gqa_partial.cuh"
#include "tree_verify/instantiations.h"
#include "tree_verify/mla_partial.cuh"
#include "tree_verify/plan.h"

namespace ddtree {

#define DDTREE_RETURN_IF_FAILED(expr)           \
  do {                                          \
    const cudaError_t status_ = (expr);         \
    if (status_ != cudaSuccess) return status_; \
  } while (0)

// Launches the kernel on a grid. `more`: the kernel's arguments after `p`.
template <typename Traits, typename Kernel, typename... More>
cudaError_t launch_grid(dim3 grid, Kernel kernel, const TreeVerifyParams& p, const Launch& launch,
                        const More&... more) {
  DDTREE_RETURN_IF_FAILED(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes));
  if (launch.shape) {
    launch.shape->tile_m = Traits::kTileM;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&launch.shape->blocks_per_multiprocessor, kernel,
                                                         Traits::kThreads, Traits::kSharedBytes);
  }
  kernel<<<grid, Traits::kThreads, Traits::kSharedBytes, launch.stream>>>(p, more...);
  return cudaGetLastError();
}

// Launches the kernel with one block per work item (y) and pair of KV head and M tile (x). x varies fastest, so blocks
// that run at the same time read neighboring heads of the same tokens.
template <typename Traits, typename Kernel, typename... More>
cudaError_t launch_partial(Kernel kernel, const TreeVerifyParams& p, const Launch& launch, const More&... more) {
  const int m_tiles = (packed_rows(p.num_nodes, p.h_q, p.h_kv) + Traits::kTileM - 1) / Traits::kTileM;
  return launch_grid<Traits>(dim3(p.h_kv * m_tiles, p.bs * p.num_splits), kernel, p, launch, more...);
}

// Launches combine as the partial kernel's programmatic dependent: its blocks are set up while the last partials run.
template <typename T, int kD>
cudaError_t launch_combine(const TreeVerifyParams& p, const Launch& launch) {
  if (p.num_splits == 1 || launch.shape) return cudaSuccess;
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kCombineThreads);
  config.stream = launch.stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  // MLA has few rows, and they are large.
  const auto launch_few = [&](auto heads) {
    constexpr int kHeads = decltype(heads)::value, kBlockHeads = kHeads * kCombineHeads<kD>;
    config.gridDim = dim3(p.total_rows, (p.h_q + kBlockHeads - 1) / kBlockHeads);
    return cudaLaunchKernelEx(&config, combine_few_kernel<T, kD, kHeads>, p);
  };
  if (p.num_splits <= kFewSplits) {
    if constexpr (kD > 256) {
      if (p.num_splits <= 2) return launch_few(std::integral_constant<int, 4>());
      return launch_few(std::integral_constant<int, 2>());
    }
    return launch_few(std::integral_constant<int, 1>());
  }
  config.dynamicSmemBytes = p.bs * p.num_splits * sizeof(float);
  constexpr int kColumns = kD > 256 ? 128 : kD;
  if (kColumns < kD && p.total_rows * p.h_q < 512) {
    config.gridDim = dim3(p.total_rows, p.h_q, kD / kColumns);
    return cudaLaunchKernelEx(&config, combine_kernel<T, kD, kColumns>, p);
  }
  config.gridDim = dim3(p.total_rows, p.h_q);
  return cudaLaunchKernelEx(&config, combine_kernel<T, kD, kD>, p);
}

template <typename T, KvMath kMath, int kD, int kTileM>
cudaError_t launch_gqa_tile(const TreeVerifyParams& p, const Launch& launch) {
  using Traits = GqaTraits<T, kMath, kD, kTileM>;
  return launch_partial<Traits>(gqa_partial_kernel<Traits>, p, launch);
}

template <typename T, KvMath kMath, int kD>
cudaError_t launch_gqa_common(const TreeVerifyParams& p, const Launch& launch) {
  switch (gqa_tile_m(packed_rows(p.num_nodes, p.h_q, p.h_kv), kD)) {
    case 16: return launch_gqa_tile<T, kMath, kD, 16>(p, launch);
    case 64: return launch_gqa_tile<T, kMath, kD, 64>(p, launch);
    default:
      if constexpr (kD <= 128) return launch_gqa_tile<T, kMath, kD, 128>(p, launch);
      return cudaErrorInvalidValue;
  }
}

template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_partial(const TreeVerifyParams& p, const Launch& launch) {
#ifdef DDTREE_SM90
  if (use_sm90()) return launch_gqa_sm90<T, kFp8, kD>(p, launch);
#endif
  if constexpr (kFp8) {
    return common_multiplies_fp8() ? launch_gqa_common<T, KvMath::kFp8, kD>(p, launch)
                                   : launch_gqa_common<T, KvMath::kConverted, kD>(p, launch);
  } else {
    return launch_gqa_common<T, KvMath::k16Bit, kD>(p, launch);
  }
}

template <typename T, KvMath kMath>
cudaError_t launch_mla_common(const TreeVerifyParams& p, const Launch& launch) {
  using Traits = MlaTraits<T, kMath>;
  return launch_partial<Traits>(mla_partial_kernel<Traits>, p, launch);
}

template <typename T, bool kFp8>
cudaError_t launch_mla_partial(const TreeVerifyParams& p, const Launch& launch) {
#ifdef DDTREE_SM90
  if (use_sm90()) return launch_mla_sm90<T, kFp8>(p, launch);
#endif
  if constexpr (kFp8) {
    return common_multiplies_fp8() ? launch_mla_common<T, KvMath::kFp8>(p, launch)
                                   : launch_mla_common<T, KvMath::kConverted>(p, launch);
  } else {
    return launch_mla_common<T, KvMath::k16Bit>(p, launch);
  }
}

template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_typed(const TreeVerifyParams& p, const Launch& launch) {
  DDTREE_RETURN_IF_FAILED((launch_gqa_partial<T, kFp8, kD>(p, launch)));
  return launch_combine<T, kD>(p, launch);
}

template <typename T, bool kFp8>
cudaError_t launch_mla_typed(const TreeVerifyParams& p, const Launch& launch) {
  DDTREE_RETURN_IF_FAILED((launch_mla_partial<T, kFp8>(p, launch)));
  return launch_combine<T, kMlaVDim>(p, launch);
}

}  // namespace ddtree
