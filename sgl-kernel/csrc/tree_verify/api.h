// The tree-verify ops as torch.ops.sgl_kernel sees them. Shapes, dtypes and meanings: params.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "tree_verify/params.h"

namespace ddtree {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The arguments of ddtree_verify_gqa and ddtree_verify_mla. For MLA, v_cache is k_cache and one scale serves both.
struct VerifyArgs {
  bool mla;
  Tensor q, k_cache, v_cache;
  Tensor qo_indptr, kv_indptr, kv_indices, prefix_lens, tree_slots, ancestors;
  OptionalTensor sinks, k_scale, v_scale;
  double sm_scale, logit_cap;
  int64_t sliding_window, page_size, num_nodes, num_splits;
  Tensor workspace, o;
  OptionalTensor lse;
};

// Checks every argument and fills the params. Throws std::invalid_argument (ValueError in Python).
TreeVerifyParams verify_params(const VerifyArgs& args);

void run_verify_cpu(const VerifyArgs& args);
void run_verify_cuda(const VerifyArgs& args);

// The op's signature, written once; `run` is one of the two above.
template <void (*run)(const VerifyArgs&)>
void verify_gqa(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices,
                Tensor prefix_lens, Tensor tree_slots, Tensor ancestors, OptionalTensor sinks, OptionalTensor k_scale,
                OptionalTensor v_scale, double sm_scale, double logit_cap, int64_t sliding_window, int64_t page_size,
                int64_t num_nodes, int64_t num_splits, Tensor workspace, Tensor o, OptionalTensor lse) {
  run({false,      q,         k_cache,    v_cache,   qo_indptr, kv_indptr, kv_indices, prefix_lens,
       tree_slots, ancestors, sinks,      k_scale,   v_scale,   sm_scale,  logit_cap,  sliding_window,
       page_size,  num_nodes, num_splits, workspace, o,         lse});
}

template <void (*run)(const VerifyArgs&)>
void verify_mla(Tensor q, Tensor kv_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor prefix_lens,
                Tensor tree_slots, Tensor ancestors, OptionalTensor kv_scale, double sm_scale, double logit_cap,
                int64_t sliding_window, int64_t page_size, int64_t num_nodes, int64_t num_splits, Tensor workspace,
                Tensor o, OptionalTensor lse) {
  run({true,       q,         kv_cache,     kv_cache,  qo_indptr, kv_indptr, kv_indices, prefix_lens,
       tree_slots, ancestors, std::nullopt, kv_scale,  kv_scale,  sm_scale,  logit_cap,  sliding_window,
       page_size,  num_nodes, num_splits,   workspace, o,         lse});
}

inline constexpr auto& verify_gqa_cpu = verify_gqa<run_verify_cpu>;
inline constexpr auto& verify_gqa_cuda = verify_gqa<run_verify_cuda>;
inline constexpr auto& verify_mla_cpu = verify_mla<run_verify_cpu>;
inline constexpr auto& verify_mla_cuda = verify_mla<run_verify_cuda>;

// Returns (num_splits, workspace bytes) for launches of bs requests with at most num_nodes nodes each, on the device of
// `like`. Both are valid for all lengths, so they are fixed at capture.
std::tuple<int64_t, int64_t> verify_plan_cpu(Tensor like, int64_t bs, int64_t num_nodes, int64_t h_q, int64_t h_kv,
                                             int64_t d_qk, int64_t d_v);
std::tuple<int64_t, int64_t> verify_plan_cuda(Tensor like, int64_t bs, int64_t num_nodes, int64_t h_q, int64_t h_kv,
                                              int64_t d_qk, int64_t d_v);

// Raises on values that the kernels could only check with a trap: slots outside the pool or apart from their page,
// ancestor bits outside the request, indptr and lengths that contradict each other. The CPU ops always check. On CUDA
// this is a debugging aid: it copies the index tensors to the host and therefore waits for the device.
void verify_check_cpu(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor prefix_lens, Tensor tree_slots,
                      Tensor ancestors, int64_t page_size, int64_t num_nodes, int64_t num_slots);
void verify_check_cuda(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor prefix_lens, Tensor tree_slots,
                       Tensor ancestors, int64_t page_size, int64_t num_nodes, int64_t num_slots);

// The part of verify_params() that concerns the index tensors: checks shapes and types, then sets pointers.
void set_index_params(TreeVerifyParams& params, const Tensor& qo_indptr, const Tensor& kv_indptr,
                      const Tensor& kv_indices, const Tensor& prefix_lens, const Tensor& tree_slots,
                      const Tensor& ancestors, int64_t page_size, int64_t num_nodes);

}  // namespace ddtree
