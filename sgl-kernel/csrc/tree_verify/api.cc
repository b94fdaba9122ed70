#include "tree_verify/api.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/check.h"
#include "tree_verify/reference.h"

namespace ddtree {
namespace {

constexpr int64_t kVectorBytes = 16;  // the kernels load q and KV rows with 16-byte cp.async

std::string gqa_head_sizes_string() {
  std::string text;
  for (const int size : kGqaHeadSizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return text;
}

const float* scale_pointer(const char* name, const OptionalTensor& scale, const Arg& q, const Tensor& k_cache) {
  if (!scale) return nullptr;
  check(k_cache.scalar_type() == ScalarType::Float8_e4m3fn, name, "None unless the KV cache is float8_e4m3fn",
        "a tensor");
  Arg(name, *scale).on(q).dtype({ScalarType::Float});
  check(scale->numel() == 1, name, "one element", "shape " + shape_string(*scale));
  return scale->const_data_ptr<float>();
}

void raise_if(const std::string& error) {
  if (!error.empty()) throw std::invalid_argument(error);
}

}  // namespace

void set_index_params(TreeVerifyParams& params, const Tensor& qo_indptr, const Tensor& kv_indptr,
                      const Tensor& kv_indices, const Tensor& prefix_lens, const Tensor& tree_slots,
                      const Tensor& ancestors, int64_t page_size, int64_t num_nodes) {
  const Arg first("qo_indptr", qo_indptr);
  first.dtype({ScalarType::Int}).dims(1).contiguous();
  check(qo_indptr.size(0) >= 2, "qo_indptr", "shape [bs + 1] with bs of 1 or more", shape_string(qo_indptr));
  const int64_t bs = qo_indptr.size(0) - 1;
  Arg("kv_indptr", kv_indptr).on(first).dtype({ScalarType::Int}).shape({bs + 1}).contiguous();
  Arg("kv_indices", kv_indices).on(first).dtype({ScalarType::Int, ScalarType::Long}).dims(1).contiguous();
  Arg("prefix_lens", prefix_lens).on(first).dtype({ScalarType::Int}).shape({bs}).contiguous();
  Arg("tree_slots", tree_slots).on(first).dtype({ScalarType::Int, ScalarType::Long}).dims(1).contiguous();
  Arg("ancestors", ancestors).on(first).dtype({ScalarType::Long}).shape({tree_slots.size(0), Arg::kAny}).contiguous();
  check(page_size >= 1, "page_size", "1 or more tokens", page_size);
  check(num_nodes >= 1 && num_nodes <= kMaxNodes, "num_nodes", "1 to " + std::to_string(kMaxNodes), num_nodes);
  const int words = ancestor_words(static_cast<int>(num_nodes));
  check(ancestors.size(1) >= words, "ancestors",
        "at least " + std::to_string(words) + " words per node for num_nodes = " + std::to_string(num_nodes),
        "shape " + shape_string(ancestors));

  params.bs = static_cast<int32_t>(bs);
  params.total_rows = static_cast<int32_t>(tree_slots.size(0));
  params.page_size = static_cast<int32_t>(std::min<int64_t>(page_size, INT32_MAX));
  params.num_nodes = static_cast<int32_t>(num_nodes);
  params.words = static_cast<int32_t>(ancestors.size(1));
  params.qo_indptr = qo_indptr.const_data_ptr<int32_t>();
  params.kv_indptr = kv_indptr.const_data_ptr<int32_t>();
  params.kv_indices = kv_indices.const_data_ptr();
  params.kv_indices_is_64 = kv_indices.scalar_type() == ScalarType::Long;
  params.prefix_lens = prefix_lens.const_data_ptr<int32_t>();
  params.tree_slots = tree_slots.const_data_ptr();
  params.tree_slots_is_64 = tree_slots.scalar_type() == ScalarType::Long;
  params.ancestors = reinterpret_cast<const uint64_t*>(ancestors.const_data_ptr<int64_t>());
}

TreeVerifyParams verify_params(const VerifyArgs& args) {
  const Tensor &q = args.q, &k = args.k_cache, &v = args.v_cache, &o = args.o;
  const char* k_name = args.mla ? "kv_cache" : "k_cache";
  TreeVerifyParams params{};

  const Arg q_arg("q", q);
  if (q.is_cpu()) {
    q_arg.dtype({ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  } else {
    q_arg.dtype({ScalarType::BFloat16, ScalarType::Half});
  }
  q_arg.dims(3).last_dim_contiguous().aligned(kVectorBytes);
  const int64_t total_rows = q.size(0), h_q = q.size(1), d_qk = q.size(2);

  const Arg k_arg(k_name, k);
  k_arg.on(q_arg).dtype({q.scalar_type(), ScalarType::Float8_e4m3fn}).shape({Arg::kAny, Arg::kAny, d_qk});
  k_arg.last_dim_contiguous().aligned(kVectorBytes);
  const int64_t h_kv = k.size(1);
  int64_t d_v = kMlaVDim;
  if (args.mla) {
    check(d_qk == kMlaQkDim, "q", "a last dimension of " + std::to_string(kMlaQkDim) + " (ckv 512, kpe 64)",
          "shape " + shape_string(q));
    check(h_kv == 1, k_name, "shape [slots, 1, " + std::to_string(kMlaQkDim) + "]", shape_string(k));
  } else {
    const auto* end = std::end(kGqaHeadSizes);
    check(std::find(std::begin(kGqaHeadSizes), end, d_qk) != end, "q",
          "one of the head sizes " + gqa_head_sizes_string(), "shape " + shape_string(q));
    check(h_kv >= 1 && h_q % h_kv == 0, "q", "a multiple of the cache's " + std::to_string(h_kv) + " heads",
          std::to_string(h_q) + " heads");
    d_v = v.dim() == 3 ? v.size(2) : d_qk;
    Arg("v_cache", v)
        .on(q_arg)
        .dtype({k.scalar_type()})
        .shape({k.size(0), h_kv, d_qk})
        .last_dim_contiguous()
        .aligned(kVectorBytes);
  }

  Arg("qo_indptr", args.qo_indptr).on(q_arg);  // the other index tensors must be on its device
  set_index_params(params, args.qo_indptr, args.kv_indptr, args.kv_indices, args.prefix_lens, args.tree_slots,
                   args.ancestors, args.page_size, args.num_nodes);
  Arg("tree_slots", args.tree_slots).shape({total_rows});
  if (args.sinks) {
    Arg("sinks", *args.sinks).on(q_arg).dtype({ScalarType::Float}).shape({h_q}).contiguous();
    params.sinks = args.sinks->const_data_ptr<float>();
  }
  params.k_scale = scale_pointer(args.mla ? "kv_scale" : "k_scale", args.k_scale, q_arg, k);
  params.v_scale = scale_pointer(args.mla ? "kv_scale" : "v_scale", args.v_scale, q_arg, k);

  check(args.sm_scale > 0, "sm_scale", "a positive number", args.sm_scale);
  check(args.logit_cap >= 0, "logit_cap", "a positive number, or 0 for no cap", args.logit_cap);
  check(args.num_splits >= 1, "num_splits", "1 or more", args.num_splits);

  Arg("o", o)
      .on(q_arg)
      .dtype({q.scalar_type()})
      .shape({total_rows, h_q, d_v})
      .last_dim_contiguous()
      .aligned(kVectorBytes);
  if (args.lse) {
    Arg("lse", *args.lse).on(q_arg).dtype({ScalarType::Float}).shape({total_rows, h_q}).contiguous();
    params.lse = args.lse->mutable_data_ptr<float>();
  }
  Arg("workspace", args.workspace).on(q_arg).dtype({ScalarType::Byte}).dims(1).contiguous().aligned(kVectorBytes);

  params.q = q.const_data_ptr();
  params.o = o.mutable_data_ptr();
  params.q_stride_t = q.stride(0);
  params.q_stride_h = q.stride(1);
  params.o_stride_t = o.stride(0);
  params.o_stride_h = o.stride(1);
  params.k_cache = k.const_data_ptr();
  params.v_cache = v.const_data_ptr();
  params.k_stride_slot = k.stride(0);
  params.k_stride_h = k.stride(1);
  params.v_stride_slot = v.stride(0);
  params.v_stride_h = v.stride(1);
  params.num_slots = k.size(0);
  params.workspace = args.workspace.mutable_data_ptr();
  params.workspace_bytes = args.workspace.numel();
  params.sm_scale = static_cast<float>(args.sm_scale);
  params.logit_cap = static_cast<float>(args.logit_cap);
  params.sliding_window = static_cast<int32_t>(std::clamp<int64_t>(args.sliding_window, -1, INT32_MAX));
  params.h_q = static_cast<int32_t>(h_q);
  params.h_kv = static_cast<int32_t>(h_kv);
  params.d_qk = static_cast<int32_t>(d_qk);
  params.d_v = static_cast<int32_t>(d_v);
  params.num_splits = static_cast<int32_t>(args.num_splits);
  params.q_dtype = dtype_of(q);
  params.kv_dtype = dtype_of(k);
  return params;
}

void run_verify_cpu(const VerifyArgs& args) {
  const TreeVerifyParams params = verify_params(args);
  raise_if(check_values(params, args.kv_indices.numel()));
  torch::stable::parallel_for(0, reference_num_items(params), 1,
                              [&](int64_t begin, int64_t end) { reference_run(params, begin, end); });
}

std::tuple<int64_t, int64_t> verify_plan_cpu(Tensor, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) {
  return {1, 0};  // the reference neither splits the KV nor keeps partial results
}

void verify_check_cpu(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor prefix_lens, Tensor tree_slots,
                      Tensor ancestors, int64_t page_size, int64_t num_nodes, int64_t num_slots) {
  TreeVerifyParams params{};
  set_index_params(params, qo_indptr, kv_indptr, kv_indices, prefix_lens, tree_slots, ancestors, page_size, num_nodes);
  params.num_slots = num_slots;
  raise_if(check_values(params, kv_indices.numel()));
}

}  // namespace ddtree
