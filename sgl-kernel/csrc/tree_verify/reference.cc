#include "tree_verify/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/float_types.h"

// One binary serves every x86-64 CPU: the loader picks the widest version that the processor supports.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DDTREE_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DDTREE_SIMD_CLONES
#endif

namespace ddtree {
namespace {

constexpr int64_t kRowTile = 4;       // rows of A that share one load of B
constexpr int64_t kRowsPerItem = 32;  // packed rows (node x head of the group) per work item
constexpr int64_t kTokensPerBlock = 64;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

typedef double Vector __attribute__((vector_size(64), aligned(8)));
constexpr int64_t kLanes = sizeof(Vector) / sizeof(double);

// C[m, n] += A[m, k] * B[k, n], row-major, in double. m is a multiple of kRowTile, n of kLanes.
DDTREE_SIMD_CLONES
void gemm_accumulate(int64_t m, int64_t n, int64_t k, const double* a, int64_t lda, const double* b, int64_t ldb,
                     double* c, int64_t ldc) {
  for (int64_t row = 0; row < m; row += kRowTile) {
    for (int64_t col = 0; col < n; col += kLanes) {
      Vector sum[kRowTile];
      for (int64_t i = 0; i < kRowTile; ++i) sum[i] = *reinterpret_cast<Vector*>(c + (row + i) * ldc + col);
      for (int64_t x = 0; x < k; ++x) {
        const Vector b_row = *reinterpret_cast<const Vector*>(b + x * ldb + col);
        for (int64_t i = 0; i < kRowTile; ++i) sum[i] += a[(row + i) * lda + x] * b_row;
      }
      for (int64_t i = 0; i < kRowTile; ++i) *reinterpret_cast<Vector*>(c + (row + i) * ldc + col) = sum[i];
    }
  }
}

int64_t index_at(const void* indices, bool is_64, int64_t i) {
  return is_64 ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}

template <typename T>
void read(const void* base, int64_t offset, int64_t count, double* out, int64_t out_stride) {
  const T* in = static_cast<const T*>(base) + offset;
  for (int64_t i = 0; i < count; ++i) out[i * out_stride] = static_cast<float>(in[i]);
}

void read(DType type, const void* base, int64_t offset, int64_t count, double* out, int64_t out_stride) {
  switch (type) {
    case DType::kBFloat16: return read<BFloat16>(base, offset, count, out, out_stride);
    case DType::kFloat16: return read<Float16>(base, offset, count, out, out_stride);
    case DType::kFloat8E4M3: return read<Float8E4M3>(base, offset, count, out, out_stride);
    case DType::kFloat32: return read<float>(base, offset, count, out, out_stride);
  }
}

void write(DType type, void* base, int64_t offset, int64_t count, const double* in, double factor) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(in[i] * factor);
    switch (type) {
      case DType::kBFloat16: static_cast<BFloat16*>(base)[offset + i] = BFloat16::round(value); break;
      case DType::kFloat16: static_cast<Float16*>(base)[offset + i] = Float16::round(value); break;
      default: static_cast<float*>(base)[offset + i] = value; break;
    }
  }
}

int64_t chunks_per_head(const TreeVerifyParams& p) {
  const int64_t packed = int64_t{p.num_nodes} * (p.h_q / p.h_kv);
  return (packed + kRowsPerItem - 1) / kRowsPerItem;
}

// Running softmax for some packed rows of one request and KV head, over the prefix and then the tree.
class Item {
 public:
  Item(const TreeVerifyParams& p, int64_t request, int64_t kv_head, int64_t first, int64_t count)
      : p_(p),
        group_(p.h_q / p.h_kv),
        kv_head_(kv_head),
        first_(first),
        count_(count),
        padded_((count + kRowTile - 1) / kRowTile * kRowTile),
        row_begin_(p.qo_indptr[request]),
        num_nodes_(p.qo_indptr[request + 1] - p.qo_indptr[request]),
        prefix_len_(p.prefix_lens[request]),
        kv_begin_(p.kv_indptr[request]),
        q_(padded_ * p.d_qk),
        k_transposed_(p.d_qk * kTokensPerBlock),
        v_(kTokensPerBlock * p.d_v),
        weights_(padded_ * kTokensPerBlock),
        o_(padded_ * p.d_v),
        max_(count, kMinusInfinity),
        sum_(count, 0.0),
        position_(count) {
    const double scale = double{p.sm_scale} * (p.k_scale ? *p.k_scale : 1.0f);
    for (int64_t m = 0; m < count_; ++m) {
      read(p_.q_dtype, p_.q, row(m) * p_.q_stride_t + head(m) * p_.q_stride_h, p_.d_qk, &q_[m * p_.d_qk], 1);
      for (int64_t i = 0; i < p_.d_qk; ++i) q_[m * p_.d_qk + i] *= scale;
      position_[m] = prefix_len_ + node_depth(words(row(m)), p_.words);
      if (p_.sinks) {  // a logit with no value
        max_[m] = p_.sinks[head(m)];
        sum_[m] = 1.0;
      }
    }
  }

