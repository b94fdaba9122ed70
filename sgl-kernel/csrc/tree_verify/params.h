// Parameters of the tree-verify attention ops, shared by the CUDA kernels and the CPU reference.
// No torch here or below: api.cc turns tensors into this struct.
#pragma once

#include <cstdint>

namespace ddtree {

// Element type of q / o and of the KV cache.
enum class DType : int32_t { kBFloat16 = 0, kFloat16 = 1, kFloat8E4M3 = 2, kFloat32 = 3 /* CPU reference only */ };

constexpr int kMaxTreeRows = 256;      // rows of one request: root (bonus token) + nodes
constexpr int kAncestorWordBits = 64;  // bit j of word j / 64: node j is an ancestor of the row, or the row itself
constexpr int kMlaQkDim = 576;         // ckv 512 | kpe 64
constexpr int kMlaVDim = 512;

// The head sizes that GQA has kernels for: F(size) for each.
#define DDTREE_GQA_HEAD_SIZES(F) F(64) F(96) F(128) F(192) F(256)

// LSE is the natural logarithm of the sum of exp(logit), logits scaled and capped, sinks included.
// A row (or a split) that attends to nothing has LSE = -inf and o = 0; combine ignores it. This is the one place
// that says so.
struct TreeVerifyParams {
  // Queries: T rows, request r owns rows [qo_indptr[r], qo_indptr[r + 1]).
  const void* q;                   // [T, h_q, d_qk] q_dtype
  void* o;                         // [T, h_q, d_v] q_dtype
  float* lse;                      // [T, h_q] or nullptr
  int64_t q_stride_t, q_stride_h;  // strides in elements; the last dimension is contiguous
  int64_t o_stride_t, o_stride_h;

  // KV pool in SGLang's own layout. MLA: v_cache == k_cache (V is the first 512 of a latent row), h_kv == 1.
  const void* k_cache;  // [slots, h_kv, d_qk] kv_dtype
  const void* v_cache;  // [slots, h_kv, d_v] kv_dtype
  int64_t k_stride_slot, k_stride_h;
  int64_t v_stride_slot, v_stride_h;
  int64_t num_slots;

  // Ragged batch; every length is read on the device, so that a captured graph serves every replay.
  const int32_t* qo_indptr;    // [b + 1]
  const int32_t* kv_indptr;    // [b + 1] start of each request's prefix in kv_indices
  const void* kv_indices;      // prefix slots, int32 or int64 (kv_indices_is_64)
  const int32_t* prefix_lens;  // [b] tokens of the prefix; <= kv_indptr[r + 1] - kv_indptr[r]
  const void* tree_slots;      // [T] slot of each tree row's own K/V, int32 or int64 (tree_slots_is_64)
  const uint64_t* ancestors;   // [T, words] rows are relative to the request: bit 0 is its root
  const float* sinks;          // [h_q] or nullptr: an extra logit per head with no value
  const float* k_scale;        // device scalar or nullptr (1.0): fp8 K is k_fp8 * k_scale
  const float* v_scale;        // device scalar or nullptr (1.0)

  // Workspace that the caller allocates once (see workspace_bytes()); contents need no initialization.
  void* workspace;
  int64_t workspace_bytes;

  float sm_scale;          // softmax scale, > 0
  float logit_cap;         // 0: off; else logit = cap * tanh(logit / cap)
  int32_t sliding_window;  // < 0: off; else row at position p attends to positions >= p - sliding_window
  int32_t b;               // requests (static at capture; empty ones allowed)
  int32_t total_rows;      // T (static at capture)
  int32_t max_rows;        // static bound of rows a request, 1 .. kMaxTreeRows
  int32_t words;           // ceil(max_rows / 64) or more: row stride of ancestors
  int32_t h_q, h_kv, d_qk, d_v;
  int32_t num_splits;  // static at capture; the kernels cut each prefix by its device length
  DType q_dtype, kv_dtype;
  bool kv_indices_is_64, tree_slots_is_64;
};

}  // namespace ddtree
