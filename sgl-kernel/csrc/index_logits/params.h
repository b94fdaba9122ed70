// Parameters of the index logits, shared by the CUDA kernel and the CPU reference. No torch here: api.cc turns tensors
// into this struct.
#pragma once

#include <cstdint>

#include "common/draft_tree.h"

namespace ddtree {

constexpr int kIndexHeadDim = 128;
constexpr int kIndexHeadGroup = 8;  // heads come in multiples of it
constexpr int kMaxIndexHeads = 64;
constexpr int kMaxIndexRows = 4;    // query rows per request
constexpr int kIndexTileKeys = 32;  // keys that a warp takes at a time; they are in one page

// The scores by which DeepSeek's sparse attention selects keys, for R query rows per request over keys in pages:
//   out[r, i, t] = sum over heads h of weights[r, i, h] * max(q[r, i, h] . key(r, t), 0)    for t < seq_lens[r, i]
//   key(r, t) = keys[page_table[r, t / page_size], t % page_size]
// A product that is NaN counts as 0. Nothing is written from seq_lens[r, i] on. Strides count elements.
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

}  // namespace ddtree