  void run() {
    int64_t start = 0;
    if (p_.sliding_window >= 0) {  // do not even read tokens that no row of this item sees: they may be freed
      start = std::max<int64_t>(0, *std::min_element(position_.begin(), position_.end()) - p_.sliding_window);
    }
    for (int64_t t = start; t < prefix_len_; t += kTokensPerBlock) {
      attend(t, std::min(kTokensPerBlock, prefix_len_ - t), /*in_tree=*/false);
    }
    for (int64_t t = 0; t < num_nodes_; t += kTokensPerBlock) {
      attend(t, std::min(kTokensPerBlock, num_nodes_ - t), /*in_tree=*/true);
    }
    const double v_scale = p_.v_scale ? *p_.v_scale : 1.0f;
    for (int64_t m = 0; m < count_; ++m) {
      write(p_.q_dtype, p_.o, row(m) * p_.o_stride_t + head(m) * p_.o_stride_h, p_.d_v, &o_[m * p_.d_v],
            sum_[m] > 0 ? v_scale / sum_[m] : 0.0);
      if (p_.lse) {
        p_.lse[row(m) * p_.h_q + head(m)] =
            static_cast<float>(sum_[m] > 0 ? max_[m] + std::log(sum_[m]) : kMinusInfinity);
      }
    }
  }

 private:
  int64_t row(int64_t m) const { return row_begin_ + (first_ + m) / group_; }
  int64_t head(int64_t m) const { return kv_head_ * group_ + (first_ + m) % group_; }
  const uint64_t* words(int64_t row) const { return p_.ancestors + row * p_.words; }

  bool sees(int64_t m, int64_t token, int64_t token_position, bool in_tree) const {
    if (in_tree && !has_ancestor(words(row(m)), static_cast<int>(token))) return false;
    return p_.sliding_window < 0 || token_position >= position_[m] - p_.sliding_window;
  }

  // Attends to one block of tokens: [begin, begin + count) of the prefix, or of the request's nodes.
  void attend(int64_t begin, int64_t count, bool in_tree) {
    int64_t token_position[kTokensPerBlock];
    if (count < kTokensPerBlock) {  // padding of the last block must be finite, because it is multiplied by weight 0
      std::fill(k_transposed_.begin(), k_transposed_.end(), 0.0);
      std::fill(v_.begin(), v_.end(), 0.0);
    }
    for (int64_t t = 0; t < count; ++t) {
      const int64_t slot = in_tree ? index_at(p_.tree_slots, p_.tree_slots_is_64, row_begin_ + begin + t)
                                   : index_at(p_.kv_indices, p_.kv_indices_is_64, kv_begin_ + begin + t);
      read(p_.kv_dtype, p_.k_cache, slot * p_.k_stride_slot + kv_head_ * p_.k_stride_h, p_.d_qk, &k_transposed_[t],
           kTokensPerBlock);
      read(p_.kv_dtype, p_.v_cache, slot * p_.v_stride_slot + kv_head_ * p_.v_stride_h, p_.d_v, &v_[t * p_.d_v], 1);
      token_position[t] = in_tree ? prefix_len_ + node_depth(words(row_begin_ + begin + t), p_.words) : begin + t;
    }

    std::fill(weights_.begin(), weights_.end(), 0.0);
    gemm_accumulate(padded_, kTokensPerBlock, p_.d_qk, q_.data(), p_.d_qk, k_transposed_.data(), kTokensPerBlock,
                    weights_.data(), kTokensPerBlock);
    for (int64_t m = 0; m < count_; ++m) {
      double* logits = &weights_[m * kTokensPerBlock];
      double block_max = max_[m];
      for (int64_t t = 0; t < kTokensPerBlock; ++t) {
        if (t >= count || !sees(m, begin + t, token_position[t], in_tree)) {
          logits[t] = kMinusInfinity;
          continue;
        }
        if (p_.logit_cap > 0) logits[t] = p_.logit_cap * std::tanh(logits[t] / p_.logit_cap);
        block_max = std::max(block_max, logits[t]);
      }
      if (block_max == kMinusInfinity) {  // nothing seen so far: exp(-inf - -inf) would be NaN
        std::fill(logits, logits + kTokensPerBlock, 0.0);
        continue;
      }
      const double rescale = std::exp(max_[m] - block_max);
      if (rescale != 1.0) {
        for (int64_t i = 0; i < p_.d_v; ++i) o_[m * p_.d_v + i] *= rescale;
      }
      double block_sum = 0;
      for (int64_t t = 0; t < kTokensPerBlock; ++t) {
        logits[t] = logits[t] == kMinusInfinity ? 0.0 : std::exp(logits[t] - block_max);
        block_sum += logits[t];
      }
      max_[m] = block_max;
      sum_[m] = sum_[m] * rescale + block_sum;
    }
    gemm_accumulate(padded_, p_.d_v, kTokensPerBlock, weights_.data(), kTokensPerBlock, v_.data(), p_.d_v, o_.data(),
                    p_.d_v);
  }

