#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "tree_verify/dispatch.h"
#include "tree_verify/instantiations.h"

namespace ddtree {

namespace {

// Checks the limits of the op, of the grid and of the combine kernel's shared memory.
bool is_valid(const TreeVerifyParams& p) {
  return p.bs >= 0 && p.total_rows >= 0 && p.h_kv > 0 && p.h_q > 0 && p.h_q % p.h_kv == 0 && p.num_nodes >= 1 &&
         p.num_nodes <= kMaxNodes && p.num_splits >= 1 && p.sm_scale > 0.f &&
         int64_t(p.bs) * p.num_splits <= kMaxWorkItems && p.workspace_bytes >= workspace_bytes(p);
}

template <typename T, bool kFp8>
cudaError_t dispatch_gqa(const TreeVerifyParams& p, const Launch& launch) {
  if (p.d_qk != p.d_v) return cudaErrorInvalidValue;
#define DDTREE_CASE(size) \
  case size: return launch_gqa_typed<T, kFp8, size>(p, launch);
  switch (p.d_qk) {
    DDTREE_GQA_HEAD_SIZES(DDTREE_CASE)
    default: return cudaErrorInvalidValue;
  }
}

// Calls f(T{}, bool_constant<fp8>) with the types in `p`.
template <typename F>
cudaError_t dispatch_types(const TreeVerifyParams& p, F f) {
  const bool fp8 = p.kv_dtype == DType::kFloat8E4M3;
  if (!fp8 && p.kv_dtype != p.q_dtype) return cudaErrorInvalidValue;
  switch (p.q_dtype) {
    case DType::kBFloat16: return fp8 ? f(__nv_bfloat16(), std::true_type()) : f(__nv_bfloat16(), std::false_type());
    case DType::kFloat16: return fp8 ? f(__half(), std::true_type()) : f(__half(), std::false_type());
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t launch(const TreeVerifyParams& p, bool mla, const Launch& launch) {
  return dispatch_types(p, [&](auto t, auto fp8) {
    using T = decltype(t);
    constexpr bool kFp8 = decltype(fp8)::value;
    return mla ? launch_mla_typed<T, kFp8>(p, launch) : dispatch_gqa<T, kFp8>(p, launch);
  });
}

int compute_capability_major() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major;
}

bool is_mla(const TreeVerifyParams& p) { return p.d_qk == kMlaQkDim && p.d_v == kMlaVDim; }

}  // namespace

bool exact_fp8() {
  const char* wanted = std::getenv("SGLANG_DDTREE_FP8");
  return wanted != nullptr && std::strcmp(wanted, "exact") == 0;
}

bool common_multiplies_fp8() { return !exact_fp8() && compute_capability_major() != 10; }

cudaError_t plan_num_splits(const TreeVerifyParams& p, int* num_splits) {
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  KernelShape fewest{};
  for (const DType kv_dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {  // one plan serves both
    // Of sm_90's own kernels, fp8 has fewer blocks only at head size 192, and the common ones only run in tests there.
    // 16-bit KV should not pay for that.
    if (compute_capability_major() == 9 && kv_dtype == DType::kFloat8E4M3) continue;
    KernelShape shape{};
    TreeVerifyParams typed = p;
    typed.q_dtype = DType::kBFloat16, typed.kv_dtype = kv_dtype;
    if (status == cudaSuccess) status = launch(typed, is_mla(p), {nullptr, &shape});
    if (kv_dtype == DType::kBFloat16 || shape.blocks_per_multiprocessor < fewest.blocks_per_multiprocessor)
      fewest = shape;
  }
  if (status != cudaSuccess) return status;
  const int packed = packed_rows(p.num_nodes, p.h_q, p.h_kv);
  const int64_t tiles = int64_t(p.bs) * p.h_kv * ((packed + fewest.tile_m - 1) / fewest.tile_m);
  *num_splits = choose_num_splits(tiles, multiprocessors, fewest.blocks_per_multiprocessor);
  return cudaSuccess;
}

cudaError_t launch_gqa(const TreeVerifyParams& p, cudaStream_t stream) {
  if (!is_valid(p)) return cudaErrorInvalidValue;
  if (p.bs == 0 || p.total_rows == 0) return cudaSuccess;
  return launch(p, false, {stream, nullptr});
}

cudaError_t launch_mla(const TreeVerifyParams& p, cudaStream_t stream) {
  if (!is_valid(p) || !is_mla(p) || p.h_kv != 1) return cudaErrorInvalidValue;
  if (p.bs == 0 || p.total_rows == 0) return cudaSuccess;
  return launch(p, true, {stream, nullptr});
}

}  // namespace ddtree
