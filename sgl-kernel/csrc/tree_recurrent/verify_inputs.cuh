// Inputs of the verify kernel: q, k and v in shared memory, and per node the gates, their path sums G and the norms'
// reciprocals. Also keeps g and k for the commit.
#pragma once

#include "common/cp_async.cuh"
#include "tree_recurrent/verify_block.cuh"

namespace ddtree {

constexpr float kLowestLogDecay = -128.f;       // exp of it is 0 in float32
constexpr float kFixedPoint = 1099511627776.f;  // 2^40: path sums of g are exact in 64-bit integers

template <typename Traits>
struct VerifyInputs : VerifyBlock<Traits> {
  using Base = VerifyBlock<Traits>;
  using Base::Base, Base::kDk, Base::kNodes;
  using Base::node_set, Base::k_row, Base::q_row, Base::decay_row, Base::writes_gates, Base::log_threads_per;
  using Base::p, Base::smem, Base::nodes, Base::column_warps, Base::warp, Base::lane, Base::head, Base::key_head,
      Base::slice, Base::row0, Base::delta;
  using typename Base::NodeSet;

  __device__ __forceinline__ void zero_outputs() const {
    const int columns = column_warps * kColumnsPerWarp, first = slice * columns,
              chunks = min(columns, p.d_v - first) / 8;
    for (int i = threadIdx.x; i < p.num_nodes * chunks; i += blockDim.x) {
      auto* out = static_cast<__nv_bfloat16*>(const_cast<void*>(p.o.data)) + (row0 + i / chunks) * p.o.stride_t +
                  head * p.o.stride_h + first + i % chunks * 8;
      *reinterpret_cast<uint4*>(out) = make_uint4(0, 0, 0, 0);
    }
  }

  // Loads rows of 2^log_chunks chunks of 16 bytes. The chunks past `valid_chunks` become zero.
  __device__ __forceinline__ void load_rows(const FloatArray& array, int array_head, int first_chunk, int log_chunks,
                                            int valid_chunks, char* to, int pitch, bool swizzle) const {
    for (int i = threadIdx.x; i < kNodes << log_chunks; i += blockDim.x) {
      const int row = i >> log_chunks, chunk = i & ((1 << log_chunks) - 1);
      const auto* from = static_cast<const __nv_bfloat16*>(array.data) +
                         (row0 + min(row, p.num_nodes - 1)) * array.stride_t + array_head * array.stride_h +
                         (first_chunk + min(chunk, valid_chunks - 1)) * 8;
      cp_async_16(smem_address(to + row * pitch + (swizzle ? chunk_offset(row, chunk) : chunk * 16)), from,
                  row < p.num_nodes && chunk < valid_chunks);
    }
  }

  __device__ __forceinline__ void load_inputs() const {
    constexpr int kLogChunks = kDk == 64 ? 3 : 4;
    load_rows(p.k, key_head, 0, kLogChunks, kDk / 8, k_row(0), Traits::kRowBytes, true);
    load_rows(p.q, key_head, 0, kLogChunks, kDk / 8, q_row(0), Traits::kRowBytes, true);
    const int chunks = column_warps * 2, first = slice * chunks;
    load_rows(p.v, head, first, 32 - __clz(column_warps), min(chunks, p.d_v / 8 - first), smem + Traits::kSlabOffset,
              slab_pitch(column_warps), false);
    cp_async_commit();
  }

  __device__ __forceinline__ float log_decay(float x, float decay) const {
    float g = p.lower_bound != 0.f ? p.lower_bound * sigmoid(expf(decay) * x) : -expf(decay) * softplus(x);
    return g < kLowestLogDecay ? kLowestLogDecay : g;  // keeps a NaN
  }

  // The raw inputs of a node's gates. They are decoded later, so that no load waits for another.
  struct Gates {
    uint32_t decay, beta, gate, bias;
    NodeSet mask;
  };

  // Thread n reads node n. A block has at least kMaxRecurrentNodes threads.
  __device__ __forceinline__ Gates read_gates() const {
    Gates read{};
    const int64_t row = row0 + min(int(threadIdx.x), p.num_nodes - 1);
    if (threadIdx.x >= kNodes) return read;
    read.decay = load_bits(p.decay, 0, head);
    read.beta = load_bits(p.beta, row, head);
    if constexpr (!Traits::kChannel) {
      read.gate = load_bits(p.gate, row, head);
      read.bias = load_bits(p.bias, 0, head);
    }
    read.mask = NodeSet(p.ancestors[row * p.words]);
    return read;
  }