  const TreeVerifyParams& p_;
  const int64_t group_, kv_head_, first_, count_, padded_, row_begin_, num_nodes_, prefix_len_, kv_begin_;
  std::vector<double> q_;             // [padded, d_qk] multiplied by the softmax scale and k_scale
  std::vector<double> k_transposed_;  // [d_qk, kTokensPerBlock]
  std::vector<double> v_;             // [kTokensPerBlock, d_v]
  std::vector<double> weights_;       // [padded, kTokensPerBlock] logits, then exp(logit - max)
  std::vector<double> o_;             // [padded, d_v] not yet divided by sum
  std::vector<double> max_, sum_;     // [count] running maximum and sum of the softmax
  std::vector<int64_t> position_;     // [count] position of the row's token in its sequence
};

}  // namespace

int64_t reference_num_items(const TreeVerifyParams& params) {
  return int64_t{params.bs} * params.h_kv * chunks_per_head(params);
}

void reference_run(const TreeVerifyParams& params, int64_t begin, int64_t end) {
  const int64_t chunks = chunks_per_head(params);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t request = item / (chunks * params.h_kv);
    const int64_t kv_head = item / chunks % params.h_kv;
    const int64_t first = item % chunks * kRowsPerItem;
    const int64_t packed =
        int64_t{params.qo_indptr[request + 1] - params.qo_indptr[request]} * (params.h_q / params.h_kv);
    if (first >= packed) continue;  // a tree smaller than num_nodes, or an empty request
    Item(params, request, kv_head, first, std::min(kRowsPerItem, packed - first)).run();
  }
}

std::string check_values(const TreeVerifyParams& p, int64_t num_kv_indices) {
  const auto wrong = [](const std::string& argument, const std::string& expected, int64_t actual) {
    return argument + ": expected " + expected + ", got " + std::to_string(actual);
  };
  const auto at = [](const char* name, int64_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; };
  const auto slot_wrong = [&](const char* name, const void* slots, bool is_64, int64_t i) {
    const int64_t slot = index_at(slots, is_64, i);
    if (slot >= 0 && slot < p.num_slots) return std::string();
    return wrong(at(name, i), "a slot of the pool, 0 to " + std::to_string(p.num_slots - 1), slot);
  };

  if (p.qo_indptr[0] != 0) return wrong("qo_indptr[0]", "0", p.qo_indptr[0]);
  for (int64_t r = 0; r < p.bs; ++r) {
    const int64_t row_begin = p.qo_indptr[r], row_end = p.qo_indptr[r + 1], nodes = row_end - row_begin;
    if (nodes < 0 || nodes > p.num_nodes || row_end > p.total_rows) {
      return wrong(at("qo_indptr", r + 1),
                   std::to_string(row_begin) + " to " +
                       std::to_string(std::min<int64_t>(p.total_rows, row_begin + p.num_nodes)) +
                       " (at most num_nodes = " + std::to_string(p.num_nodes) + " rows per request, " +
                       std::to_string(p.total_rows) + " in total)",
                   row_end);
    }
    if (nodes == 0) continue;  // the op reads nothing of an empty request
    const int64_t kv_begin = p.kv_indptr[r], room = p.kv_indptr[r + 1] - kv_begin;
    if (kv_begin < 0 || room < 0 || kv_begin + room > num_kv_indices) {
      return wrong(at("kv_indptr", r + 1),
                   std::to_string(kv_begin) + " to " + std::to_string(num_kv_indices) + " (the length of kv_indices)",
                   p.kv_indptr[r + 1]);
    }
    if (p.prefix_lens[r] < 0 || p.prefix_lens[r] > room) {
      return wrong(at("prefix_lens", r), "0 to " + std::to_string(room) + " (the room that kv_indptr leaves)",
                   p.prefix_lens[r]);
    }
    for (int64_t i = kv_begin; i < kv_begin + p.prefix_lens[r]; ++i) {
      if (auto error = slot_wrong("kv_indices", p.kv_indices, p.kv_indices_is_64, i); !error.empty()) return error;
      if ((i - kv_begin) % p.page_size == 0) continue;
      const int64_t slot = index_at(p.kv_indices, p.kv_indices_is_64, i);
      const int64_t next = index_at(p.kv_indices, p.kv_indices_is_64, i - 1) + 1;
      if (slot != next) {
        return wrong(at("kv_indices", i),
                     std::to_string(next) +
                         ", the slot after the token before (page_size = " + std::to_string(p.page_size) + ")",
                     slot);
      }
    }
    for (int64_t row = row_begin; row < row_end; ++row) {
      if (auto error = slot_wrong("tree_slots", p.tree_slots, p.tree_slots_is_64, row); !error.empty()) return error;
      const uint64_t* words = p.ancestors + row * p.words;
      if (!has_ancestor(words, static_cast<int>(row - row_begin))) {
        return at("ancestors", row) + ": expected bit " + std::to_string(row - row_begin) + " (the node itself), got 0";
      }
      for (int node = static_cast<int>(nodes); node < p.words * kAncestorWordBits; ++node) {
        if (has_ancestor(words, node)) {
          return wrong(at("ancestors", row), "bits inside its request (nodes 0 to " + std::to_string(nodes - 1) + ")",
                       node);
        }
      }
    }
  }
  return {};
}

}  // namespace ddtree
