// The ops that this package adds to torch.ops.sgl_kernel. Each entry OP(name, schema) registers
// sgl_kernel::ddtree_<name>, implemented by ddtree::<name>_cpu and ddtree::<name>_cuda. This file is compiled twice:
// into _ddtree_cpu.so (schemas and CPU keys) and, with DDTREE_CUDA_KEYS, into _ddtree_cuda.so (CUDA keys). The Meta
// keys are registered in python/sgl_kernel/ddtree.
//
// Ops write into the caller's tensors and allocate nothing, so a captured graph owns none of their memory.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "indexer/api.h"
#include "tree/api.h"
#include "tree_recurrent/api.h"
#include "tree_verify/api.h"

// clang-format off
#define DDTREE_OPS(OP)                                                                                             \
  OP(build,                                                                                                        \
     "(Tensor candidates, Tensor log_probs, Tensor? log_sum, Tensor? beam, Tensor bonus, bool keep_top1_path, "    \
     "Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) depths, Tensor(d!) ancestors, "                            \
     "Tensor(e!) first_child, Tensor(f!) next_sibling, Tensor(g!) sizes, Tensor(h!)? scores) -> ()")                \
  OP(accept,                                                                                                       \
     "(Tensor tokens, Tensor parents, Tensor target, Tensor(a!) path, Tensor(b!) output, Tensor(c!) lengths, "     \
     "Tensor(d!) bonus) -> ()")                                                                                    \
  /* Also writes to the KV buffers, whose addresses are in `buffers`. */                                           \
  OP(commit,                                                                                                       \
     "(Tensor path, Tensor lengths, Tensor slots, Tensor buffers, int max_row_bytes, Tensor? hidden, "             \
     "Tensor(a!)? hidden_out) -> ()")                                                                              \
  OP(recurrent_verify,                                                                                             \
     "(Tensor q, Tensor k, Tensor v, Tensor states, Tensor state_indices, Tensor ancestors, int kind, "            \
     "Tensor? gate, Tensor? beta, Tensor decay, Tensor? bias, Tensor? skip, float scale, bool normalize, "         \
     "float lower_bound, Tensor(a!) o, Tensor(b!) k_kept, Tensor(c!) u_kept, Tensor(d!) g_kept) -> ()")            \
  OP(recurrent_commit,                                                                                             \
     "(Tensor(a!) states, Tensor state_indices, Tensor path, Tensor lengths, Tensor k_kept, Tensor u_kept, "       \
     "Tensor g_kept, Tensor? track_indices, Tensor? track_positions) -> ()")                                       \
  OP(conv_verify,                                                                                                  \
     "(Tensor x, Tensor window, Tensor state_indices, Tensor ancestors, Tensor weight, Tensor? bias, bool silu, "  \
     "Tensor(a!) out, Tensor(b!) x_kept) -> ()")                                                                   \
  OP(conv_commit,                                                                                                  \
     "(Tensor(a!) window, Tensor state_indices, Tensor path, Tensor lengths, Tensor x_kept, "                      \
     "Tensor? track_indices, Tensor? track_positions) -> ()")                                                      \
  OP(verify_gqa,                                                                                                   \
     "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, "          \
     "Tensor prefix_lens, Tensor tree_slots, Tensor ancestors, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "  \
     "float sm_scale, float logit_cap, int sliding_window, int page_size, int num_nodes, int num_splits, "         \
     "Tensor(a!) workspace, Tensor(b!) o, Tensor(c!)? lse) -> ()")                                                 \
  OP(verify_mla,                                                                                                   \
     "(Tensor q, Tensor kv_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor prefix_lens, "     \
     "Tensor tree_slots, Tensor ancestors, Tensor? kv_scale, float sm_scale, float logit_cap, "                    \
     "int sliding_window, int page_size, int num_nodes, int num_splits, Tensor(a!) workspace, Tensor(b!) o, "      \
     "Tensor(c!)? lse) -> ()")                                                                                     \
  OP(verify_plan,                                                                                                  \
     "(Tensor like, int bs, int num_nodes, int h_q, int h_kv, int d_qk, int d_v) -> (int, int)")                   \
  OP(verify_check,                                                                                                 \
     "(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor prefix_lens, Tensor tree_slots, "             \
     "Tensor ancestors, int page_size, int num_nodes, int num_slots) -> ()")                                                      \
  OP(index_logits,                                                                                                 \
     "(Tensor q, Tensor keys, Tensor weights, Tensor seq_lens, Tensor page_table, Tensor(a!) out) -> ()")           \
  OP(store_index_keys,                                                                                             \
     "(Tensor kv, Tensor plan, Tensor norm_weight, float norm_eps, Tensor freqs, Tensor out_loc, "                 \
     "Tensor(a!) keys, bool decode) -> ()")
// clang-format on

#ifdef DDTREE_CUDA_KEYS

#define DDTREE_IMPL(name, schema) m.impl("ddtree_" #name, TORCH_BOX(&ddtree::name##_cuda));
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CUDA, m) { DDTREE_OPS(DDTREE_IMPL) }

#else

namespace ddtree {

// What Python must know of the headers: MAX_NODES, MAX_DEPTH, MAX_CANDIDATES, MAX_PATHS, MLA's d_qk and d_v, then the
// head sizes of GQA. Unpacked in python/sgl_kernel/ddtree/limits.py.
std::vector<int64_t> limits() {
  std::vector<int64_t> values = {kMaxNodes, kMaxDepth, kMaxCandidates, kMaxPaths, kMlaQkDim, kMlaVDim};
  values.insert(values.end(), std::begin(kGqaHeadSizes), std::end(kGqaHeadSizes));
  return values;
}

}  // namespace ddtree

#define DDTREE_SCHEMA(name, schema) m.def("ddtree_" #name schema);
STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  DDTREE_OPS(DDTREE_SCHEMA)
  m.def("ddtree_limits() -> int[]");
}

// An op without tensor arguments has no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) {
  m.impl("ddtree_limits", TORCH_BOX(&ddtree::limits));
}

#define DDTREE_IMPL(name, schema) m.impl("ddtree_" #name, TORCH_BOX(&ddtree::name##_cpu));
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) { DDTREE_OPS(DDTREE_IMPL) }

#endif
