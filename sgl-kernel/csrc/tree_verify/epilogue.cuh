// Writes the packed rows of a partial kernel: to the output if the request has one chunk, otherwise to the workspace.
#pragma once

#include "tree_verify/tile_scheduler.cuh"
#include "common/mma_sm80.cuh"

namespace ddtree {

__device__ __forceinline__ float* partial_lse(const TreeVerifyParams& p) {
  return static_cast<float*>(p.workspace) + int64_t(p.bs) * p.num_splits * p.num_nodes * p.h_q * p.d_v;
}

__device__ __forceinline__ float sink_logit2(const TreeVerifyParams& p, int head) {
  return p.sinks ? p.sinks[head] * kLog2E : neg_inf();
}

__device__ __forceinline__ float load_scale(const float* scale) { return scale ? *scale : 1.f; }

// One packed row m = node * heads + head of a KV head, in the registers of the lanes that share it.
template <typename T>
struct RowWriter {
  T* out;          // nullptr: the row does not exist, or is a partial result
  float* partial;  // nullptr: the row does not exist, or is final
  float scale;

  // `leader` is true for the one lane that writes the LSE.
  __device__ __forceinline__ RowWriter(const TreeVerifyParams& p, const WorkItem& w, int item, int kv_head, int m,
                                       float row_max, float row_sum, bool leader)
      : out(nullptr), partial(nullptr), scale(0.f) {
    const int heads = p.h_q / p.h_kv, node = m / heads, head = kv_head * heads + m % heads;
    if (node >= w.request.num_nodes) return;
    const bool last = w.num_chunks == 1;
    const RowResult r = finish_row(row_max, row_sum, last ? sink_logit2(p, head) : neg_inf());
    scale = r.scale * load_scale(p.v_scale);
    if (last) {
      const int64_t t = w.request.row0 + node;
      out = static_cast<T*>(p.o) + t * p.o_stride_t + head * p.o_stride_h;
      if (leader && p.lse) p.lse[t * p.h_q + head] = r.lse2 * kLn2;
    } else {
      const int64_t at = (int64_t(item) * p.num_nodes + node) * p.h_q + head;
      partial = static_cast<float*>(p.workspace) + at * p.d_v;
      if (leader) partial_lse(p)[at] = r.lse2;
    }
  }

  // Writes dimensions d + 8 j and d + 8 j + 1 from acc[4 j + first] and acc[4 j + first + 1], for every j < kCount.
  template <int kCount, int kSize>
  __device__ __forceinline__ void store_all(int d, const float (&acc)[kSize], int first) const {
    if (out) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        *reinterpret_cast<uint32_t*>(out + d + 8 * j) =
            pack2<T>(acc[4 * j + first] * scale, acc[4 * j + first + 1] * scale);
    } else if (partial) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        *reinterpret_cast<float2*>(partial + d + 8 * j) =
            make_float2(acc[4 * j + first] * scale, acc[4 * j + first + 1] * scale);
    }
  }

  // Writes a row of 8 kCount dimensions, of which lane c of four holds 8 j + 2 c and 8 j + 2 c + 1 in acc[4 j + first]
  // and acc[4 j + first + 1]. The four lanes exchange what they write to the output, so that each writes 16 bytes at a
  // time.
  template <int kCount, int kSize>
  __device__ __forceinline__ void store_row(const float (&acc)[kSize], int first) const {
    const int c = threadIdx.x % 4;
    static_assert(kCount % 4 == 0);
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        word[i] = pack2<T>(acc[4 * (j + i) + first] * scale, acc[4 * (j + i) + first + 1] * scale);
#pragma unroll
      for (int i = 0; i < 4; i += 2) exchange(word[i], word[i + 1], 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) exchange(word[i], word[i + 2], 2);
      if (out) *reinterpret_cast<uint4*>(out + 8 * (j + c)) = make_uint4(word[0], word[1], word[2], word[3]);
    }
    if (partial) store_all<kCount>(c * 2, acc, first);
  }

  // Lanes without bit `distance` swap `high` for the `low` of the lane with it.
  __device__ __forceinline__ static void exchange(uint32_t& low, uint32_t& high, int distance) {
    const bool upper = threadIdx.x & distance;
    const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? low : high, distance);
    (upper ? low : high) = received;
  }

  // Writes dimensions d + 16 j .. d + 16 j + 3, for every j < kCount, from the accumulators of a product whose columns
  // are 16 dimensions each, the even ones first: acc[8 j + first], acc[8 j + 4 + first], then the same + 1.
  template <int kCount, int kSize>
  __device__ __forceinline__ void store_even_odd(int d, const float (&acc)[kSize], int first) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      store4(d + 16 * j, make_float4(acc[8 * j + first], acc[8 * j + 4 + first], acc[8 * j + first + 1],
                                     acc[8 * j + 4 + first + 1]));
  }

  __device__ __forceinline__ void store4(int d, float4 v) const {
    v.x *= scale, v.y *= scale, v.z *= scale, v.w *= scale;
    if (out) {
      *reinterpret_cast<uint2*>(out + d) = make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w));
    } else if (partial) {
      *reinterpret_cast<float4*>(partial + d) = v;
    }
  }

  __device__ __forceinline__ void store2(int d, float a, float b) const {
    a *= scale, b *= scale;
    if (out) {
      *reinterpret_cast<uint32_t*>(out + d) = pack2<T>(a, b);
    } else if (partial) {
      *reinterpret_cast<float2*>(partial + d) = make_float2(a, b);
    }
  }
};

}  // namespace ddtree
