#include "index_logits/reference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/float_types.h"

namespace ddtree {
namespace {

constexpr int64_t kItemKeys = 256;  // an item is one query row over this many keys

int64_t items_per_row(const IndexLogitsParams& p) { return (p.limit() + kItemKeys - 1) / kItemKeys; }

double logit(const IndexLogitsParams& p, int64_t row, int64_t t) {
  const int32_t page = p.page_table[row / p.rows * p.table_stride + t / p.page_size];
  const auto* key = static_cast<const BFloat16*>(p.keys) + page * p.key_stride_page + t % p.page_size * kIndexHeadDim;
  double sum = 0;
  for (int h = 0; h < p.heads; ++h) {
    const auto* q = static_cast<const BFloat16*>(p.q) + row * p.q_stride_row + h * p.q_stride_head;
    double product = 0;
    for (int d = 0; d < kIndexHeadDim; ++d) product += double(q[d]) * double(key[d]);
    sum += std::fmax(product, 0.0) * p.weights[row * p.weight_stride + h];
  }
  return sum;
}

}  // namespace

std::string check_values(const IndexLogitsParams& p) {
  for (int64_t row = 0; row < int64_t{p.bs} * p.rows; ++row) {
    const int64_t length = p.seq_lens[row];
    if (length < 0 || length > p.limit()) {
      return "seq_lens: expected 0 to " + std::to_string(p.limit()) + " (the room in page_table and out), got " +
             std::to_string(length) + " at row " + std::to_string(row);
    }
    const int64_t request = row / p.rows, pages = (length + p.page_size - 1) / p.page_size;
    for (int64_t i = 0; i < pages; ++i) {
      const int64_t page = p.page_table[request * p.table_stride + i];
      if (page < 0 || page >= p.num_pages) {
        return "page_table: expected pages of 0 to " + std::to_string(p.num_pages - 1) + ", got " +
               std::to_string(page) + " at [" + std::to_string(request) + ", " + std::to_string(i) + "]";
      }
    }
  }
  return "";
}

int64_t reference_num_items(const IndexLogitsParams& p) { return int64_t{p.bs} * p.rows * items_per_row(p); }

void reference_run(const IndexLogitsParams& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / items_per_row(p), first = item % items_per_row(p) * kItemKeys;
    const int64_t last = std::min<int64_t>(first + kItemKeys, p.seq_lens[row]);
    for (int64_t t = first; t < last; ++t) p.out[row * p.out_stride + t] = static_cast<float>(logit(p, row, t));
  }
}

}  // namespace ddtree
