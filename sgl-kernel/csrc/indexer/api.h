// The indexer's ops as torch.ops.sgl_kernel sees them. Shapes, dtypes and meanings: params.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "indexer/params.h"

namespace ddtree {

using torch::stable::Tensor;

// Check every argument and fill the params. Throw std::invalid_argument (ValueError in Python).
IndexLogitsParams index_logits_params(const Tensor& q, const Tensor& keys, const Tensor& weights,
                                      const Tensor& seq_lens, const Tensor& page_table, const Tensor& out);
StoreIndexKeysParams store_index_keys_params(const Tensor& kv, const Tensor& plan, const Tensor& norm_weight,
                                             double norm_eps, const Tensor& freqs, const Tensor& out_loc,
                                             const Tensor& keys, bool decode);

// Run an op on the CPU or on the CUDA device of `like`.
void run_cpu(const IndexLogitsParams& params, const Tensor& like);
void run_cpu(const StoreIndexKeysParams& params, const Tensor& like);
void run_cuda(const IndexLogitsParams& params, const Tensor& like);
void run_cuda(const StoreIndexKeysParams& params, const Tensor& like);

// The ops' signatures, each written once; `run` is one of the above.
template <void (*run)(const IndexLogitsParams&, const Tensor&)>
void index_logits(Tensor q, Tensor keys, Tensor weights, Tensor seq_lens, Tensor page_table, Tensor out) {
  run(index_logits_params(q, keys, weights, seq_lens, page_table, out), q);
}

template <void (*run)(const StoreIndexKeysParams&, const Tensor&)>
void store_index_keys(Tensor kv, Tensor plan, Tensor norm_weight, double norm_eps, Tensor freqs, Tensor out_loc,
                      Tensor keys, bool decode) {
  run(store_index_keys_params(kv, plan, norm_weight, norm_eps, freqs, out_loc, keys, decode), kv);
}

inline constexpr auto& index_logits_cpu = index_logits<run_cpu>;
inline constexpr auto& index_logits_cuda = index_logits<run_cuda>;
inline constexpr auto& store_index_keys_cpu = store_index_keys<run_cpu>;
inline constexpr auto& store_index_keys_cuda = store_index_keys<run_cuda>;

}  // namespace ddtree
