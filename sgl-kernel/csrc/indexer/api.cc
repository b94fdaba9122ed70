#include "indexer/api.h"

#include <torch/csrc/stable/ops.h>

#include "common/check.h"
#include "indexer/reference.h"

namespace ddtree {
namespace {

constexpr ScalarType kByte = ScalarType::Byte, kLong = ScalarType::Long;
constexpr ScalarType kBFloat16 = ScalarType::BFloat16, kFloat = ScalarType::Float, kInt = ScalarType::Int;
constexpr int64_t kVectorBytes = 16;            // the kernels load vectors of this size
constexpr int64_t kMaxKeys = int64_t{1} << 30;  // index_logits counts tiles, and the keys of a row, in 32 bits

void check_keys(const Tensor& keys, const Arg& first) {
  Arg("keys", keys).on(first).dtype({kBFloat16}).shape({Arg::kAny, Arg::kAny, kIndexHeadDim});
  Arg("keys", keys).last_dim_contiguous().aligned(kVectorBytes);
  const int64_t page_size = keys.size(1);
  check(page_size <= 1 || keys.stride(1) == kIndexHeadDim, "keys",
        "contiguous pages (slots " + std::to_string(kIndexHeadDim) + " elements apart)", keys.stride(1));
  check(page_size >= 1 && page_size % kIndexTileKeys == 0, "keys",
        "pages of a multiple of " + std::to_string(kIndexTileKeys) + " slots", std::to_string(page_size) + " slots");
}

template <typename Params>
void run_reference(const Params& params) {
  if (const std::string error = check_values(params); !error.empty()) throw std::invalid_argument(error);
  torch::stable::parallel_for(0, reference_num_items(params), 1,
                              [&](int64_t begin, int64_t end) { reference_run(params, begin, end); });
}

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

  check_keys(keys, first);
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
  params.page_size = static_cast<int32_t>(keys.size(1));
  check(params.limit() <= kMaxKeys, "out", "at most 2^30 keys per row", params.limit());
  check(bs * params.limit() <= kIndexTileKeys * kMaxKeys, "out", "at most 2^35 keys in all", bs * params.limit());
  return params;
}

StoreIndexKeysParams store_index_keys_params(const Tensor& kv, const Tensor& plan, const Tensor& norm_weight,
                                             double norm_eps, const Tensor& freqs, const Tensor& out_loc,
                                             const Tensor& keys, bool decode) {
  const Arg first("kv", kv);
  first.dtype({kFloat}).shape({Arg::kAny, kIndexHeadDim}).last_dim_contiguous().aligned(kVectorBytes);
  const int64_t rows = kv.size(0);
  Arg("plan", plan).on(first).dtype({kByte}).shape({rows, sizeof(IndexPlanRow)}).contiguous().aligned(4);
  Arg("norm_weight", norm_weight).on(first).dtype({kFloat}).shape({kIndexHeadDim}).contiguous().aligned(kVectorBytes);
  check(norm_eps >= 0, "norm_eps", "0 or more", norm_eps);
  Arg("freqs", freqs).on(first).dtype({kFloat}).shape({Arg::kAny, kIndexRopeDim});
  Arg("freqs", freqs).last_dim_contiguous().aligned(kVectorBytes);
  Arg("out_loc", out_loc).on(first).dtype({kLong}).dims(1).contiguous();
  check(!decode || out_loc.size(0) == rows, "out_loc", "a slot for each of kv's " + std::to_string(rows) + " rows",
        out_loc.size(0));
  check_keys(keys, first);

  StoreIndexKeysParams params{};
  params.kv = kv.const_data_ptr<float>();
  params.plan = static_cast<const IndexPlanRow*>(plan.const_data_ptr());
  params.norm_weight = norm_weight.const_data_ptr<float>();
  params.freqs = freqs.const_data_ptr<float>();
  params.out_loc = out_loc.const_data_ptr<int64_t>();
  params.keys = keys.mutable_data_ptr();
  params.kv_stride = kv.stride(0);
  params.freq_stride = freqs.stride(0);
  params.key_stride_page = keys.stride(0);
  params.rows = rows;
  params.num_positions = freqs.size(0);
  params.num_tokens = out_loc.size(0);
  params.num_pages = keys.size(0);
  params.eps = static_cast<float>(norm_eps);
  params.page_size = static_cast<int32_t>(keys.size(1));
  params.decode = decode;
  return params;
}

void run_cpu(const IndexLogitsParams& params, const Tensor&) { run_reference(params); }
void run_cpu(const StoreIndexKeysParams& params, const Tensor&) { run_reference(params); }

}  // namespace ddtree
