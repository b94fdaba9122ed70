// The draft-tree ops as torch.ops.sgl_kernel sees them. Shapes, dtypes and meanings: params.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "tree/params.h"

namespace ddtree {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Check every argument and fill the params. Throw std::invalid_argument (ValueError in Python).
BuildParams build_params(const Tensor& candidates, const Tensor& log_probs, const OptionalTensor& log_sum,
                         const OptionalTensor& beam, const Tensor& bonus, bool keep_top1_path, const Tensor& tokens,
                         const Tensor& parents, const Tensor& depths, const Tensor& ancestors,
                         const Tensor& first_child, const Tensor& next_sibling, const Tensor& sizes,
                         const OptionalTensor& scores);
AcceptParams accept_params(const Tensor& tokens, const Tensor& parents, const Tensor& target, const Tensor& path,
                           const Tensor& output, const Tensor& lengths, const Tensor& bonus);
CommitParams commit_params(const Tensor& path, const Tensor& lengths, const Tensor& slots, const Tensor& buffers,
                           int64_t max_row_bytes, const OptionalTensor& hidden, const OptionalTensor& hidden_out);

// Run an op on the CPU or on the CUDA device of `like`.
void run_cpu(const BuildParams& params, const Tensor& like);
void run_cpu(const AcceptParams& params, const Tensor& like);
void run_cpu(const CommitParams& params, const Tensor& like);
void run_cuda(const BuildParams& params, const Tensor& like);
void run_cuda(const AcceptParams& params, const Tensor& like);
void run_cuda(const CommitParams& params, const Tensor& like);

template <typename Params>
using Run = void (*)(const Params&, const Tensor&);

// The ops' signatures, each written once; `run` is one of the above.
template <Run<BuildParams> run>
void build(Tensor candidates, Tensor log_probs, OptionalTensor log_sum, OptionalTensor beam, Tensor bonus,
           bool keep_top1_path, Tensor tokens, Tensor parents, Tensor depths, Tensor ancestors, Tensor first_child,
           Tensor next_sibling, Tensor sizes, OptionalTensor scores) {
  run(build_params(candidates, log_probs, log_sum, beam, bonus, keep_top1_path, tokens, parents, depths, ancestors,
                   first_child, next_sibling, sizes, scores),
      candidates);
}

template <Run<AcceptParams> run>
void accept(Tensor tokens, Tensor parents, Tensor target, Tensor path, Tensor output, Tensor lengths, Tensor bonus) {
  run(accept_params(tokens, parents, target, path, output, lengths, bonus), tokens);
}

template <Run<CommitParams> run>
void commit(Tensor path, Tensor lengths, Tensor slots, Tensor buffers, int64_t max_row_bytes, OptionalTensor hidden,
            OptionalTensor hidden_out) {
  run(commit_params(path, lengths, slots, buffers, max_row_bytes, hidden, hidden_out), path);
}

inline constexpr auto& build_cpu = build<run_cpu>;
inline constexpr auto& build_cuda = build<run_cuda>;
inline constexpr auto& accept_cpu = accept<run_cpu>;
inline constexpr auto& accept_cuda = accept<run_cuda>;
inline constexpr auto& commit_cpu = commit<run_cpu>;
inline constexpr auto& commit_cuda = commit<run_cuda>;

}  // namespace ddtree
