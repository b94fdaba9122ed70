#include "index_logits/api.h"

#include <torch/csrc/stable/ops.h>

#include "common/check.h"
#include "index_logits/reference.h"

namespace ddtree {
namespace {

constexpr ScalarType kBFloat16 = ScalarType::BFloat16, kFloat = ScalarType::Float, kInt = ScalarType::Int;
constexpr int64_t kVectorBytes = 16;            // the kernel loads q and keys in vectors of this size
constexpr int64_t kMaxKeys = int64_t{1} << 30;  // it counts tiles, and the keys of a row, in 32 bits

}  // namespace

IndexLogitsParams index_logits_params(const Tensor& q, const Tensor& keys, const Tensor& weights,
                                      const Tensor& seq_lens, const Tensor& page_table, const Tensor& out) {
  const Arg first("q", q);
  first.dtype({kBFloat16}).shape({Arg::kAny, Arg::kAny, kIndexHeadDim}).last_dim_contiguous().aligned(kVectorBytes);
  const int64_t rows = q.size(0), H = q.size(1);
  check(H >= 1 && H <= kMaxIndexHeads && H % kIndexHeadGroup == 0, "q",
        "heads in a multiple of " + std::to_string(kIndexHeadGroup) + ", at most " + std::to_string(kMaxIndexHeads),
        std::to_string(H) + " heads");

  Arg("page_table", page_table).on(first).dtype({kInt}).dims(2).last_dim_contiguous();
  const int64_t bs = page_table.size(0), R = bs > 0 ? rows / bs : 1;
  check(rows == bs * R && R >= 1 && R <= kMaxIndexRows, "q",
        "1 to " + std::to_string(kMaxIndexRows) + " rows for each of page_table's " + std::to_string(bs) + " requests",
        std::to_string(rows) + " rows");

  Arg("keys", keys).on(first).dtype({kBFloat16}).shape({Arg::kAny, Arg::kAny, kIndexHeadDim});
  Arg("keys", keys).last_dim_contiguous().aligned(kVectorBytes);
  const int64_t page_size = keys.size(1);
  check(page_size <= 1 || keys.stride(1) == kIndexHeadDim, "keys",
        "contiguous pages (slots " + std::to_string(kIndexHeadDim) + " elements apart)", keys.stride(1));
  check(page_size >= 1 && page_size % kIndexTileKeys == 0, "keys",
        "pages of a multiple of " + std::to_string(kIndexTileKeys) + " slots", std::to_string(page_size) + " slots");

  Arg("weights", weights).on(first).dtype({kFloat}).shape({rows, H}).last_dim_contiguous().aligned(2 * sizeof(float));
  Arg("seq_lens", seq_lens).on(first).dtype({kInt}).shape({rows}).contiguous();
  Arg("out", out).on(first).dtype({kFloat}).shape({rows, Arg::kAny}).last_dim_contiguous();

  IndexLogitsParams params{};
  params.q = q.const_data_ptr();
  params.keys = keys.const_data_ptr();
  params.weights = weights.const_data_ptr<float>();
  params.seq_lens = seq_lens.const_data_ptr<int32_t>();
  params.page_table = page_table.const_data_ptr<int32_t>();
  params.out = out.mutable_data_ptr<float>();
  params.q_stride_row = q.stride(0);
  params.q_stride_head = q.stride(1);
  params.key_stride_page = keys.stride(0);
  params.weight_stride = weights.stride(0);
  params.table_stride = page_table.stride(0);
  params.out_stride = out.stride(0);
  params.num_pages = keys.size(0);
  params.pages_per_request = page_table.size(1);
  params.max_len = out.size(1);
  params.bs = static_cast<int32_t>(bs);
  params.rows = static_cast<int32_t>(R);
  params.heads = static_cast<int32_t>(H);
  params.page_size = static_cast<int32_t>(page_size);
  check(params.limit() <= kMaxKeys, "out", "at most 2^30 keys per row", params.limit());
  check(bs * params.limit() <= kIndexTileKeys * kMaxKeys, "out", "at most 2^35 keys in all", bs * params.limit());
  return params;
}

void run_cpu(const IndexLogitsParams& params, const Tensor&) {
  if (const std::string error = check_values(params); !error.empty()) throw std::invalid_argument(error);
  torch::stable::parallel_for(0, reference_num_items(params), 1,
                              [&](int64_t begin, int64_t end) { reference_run(params, begin, end); });
}

}  // namespace ddtree
