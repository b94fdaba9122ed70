#include "tree_recurrent/launch.h"

#include "tree_recurrent/commit.cuh"
#include "tree_recurrent/conv.cuh"
#include "tree_recurrent/launch_verify.h"

namespace ddtree {
namespace {

template <typename State, int kDk>
cudaError_t launch_commit_typed(const RecurrentCommitParams& p, cudaStream_t stream) {
  constexpr int kColumns = CommitTraits<State, kDk>::kColumns;
  const dim3 grid(p.h_v * ((p.d_v + kColumns - 1) / kColumns), p.bs, p.layers);
  recurrent_commit_kernel<State, kDk><<<grid, kCommitThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename State>
cudaError_t launch_commit_head_size(const RecurrentCommitParams& p, cudaStream_t stream) {
  switch (p.d_k) {
    case 64: return launch_commit_typed<State, 64>(p, stream);
    case 128: return launch_commit_typed<State, 128>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <typename T, int kWidth>
cudaError_t launch_conv_typed(const ConvVerifyParams& p, cudaStream_t stream) {
  const int groups = p.dim * int(sizeof(T)) / kConvBytes;
  const dim3 grid((groups + kConvThreads - 1) / kConvThreads, (p.num_nodes + kConvNodes - 1) / kConvNodes, p.bs);
  conv_verify_kernel<T, kWidth><<<grid, kConvThreads, 0, stream>>>(p);
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
  const bool fp32 = p.states.type == FloatType::kFloat32;
  if (!fp32 && p.states.type != FloatType::kBFloat16) return cudaErrorInvalidValue;
  if (p.kind == RecurrentKind::kChannelDelta) {
    return fp32 ? launch_verify_channel_fp32(p, stream) : launch_verify_channel_bf16(p, stream);
  }
  return fp32 ? launch_verify_fp32(p, stream) : launch_verify_bf16(p, stream);
}

cudaError_t launch(const RecurrentCommitParams& p, cudaStream_t stream) {
  switch (p.states.type) {
    case FloatType::kFloat32: return launch_commit_head_size<float>(p, stream);
    case FloatType::kBFloat16: return launch_commit_head_size<__nv_bfloat16>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t launch(const ConvVerifyParams& p, cudaStream_t stream) {
  switch (p.x.type) {
    case FloatType::kFloat32: return launch_conv_width<float>(p, stream);
    case FloatType::kBFloat16: return launch_conv_width<__nv_bfloat16>(p, stream);
    default: return launch_conv_width<__half>(p, stream);
  }
}

cudaError_t launch(const ConvCommitParams& p, cudaStream_t stream) {
  return p.window.type == FloatType::kFloat32
             ? launch_conv_commit<float>(p, stream)
             : launch_conv_commit<__nv_bfloat16>(p, stream);  // bits of any 16-bit type
}

}  // namespace ddtree
