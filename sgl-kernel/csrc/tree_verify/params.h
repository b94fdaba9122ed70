// Parameters of the tree-verify attention ops, shared by the CUDA kernels and the CPU reference.
// No torch here: api.cc turns tensors into this struct. N and the ancestor words: common/draft_tree.h.
#pragma once

#include <cstdint>

#include "common/draft_tree.h"
#include "common/dtype.h"

namespace ddtree {

constexpr int kMlaQkDim = 576;  // ckv 512 | kpe 64
constexpr int kMlaVDim = 512;

// The head sizes that GQA has kernels for: F(size) for each. Python reads them through the op ddtree_limits.
#define DDTREE_GQA_HEAD_SIZES(F) F(64) F(96) F(128) F(192) F(256)
#define DDTREE_ENTRY(size) size,
constexpr int kGqaHeadSizes[] = {DDTREE_GQA_HEAD_SIZES(DDTREE_ENTRY)};
#undef DDTREE_ENTRY

// LSE is the natural logarithm of the sum of exp(logit). Logits are scaled and capped, and sinks are included. A row
// (or a split) that attends to nothing has LSE = -inf and o = 0, which combine ignores.
struct TreeVerifyParams {
  // Queries: T rows, one per node. Request r owns rows [qo_indptr[r], qo_indptr[r + 1]).
  const void* q;                   // [T, h_q, d_qk] q_dtype
  void* o;                         // [T, h_q, d_v] q_dtype
  float* lse;                      // [T, h_q] or nullptr
  int64_t q_stride_t, q_stride_h;  // strides in elements; the last dimension is contiguous
  int64_t o_stride_t, o_stride_h;

  // KV pool in SGLang's own layout. MLA: v_cache == k_cache (V is the first 512 elements of a latent row), h_kv == 1.
  const void* k_cache;  // [slots, h_kv, d_qk] kv_dtype
  const void* v_cache;  // [slots, h_kv, d_v] kv_dtype
  int64_t k_stride_slot, k_stride_h;
  int64_t v_stride_slot, v_stride_h;
  int64_t num_slots;
  // Prefix tokens of a request whose positions have the same quotient by page_size have consecutive slots. 1: any
  // slots.
  int32_t page_size = 1;

  // Ragged batch. Every length is read on the device, so one captured graph serves every replay.
  const int32_t* qo_indptr;    // [bs + 1]
  const int32_t* kv_indptr;    // [bs + 1] start of each request's prefix in kv_indices
  const void* kv_indices;      // prefix slots, int32 or int64 (kv_indices_is_64)
  const int32_t* prefix_lens;  // [bs] tokens of the prefix; <= kv_indptr[r + 1] - kv_indptr[r]
  const void* tree_slots;      // [T] slot of each node's own K and V, int32 or int64 (tree_slots_is_64)
  const uint64_t* ancestors;   // [T, words] node indices are relative to the request: bit 0 is its root
  const float* sinks;          // [h_q] or nullptr: an extra logit per head with no value
  const float* k_scale;        // device scalar or nullptr (1.0): fp8 K is k_fp8 * k_scale
  const float* v_scale;        // device scalar or nullptr (1.0)

  // Workspace that the caller allocates once (see workspace_bytes()). It needs no initialization.
  void* workspace;
  int64_t workspace_bytes;

  float sm_scale;          // softmax scale, > 0
  float logit_cap;         // 0: off; otherwise logit = cap * tanh(logit / cap)
  int32_t sliding_window;  // < 0: off; otherwise a node at position p attends to positions >= p - sliding_window
  int32_t bs;              // requests (fixed at capture; empty ones are allowed)
  int32_t total_rows;      // T (fixed at capture)
  int32_t num_nodes;       // N, the most nodes per request (fixed at capture): 1 to kMaxNodes
  int32_t words;           // row stride of ancestors: ancestor_words(N) or more
  int32_t h_q, h_kv, d_qk, d_v;
  int32_t num_splits;       // fixed at capture; the kernels cut each prefix by its length on the device
  DType q_dtype, kv_dtype;  // float32 in the CPU reference only
  bool kv_indices_is_64, tree_slots_is_64;
};

}  // namespace ddtree
