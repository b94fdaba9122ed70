#include "tree_recurrent/launch.h"

#include "tree_recurrent/commit.cuh"
#include "tree_recurrent/conv.cuh"
#include "tree_recurrent/launch_verify.h"

namespace ddtree {
namespace {

template <typename State, int kDk, bool kChannel, bool kContiguous>
cudaError_t launch_commit_typed(const RecurrentCommitParams& p, cudaStream_t stream) {
  constexpr int kColumns = CommitTraits<State, kDk, kChannel, kContiguous>::kColumns;
  const dim3 grid(p.h_v * ((p.d_v + kColumns - 1) / kColumns), p.bs, p.layers);
  recurrent_commit_kernel<State, kDk, kChannel, kContiguous><<<grid, kCommitThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename State, int kDk, bool kChannel>
cudaError_t launch_commit_strides(const RecurrentCommitParams& p, cudaStream_t stream) {
  return p.states.stride_k == 1 ? launch_commit_typed<State, kDk, kChannel, true>(p, stream)
                                : launch_commit_typed<State, kDk, kChannel, false>(p, stream);
}

template <typename State, bool kChannel>
cudaError_t launch_commit_head_size(const RecurrentCommitParams& p, cudaStream_t stream) {
  switch (p.d_k) {
    case 64: return launch_commit_strides<State, 64, kChannel>(p, stream);
    case 128: return launch_commit_strides<State, 128, kChannel>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <typename State>
cudaError_t launch_commit_state(const RecurrentCommitParams& p, cudaStream_t stream) {
  return p.per_channel ? launch_commit_head_size<State, true>(p, stream)
                       : launch_commit_head_size<State, false>(p, stream);
}

template <typename T, int kWidth>
cudaError_t launch_conv_typed(const ConvVerifyParams& p, cudaStream_t stream) {
  int multiprocessors = 0;
  const cudaError_t status = count_multiprocessors(&multiprocessors);
  if (status != cudaSuccess) return status;
  const int groups = p.dim * int(sizeof(T)) / kVectorBytes;
  dim3 grid((groups + kConvThreads - 1) / kConvThreads, 1, p.bs);
  int nodes = 2 * kConvNodes;
  do {  // fewer nodes per block if the batch is small
    nodes /= 2;
    grid.y = (p.num_nodes + nodes - 1) / nodes;
  } while (nodes > 1 && int64_t(grid.x) * grid.y * grid.z < 4 * multiprocessors);
  conv_verify_kernel<T, kWidth><<<grid, kConvThreads, 0, stream>>>(p, nodes);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_conv_width(const ConvVerifyParams& p, cudaStream_t stream) {
  switch (p.width) {
    case 2: return launch_conv_typed<T, 2>(p, stream);
    case 3: return launch_conv_typed<T, 3>(p, stream);
    case 4: return launch_conv_typed<T, 4>(p, stream);
    case 5: return launch_conv_typed<T, 5>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <typename T>
cudaError_t launch_conv_commit(const ConvCommitParams& p, cudaStream_t stream) {
  const dim3 grid((p.dim + kConvThreads - 1) / kConvThreads, p.bs, p.layers);
  conv_commit_kernel<T><<<grid, kConvThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch(const RecurrentVerifyParams& p, cudaStream_t stream) {
  if (p.num_nodes < 1 || p.num_nodes > kMaxRecurrentNodes) return cudaErrorInvalidValue;
  const bool fp32 = p.states.type == DType::kFloat32;
  if (!fp32 && p.states.type != DType::kBFloat16) return cudaErrorInvalidValue;
  if (p.kind == RecurrentKind::kChannelDelta) {
    return fp32 ? launch_verify_channel_fp32(p, stream) : launch_verify_channel_bf16(p, stream);
  }
  return fp32 ? launch_verify_fp32(p, stream) : launch_verify_bf16(p, stream);
}

cudaError_t launch(const RecurrentCommitParams& p, cudaStream_t stream) {
  switch (p.states.type) {
    case DType::kFloat32: return launch_commit_state<float>(p, stream);
    case DType::kBFloat16: return launch_commit_state<__nv_bfloat16>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t launch(const ConvVerifyParams& p, cudaStream_t stream) {
  switch (p.x.type) {
    case DType::kFloat32: return launch_conv_width<float>(p, stream);
    case DType::kBFloat16: return launch_conv_width<__nv_bfloat16>(p, stream);
    default: return launch_conv_width<__half>(p, stream);
  }
}

cudaError_t launch(const ConvCommitParams& p, cudaStream_t stream) {
  return p.window.type == DType::kFloat32 ? launch_conv_commit<float>(p, stream)
                                          : launch_conv_commit<__nv_bfloat16>(p, stream);  // bits of any 16-bit type
}

}  // namespace ddtree
