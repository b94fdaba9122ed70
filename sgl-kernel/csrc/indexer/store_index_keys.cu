// ddtree_store_index_keys: one warp per row, four dimensions per lane. The upper half of the lanes rotates.
#include "common/mma_sm80.cuh"
#include "indexer/launch.h"

namespace ddtree {
namespace {

constexpr int kWarps = 8;
constexpr int kPerLane = kIndexHeadDim / 32;
constexpr int kFirstRopeLane = (kIndexHeadDim - kIndexRopeDim) / kPerLane;
static_assert(kPerLane == 4, "a lane loads float4");

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

__device__ __forceinline__ float4 vector_at(const float* row, int i) { return reinterpret_cast<const float4*>(row)[i]; }

__global__ void __launch_bounds__(32 * kWarps) store_index_keys_kernel(const __grid_constant__ StoreIndexKeysParams p) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const int32_t seq_len = p.plan[row].seq_len;
  if (!p.is_key(seq_len)) return;
  // A wrong plan must not read or write outside.
  const int64_t token = p.token(row), position = p.position(seq_len);
  if (token >= p.num_tokens || position >= p.num_positions) return;
  const int64_t slot = p.out_loc[token];
  if (!p.has_slot(slot)) return;

  float4 x = vector_at(p.kv + row * p.kv_stride, lane);
  const float4 weight = vector_at(p.norm_weight, lane);
  const float mean = sum_of_warp(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w) / kIndexHeadDim;
  const float norm = 1.0f / sqrtf(mean + p.eps);
  x = {x.x * norm * weight.x, x.y * norm * weight.y, x.z * norm * weight.z, x.w * norm * weight.w};
  if (lane >= kFirstRopeLane) {
    const float4 f = vector_at(p.freqs + position * p.freq_stride, lane - kFirstRopeLane);
    x = {x.x * f.x - x.y * f.y, x.x * f.y + x.y * f.x, x.z * f.z - x.w * f.w, x.z * f.w + x.w * f.z};
  }
  auto* key = static_cast<__nv_bfloat16*>(p.keys) + p.key_offset(slot);
  reinterpret_cast<uint2*>(key)[lane] = {pack2<__nv_bfloat16>(x.x, x.y), pack2<__nv_bfloat16>(x.z, x.w)};
}

}  // namespace

cudaError_t launch(const StoreIndexKeysParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;  // an empty grid is a launch error
  store_index_keys_kernel<<<static_cast<unsigned>((p.rows + kWarps - 1) / kWarps), 32 * kWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace ddtree
