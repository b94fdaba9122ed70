#include "common/check.h"
#include "common/cuda_call.h"
#include "tree_verify/api.h"
#include "tree_verify/dispatch.h"
#include "tree_verify/reference.h"

#include <vector>

namespace ddtree {

void run_verify_cuda(const VerifyArgs& args) {
  const TreeVerifyParams params = verify_params(args);
  check(params.workspace_bytes >= workspace_bytes(params), "workspace",
        "at least " + std::to_string(workspace_bytes(params)) + " bytes (see verify_workspace)",
        std::to_string(params.workspace_bytes));
  if (params.total_rows == 0) return;
  CudaCall call(args.q);
  CudaCall::check(args.mla ? "ddtree_verify_mla" : "ddtree_verify_gqa",
                  args.mla ? launch_mla(params, call.stream()) : launch_gqa(params, call.stream()));
}

std::tuple<int64_t, int64_t> verify_plan_cuda(Tensor like, int64_t bs, int64_t num_nodes, int64_t h_q, int64_t h_kv,
                                              int64_t d_qk, int64_t d_v) {
  TreeVerifyParams params{};
  params.bs = static_cast<int32_t>(bs);
  params.num_nodes = static_cast<int32_t>(num_nodes);
  params.h_q = static_cast<int32_t>(h_q);
  params.h_kv = static_cast<int32_t>(h_kv);
  params.d_qk = static_cast<int32_t>(d_qk);
  params.d_v = static_cast<int32_t>(d_v);
  CudaCall call(like);
  CudaCall::check("ddtree_verify_plan", plan_num_splits(params, &params.num_splits));
  return {params.num_splits, workspace_bytes(params)};
}

void verify_check_cuda(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor prefix_lens, Tensor tree_slots,
                       Tensor ancestors, int64_t page_size, int64_t num_nodes, int64_t num_slots) {
  TreeVerifyParams params{};
  set_index_params(params, qo_indptr, kv_indptr, kv_indices, prefix_lens, tree_slots, ancestors, page_size, num_nodes);
  CudaCall call(qo_indptr);
  std::vector<std::vector<char>> copies;
  const auto on_host = [&](const Tensor& tensor) -> const void* {
    auto& copy = copies.emplace_back(tensor.numel() * tensor.element_size());
    CudaCall::check("ddtree_verify_check", cudaMemcpyAsync(copy.data(), tensor.const_data_ptr(), copy.size(),
                                                           cudaMemcpyDeviceToHost, call.stream()));
    return copy.data();
  };
  params.qo_indptr = static_cast<const int32_t*>(on_host(qo_indptr));
  params.kv_indptr = static_cast<const int32_t*>(on_host(kv_indptr));
  params.kv_indices = on_host(kv_indices);
  params.prefix_lens = static_cast<const int32_t*>(on_host(prefix_lens));
  params.tree_slots = on_host(tree_slots);
  params.ancestors = static_cast<const uint64_t*>(on_host(ancestors));
  CudaCall::check("ddtree_verify_check", cudaStreamSynchronize(call.stream()));
  params.num_slots = num_slots;
  if (const std::string error = check_values(params, kv_indices.numel()); !error.empty()) {
    throw std::invalid_argument(error);
  }
}

}  // namespace ddtree
