#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "launch.h"

namespace ddtree {

// Defined in instantiations/.
template <typename T, bool kFp8, int kD>
cudaError_t launch_gqa_typed(const TreeVerifyParams& p, cudaStream_t stream);
template <typename T, bool kFp8>
cudaError_t launch_mla_typed(const TreeVerifyParams& p, cudaStream_t stream);

namespace {

// Limits of the grid (y) and of the combine kernel's shared memory.
bool is_valid(const TreeVerifyParams& p) {
  return p.b >= 0 && p.total_rows >= 0 && p.h_kv > 0 && p.h_q > 0 && p.h_q % p.h_kv == 0 && p.max_rows >= 1 &&
         p.max_rows <= kMaxTreeRows && p.num_splits >= 1 && p.sm_scale > 0.f &&
         int64_t(p.b) * p.num_splits <= kMaxWorkItems && p.workspace_bytes >= workspace_bytes(p) &&
         int64_t(p.h_kv) * packed_rows(p.max_rows, p.h_q, p.h_kv) <= 65535 * 16;
}

template <typename T, bool kFp8>
cudaError_t dispatch_gqa(const TreeVerifyParams& p, cudaStream_t stream) {
  if (p.d_qk != p.d_v) return cudaErrorInvalidValue;
  switch (p.d_qk) {
    case 64: return launch_gqa_typed<T, kFp8, 64>(p, stream);
    case 96: return launch_gqa_typed<T, kFp8, 96>(p, stream);
    case 128: return launch_gqa_typed<T, kFp8, 128>(p, stream);
    case 192: return launch_gqa_typed<T, kFp8, 192>(p, stream);
    case 256: return launch_gqa_typed<T, kFp8, 256>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

// Calls f(T{}, bool_constant<fp8>) for the params' types.
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

}  // namespace

cudaError_t launch_gqa(const TreeVerifyParams& p, cudaStream_t stream) {
  if (!is_valid(p)) return cudaErrorInvalidValue;
  if (p.b == 0 || p.total_rows == 0) return cudaSuccess;
  return dispatch_types(p,
                        [&](auto t, auto fp8) { return dispatch_gqa<decltype(t), decltype(fp8)::value>(p, stream); });
}

cudaError_t launch_mla(const TreeVerifyParams& p, cudaStream_t stream) {
  if (!is_valid(p) || p.d_qk != kMlaQkDim || p.d_v != kMlaVDim || p.h_kv != 1) return cudaErrorInvalidValue;
  if (p.b == 0 || p.total_rows == 0) return cudaSuccess;
  return dispatch_types(
      p, [&](auto t, auto fp8) { return launch_mla_typed<decltype(t), decltype(fp8)::value>(p, stream); });
}

}  // namespace ddtree
