#include "indexer/reference.h"

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

void store_key(const StoreIndexKeysParams& p, int64_t row) {
  const float* kv = p.kv + row * p.kv_stride;
  const float* freqs = p.freqs + p.position(p.plan[row].seq_len) * p.freq_stride;
  double squares = 0;
  for (int d = 0; d < kIndexHeadDim; ++d) squares += double(kv[d]) * kv[d];
  const double norm = 1 / std::sqrt(squares / kIndexHeadDim + p.eps);
  auto* key = static_cast<BFloat16*>(p.keys) + p.key_offset(p.out_loc[p.token(row)]);
  const int first = kIndexHeadDim - kIndexRopeDim;
  for (int d = 0; d < kIndexHeadDim; d += 2) {
    const double real = kv[d] * norm * p.norm_weight[d], imaginary = kv[d + 1] * norm * p.norm_weight[d + 1];
    const double c = d < first ? 1 : freqs[d - first], s = d < first ? 0 : freqs[d - first + 1];
    key[d] = BFloat16::round(static_cast<float>(real * c - imaginary * s));
    key[d + 1] = BFloat16::round(static_cast<float>(real * s + imaginary * c));
  }
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

std::string check_values(const StoreIndexKeysParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int32_t seq_len = p.plan[row].seq_len;
    if (!p.is_key(seq_len)) continue;
    const int64_t token = p.token(row), position = p.position(seq_len);
    const std::string at = " at row " + std::to_string(row);
    if (position >= p.num_positions) {
      return "plan: expected positions of 0 to " + std::to_string(p.num_positions - 1) + " (freqs has no more), got " +
             std::to_string(position) + at;
    }
    if (token >= p.num_tokens) {
      return "plan: expected tokens of 0 to " + std::to_string(p.num_tokens - 1) + " (out_loc has no more), got " +
             std::to_string(token) + at;
    }
    if (!p.has_slot(p.out_loc[token])) {
      return "out_loc: expected slots of 0 to " + std::to_string(p.num_pages * p.page_size - 1) + ", got " +
             std::to_string(p.out_loc[token]) + " at token " + std::to_string(token);
    }
  }
  return "";
}

int64_t reference_num_items(const StoreIndexKeysParams& p) { return p.rows; }

void reference_run(const StoreIndexKeysParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (p.is_key(p.plan[row].seq_len)) store_key(p, row);
  }
}

}  // namespace ddtree
