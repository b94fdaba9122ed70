// The index logits as torch.ops.sgl_kernel sees them. Shapes, dtypes and meanings: params.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "index_logits/params.h"

namespace ddtree {

using torch::stable::Tensor;

// Checks every argument and fills the params. Throws std::invalid_argument (ValueError in Python).
IndexLogitsParams index_logits_params(const Tensor& q, const Tensor& keys, const Tensor& weights,
                                      const Tensor& seq_lens, const Tensor& page_table, const Tensor& out);

// Run the op on the CPU or on the CUDA device of `like`.
void run_cpu(const IndexLogitsParams& params, const Tensor& like);
void run_cuda(const IndexLogitsParams& params, const Tensor& like);

// The op's signature, written once; `run` is one of the above.
template <void (*run)(const IndexLogitsParams&, const Tensor&)>
void index_logits(Tensor q, Tensor keys, Tensor weights, Tensor seq_lens, Tensor page_table, Tensor out) {
  run(index_logits_params(q, keys, weights, seq_lens, page_table, out), q);
}

inline constexpr auto& index_logits_cpu = index_logits<run_cpu>;
inline constexpr auto& index_logits_cuda = index_logits<run_cuda>;

}  // namespace ddtree