  // Masks, beta and g of the nodes. Whole warps take part, because they vote.
  __device__ __forceinline__ void set_gates(const Gates& read) const {
    const int n = threadIdx.x;
    if (n < 2) nodes.bad[n] = 0;
    if (warp * 32 >= kNodes) return;
    const bool real = n < p.num_nodes;
    float beta = 1.f, g = 0.f;
    if (delta) beta = sigmoid(decode_bits(p.beta.type, read.beta));
    if constexpr (!Traits::kChannel) {
      const float decay = decode_bits(p.decay.type, read.decay);
      if (p.kind == RecurrentKind::kFixedDecay) {
        g = -decay;
      } else {
        const float x = decode_bits(p.gate.type, read.gate) + decode_bits(p.bias.type, read.bias);
        if (p.kind == RecurrentKind::kStateSpace) {
          beta = softplus(x);
          g = decay * beta;
        } else {
          g = -expf(decay) * softplus(x);
        }
      }
      g = g < kLowestLogDecay ? kLowestLogDecay : g;
      if (real && writes_gates()) p.g_kept[(row0 + n) * p.h_v + head] = g;
      const unsigned bad = __ballot_sync(0xffffffff, real && g != g);
      if (lane == 0) nodes.bad_g[warp] = bad;
    }
    if (n < kNodes) {
      nodes.mask[n] = real ? read.mask : 0;
      nodes.beta[n] = real ? beta : 0.f;
      nodes.g[n] = real && g == g ? __float2ll_rn(g * kFixedPoint) : 0;
    }
  }

  // Per channel: exp(g) of each node.
  __device__ __forceinline__ void load_channel_gates() const {
    const float decay = load_float(p.decay, 0, head);
    for (int i = threadIdx.x; i < kNodes * kDk; i += blockDim.x) {
      const int n = i / kDk, channel = i % kDk;
      float factor = 1.f;
      if (n < p.num_nodes) {
        const float bias = p.bias.data ? load_float(p.bias, 0, head, channel) : 0.f;
        const float g = log_decay(load_float(p.gate, row0 + n, head, channel) + bias, decay);
        if (writes_gates()) p.g_kept[((row0 + n) * p.h_v + head) * kDk + channel] = g;
        factor = expf(g);
      }
      *reinterpret_cast<float*>(decay_row(n) + decay_offset(n, channel)) = factor;
    }
    // The walk over ancestors writes single elements.
    for (int i = threadIdx.x; i < (Traits::kSystemBytes + Traits::kDiagonalBytes) / 16; i += blockDim.x) {
      *reinterpret_cast<uint4*>(smem + Traits::kSystemOffset + i * 16) = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void keep_keys() const {
    constexpr int kChunks = kDk / 8;
    for (int i = threadIdx.x; i < p.num_nodes * kChunks; i += blockDim.x) {
      const int row = i / kChunks, chunk = i % kChunks;
      auto* out = static_cast<__nv_bfloat16*>(p.k_kept) + ((row0 + row) * p.h_k + key_head) * kDk + chunk * 8;
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(k_row(row) + chunk_offset(row, chunk));
    }
  }

  __device__ __forceinline__ void compute_norms() const {
    const int log_parts = log_threads_per(2 * kNodes), parts = 1 << log_parts;
    for (int i = threadIdx.x; i < 2 * kNodes << log_parts; i += blockDim.x) {
      const int row = (i >> log_parts) % kNodes;
      const bool of_q = i >> log_parts >= kNodes;
      float factor = 1.f;
      if (p.normalize) {
        const char* data = of_q ? q_row(row) : k_row(row);
        float sum_low = 0.f, sum_high = 0.f;
#pragma unroll 4
        for (int chunk = i & (parts - 1); chunk < kDk / 8; chunk += parts) {
          const uint4 v = *reinterpret_cast<const uint4*>(data + chunk_offset(row, chunk));
          for (const uint32_t pair : {v.x, v.y, v.z, v.w}) {
            sum_low += low_float(pair) * low_float(pair);
            sum_high += high_float(pair) * high_float(pair);
          }
        }
        float sum = sum_low + sum_high;
        for (int step = parts / 2; step; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        factor = 1.f / sqrtf(sum + kNormEpsilon);
      }
      if (of_q) {
        nodes.q_factor[row] = factor * p.scale;
      } else {
        nodes.k_factor[row] = factor;
      }
    }
  }

  // G of each node. A few threads divide its ancestors among themselves.
  __device__ __forceinline__ void sum_gates() const {
    const int log_parts = log_threads_per(kNodes), parts = 1 << log_parts;
    for (int i = threadIdx.x; i < kNodes << log_parts; i += blockDim.x) {
      const int n = i >> log_parts, part = i & (parts - 1);
      const NodeSet mask = nodes.mask[n];
      long long sum = 0;
#pragma unroll 4
      for (int s = part; s < kNodes; s += parts) sum += mask >> s & 1 ? nodes.g[s] : 0;
      for (int step = parts / 2; step; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
      if (part) continue;
      float hi = __ll2float_rn(sum);
      const float lo = __ll2float_rn(sum - __float2ll_rn(hi)) / kFixedPoint;
      hi /= kFixedPoint;
      if (mask & node_set(nodes.bad_g)) hi = quiet_nan();
      nodes.sum[n] = {hi, lo};
      const float decay = expf(hi);
      nodes.decay[n] = decay + decay * lo;
    }
  }
};

}  // namespace ddtree
