// The ops for draft trees over recurrent layers as torch.ops.sgl_kernel sees them. Shapes and meanings: params.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "tree_recurrent/params.h"

namespace ddtree {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Check every argument and fill the params. Throw std::invalid_argument (ValueError in Python).
RecurrentVerifyParams recurrent_verify_params(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& states,
                                              const Tensor& state_indices, const Tensor& ancestors, int64_t kind,
                                              const OptionalTensor& gate, const OptionalTensor& beta,
                                              const Tensor& decay, const OptionalTensor& bias,
                                              const OptionalTensor& skip, double scale, bool normalize,
                                              double lower_bound, const Tensor& o, const Tensor& k_kept,
                                              const Tensor& u_kept, const Tensor& g_kept);
RecurrentCommitParams recurrent_commit_params(const Tensor& states, const Tensor& state_indices, const Tensor& path,
                                              const Tensor& lengths, const Tensor& k_kept, const Tensor& u_kept,
                                              const Tensor& g_kept, const OptionalTensor& track_indices,
                                              const OptionalTensor& track_positions);
ConvVerifyParams conv_verify_params(const Tensor& x, const Tensor& window, const Tensor& state_indices,
                                    const Tensor& ancestors, const Tensor& weight, const OptionalTensor& bias,
                                    bool silu, const Tensor& out, const Tensor& x_kept);
ConvCommitParams conv_commit_params(const Tensor& window, const Tensor& state_indices, const Tensor& path,
                                    const Tensor& lengths, const Tensor& x_kept, const OptionalTensor& track_indices,
                                    const OptionalTensor& track_positions);

// Where an op runs; `like` names the device.
void run_cpu(const RecurrentVerifyParams& params, const Tensor& like);
void run_cpu(const RecurrentCommitParams& params, const Tensor& like);
void run_cpu(const ConvVerifyParams& params, const Tensor& like);
void run_cpu(const ConvCommitParams& params, const Tensor& like);
void run_cuda(const RecurrentVerifyParams& params, const Tensor& like);
void run_cuda(const RecurrentCommitParams& params, const Tensor& like);
void run_cuda(const ConvVerifyParams& params, const Tensor& like);
void run_cuda(const ConvCommitParams& params, const Tensor& like);

template <typename Params>
using RunRecurrent = void (*)(const Params&, const Tensor&);

// The ops' signatures, each written once; `run` is one of the above.
template <RunRecurrent<RecurrentVerifyParams> run>
void recurrent_verify(Tensor q, Tensor k, Tensor v, Tensor states, Tensor state_indices, Tensor ancestors, int64_t kind,
                      OptionalTensor gate, OptionalTensor beta, Tensor decay, OptionalTensor bias, OptionalTensor skip,
                      double scale, bool normalize, double lower_bound, Tensor o, Tensor k_kept, Tensor u_kept,
                      Tensor g_kept) {
  run(recurrent_verify_params(q, k, v, states, state_indices, ancestors, kind, gate, beta, decay, bias, skip, scale,
                              normalize, lower_bound, o, k_kept, u_kept, g_kept),
      q);
}

template <RunRecurrent<RecurrentCommitParams> run>
void recurrent_commit(Tensor states, Tensor state_indices, Tensor path, Tensor lengths, Tensor k_kept, Tensor u_kept,
                      Tensor g_kept, OptionalTensor track_indices, OptionalTensor track_positions) {
  run(recurrent_commit_params(states, state_indices, path, lengths, k_kept, u_kept, g_kept, track_indices,
                              track_positions),
      states);
}

template <RunRecurrent<ConvVerifyParams> run>
void conv_verify(Tensor x, Tensor window, Tensor state_indices, Tensor ancestors, Tensor weight, OptionalTensor bias,
                 bool silu, Tensor out, Tensor x_kept) {
  run(conv_verify_params(x, window, state_indices, ancestors, weight, bias, silu, out, x_kept), x);
}

template <RunRecurrent<ConvCommitParams> run>
void conv_commit(Tensor window, Tensor state_indices, Tensor path, Tensor lengths, Tensor x_kept,
                 OptionalTensor track_indices, OptionalTensor track_positions) {
  run(conv_commit_params(window, state_indices, path, lengths, x_kept, track_indices, track_positions), window);
}

inline constexpr auto& recurrent_verify_cpu = recurrent_verify<run_cpu>;
inline constexpr auto& recurrent_verify_cuda = recurrent_verify<run_cuda>;
inline constexpr auto& recurrent_commit_cpu = recurrent_commit<run_cpu>;
inline constexpr auto& recurrent_commit_cuda = recurrent_commit<run_cuda>;
inline constexpr auto& conv_verify_cpu = conv_verify<run_cpu>;
inline constexpr auto& conv_verify_cuda = conv_verify<run_cuda>;
inline constexpr auto& conv_commit_cpu = conv_commit<run_cpu>;
inline constexpr auto& conv_commit_cuda = conv_commit<run_cuda>;

}  // namespace ddtree
