// The ops of torch.ops.sgl_kernel that this package adds. One entry an op, OP(name, schema): it registers
// sgl_kernel::ddtree_<name>, implemented by ddtree::<name>_cpu and ddtree::<name>_cuda. Compiled twice: into
// _ddtree_cpu.so (schemas and CPU keys) and, with DDTREE_CUDA_KEYS, into _ddtree_cuda.so (CUDA keys). The Meta keys
// are in python/sgl_kernel/ddtree.
//
// Ops write into tensors of the caller and allocate nothing, so that a captured graph holds no memory of theirs.
#include <torch/csrc/stable/library.h>

#include "tree/ancestor_depth.h"
#include "tree/api.h"
#include "tree_verify/api.h"

// clang-format off
#define DDTREE_OPS(OP)                                                                                             \
  OP(ancestor_depth, "(Tensor ancestors, Tensor(a!) depth) -> ()")                                                 \
  OP(build,                                                                                                        \
     "(Tensor candidates, Tensor log_probs, Tensor? log_sum, Tensor bonus, Tensor? budget, Tensor? prefix_lens, "  \
     "bool keep_spine, Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) depths, Tensor(d!) ancestors, "           \
     "Tensor(e!) first_child, Tensor(f!) next_sibling, Tensor(g!) num_rows, Tensor(h!)? positions) -> ()")         \
  OP(accept,                                                                                                       \
     "(Tensor tokens, Tensor parents, Tensor target, Tensor(a!) path, Tensor(b!) output, Tensor(c!) lengths, "     \
     "Tensor(d!) bonus) -> ()")                                                                                    \
  /* Also writes to the KV buffers, by the addresses in `buffers`. */                                              \
  OP(commit,                                                                                                       \
     "(Tensor path, Tensor lengths, Tensor slots, Tensor buffers, int max_row_bytes, Tensor? hidden, "             \
     "Tensor(a!)? hidden_out) -> ()")                                                                              \
  OP(verify_gqa,                                                                                                   \
     "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, "          \
     "Tensor prefix_lens, Tensor tree_slots, Tensor ancestors, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "  \
     "float sm_scale, float logit_cap, int sliding_window, int max_rows, int num_splits, "                         \
     "Tensor(a!) workspace, Tensor(b!) o, Tensor(c!)? lse) -> ()")                                                 \
  OP(verify_mla,                                                                                                   \
     "(Tensor q, Tensor kv_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor prefix_lens, "     \
     "Tensor tree_slots, Tensor ancestors, Tensor? kv_scale, float sm_scale, float logit_cap, "                    \
     "int sliding_window, int max_rows, int num_splits, Tensor(a!) workspace, Tensor(b!) o, "                      \
     "Tensor(c!)? lse) -> ()")                                                                                     \
  OP(verify_plan,                                                                                                  \
     "(Tensor like, int b, int max_rows, int h_q, int h_kv, int d_qk, int d_v) -> (int, int)")                     \
  OP(verify_check,                                                                                                 \
     "(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor prefix_lens, Tensor tree_slots, "             \
     "Tensor ancestors, int max_rows, int num_slots) -> ()")
// clang-format on

#ifdef DDTREE_CUDA_KEYS

#define DDTREE_IMPL(name, schema) m.impl("ddtree_" #name, TORCH_BOX(&ddtree::name##_cuda));
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CUDA, m){DDTREE_OPS(DDTREE_IMPL)}

#else

#define DDTREE_SCHEMA(name, schema) m.def("ddtree_" #name schema);
STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m){DDTREE_OPS(DDTREE_SCHEMA)}

#define DDTREE_IMPL(name, schema) m.impl("ddtree_" #name, TORCH_BOX(&ddtree::name##_cpu));
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  DDTREE_OPS(DDTREE_IMPL)
}

#endif
