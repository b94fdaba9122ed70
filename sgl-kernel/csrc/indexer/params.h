// Parameters of the ops of an indexer, shared by the CUDA kernels and the CPU references. No torch here: api.cc turns
// tensors into these structs. Strides count elements.
#pragma once

#include <cstdint>

#include "common/draft_tree.h"

namespace ddtree {

constexpr int kIndexHeadDim = 128;
constexpr int kIndexHeadGroup = 8;  // heads come in multiples of it
constexpr int kMaxIndexHeads = 64;
constexpr int kMaxIndexRows = 4;    // query rows per request
constexpr int kIndexTileKeys = 32;  // a page holds a multiple of it

// The scores by which DeepSeek's sparse attention selects keys, for R query rows per request over keys in pages:
//   out[r, i, t] = sum over heads h of weights[r, i, h] * max(q[r, i, h] . key(r, t), 0)    for t < seq_lens[r, i]
//   key(r, t) = keys[page_table[r, t / page_size], t % page_size]
// A product that is NaN counts as 0. Nothing is written from seq_lens[r, i] on.
struct IndexLogitsParams {
  const void* q;              // [bs * R, H, 128] bfloat16
  const void* keys;           // [num_pages, page_size, 128] bfloat16; a page is contiguous
  const float* weights;       // [bs * R, H]
  const int32_t* seq_lens;    // [bs, R] keys that each row sees, 0 to limit()
  const int32_t* page_table;  // [bs, pages_per_request]; only the pages that hold seen keys are read
  float* out;                 // [bs * R, max_len]

  int64_t q_stride_row, q_stride_head, key_stride_page, weight_stride, table_stride, out_stride;
  int64_t num_pages, pages_per_request, max_len;
  int32_t bs, rows /* R */, heads /* H */, page_size;

  // The longest length that the page table and the output have room for.
  DDTREE_HOST_DEVICE int64_t limit() const {
    const int64_t table = pages_per_request * page_size;
    return table < max_len ? table : max_len;
  }
};

constexpr int kIndexRopeDim = 64;  // the last dimensions of a key are rotated
constexpr int kIndexRatio = 4;     // tokens per key

// A row of SGLang's compression plan (kernels/jit/include/sgl_kernel/deepseek_v4/compress_v2.cuh, DecodePlan and
// CompressPlan), as far as it is read here.
struct IndexPlanRow {
  int32_t seq_len;  // tokens up to and including the row's last one; -1: the row is padding
  uint16_t token;   // prefill: the row's last token among the tokens of the step. Decode keeps something else here
  uint16_t other[5];
};
static_assert(sizeof(IndexPlanRow) == 16);

// Finishes the keys that the compressor made of four tokens each, and stores them:
//   x = kv[i] / sqrt(mean(kv[i]^2) + eps) * norm_weight, whose last 64 dimensions are then rotated in pairs:
//   (x[j], x[j + 1]) -> (x[j] c - x[j + 1] s, x[j] s + x[j + 1] c), with (c, s) = freqs[position, j - 64 .. j - 63]
// rounded to bfloat16. A row whose seq_len is not a positive multiple of 4 has no key.
struct StoreIndexKeysParams {
  const float* kv;           // [rows, 128]
  const IndexPlanRow* plan;  // [rows]
  const float* norm_weight;  // [128]
  const float* freqs;        // [num_positions, 64]
  const int64_t* out_loc;    // [num_tokens] slot of each token's key
  void* keys;                // [num_pages, page_size, 128] bfloat16; a page is contiguous

  int64_t kv_stride, freq_stride, key_stride_page, rows, num_positions, num_tokens, num_pages;
  float eps;
  int32_t page_size;
  bool decode;  // row i is token i

  DDTREE_HOST_DEVICE static bool is_key(int32_t seq_len) { return seq_len > 0 && seq_len % kIndexRatio == 0; }
  DDTREE_HOST_DEVICE static int32_t position(int32_t seq_len) { return seq_len - kIndexRatio; }
  DDTREE_HOST_DEVICE int64_t token(int64_t row) const { return decode ? row : plan[row].token; }
  DDTREE_HOST_DEVICE bool has_slot(int64_t slot) const { return slot >= 0 && slot < num_pages * page_size; }
  // Offset of a slot's key in `keys`.
  DDTREE_HOST_DEVICE int64_t key_offset(int64_t slot) const {
    return slot / page_size * key_stride_page + slot % page_size * kIndexHeadDim;
  }
};

}  // namespace ddtree
