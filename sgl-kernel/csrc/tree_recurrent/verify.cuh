// Outputs of all nodes of a request's tree for one value head, from the stored state S_0 [d_k, d_v] alone.
//
// With the path sums G, the norms' reciprocals r and every matrix over nodes t, s:
//   A_ts = beta_t r_t r_s exp(G_t - G_s) k_t.k_s   s a strict ancestor of t     M_ts = r_q,t r_s exp(G_t - G_s) q_t.k_s
//   (I + A) U = W,  W_t = beta_t (v_t - exp(G_t) r_t k_t S_0)                  s an ancestor of t, or t
//   O_t = exp(G_t) r_q,t q_t S_0 + (M U)_t + skip v_t
// Without a delta rule U = W = beta v. All exponents are at most 0.
//
// A block owns 16 columns of the state per warp; A, M and the inverses of A's diagonal blocks are made once per block
// of threads, the rest by each warp for itself. Products are transposed, columns of the state as rows: S_0 goes from
// global memory straight into the registers of an mma's A operand, and U^T turns from an accumulator into an A operand
// without moving. q and k are bf16 as they come, exact; fp32 operands go as two bf16 parts.
//
// What is not finite must not reach a node that is no descendant, and 0 * NaN is NaN: A and M are masked by selection,
// and a node whose u is not finite gives zero to the products and NaN to the outputs of its descendants.
#pragma once

#include <cfloat>

#include "common/cp_async.cuh"
#include "tree_recurrent/device.cuh"
#include "tree_recurrent/traits.h"

namespace ddtree {

constexpr float kLowestLogDecay = -128.f;       // exp of it is 0 in float32
constexpr float kFixedPoint = 1099511627776.f;  // 2^40: path sums of g are exact in 64-bit integers
// Sixteen columns of the state as A operands. Lane 4 g + c holds rows (columns of S) g and g + 8 and, of each 32
// channels, 8 c to 8 c + 7: the first four feed one mma, the others the next, with q and k read alike.
template <typename State, int kDk>
struct StateFragment {
  static constexpr bool kSplit = sizeof(State) == 4;
  static constexpr int kPerRow = kSplit ? 8 : 4;  // registers per row and 32 channels
  uint32_t raw[kDk / 32 * 2 * kPerRow];

  __device__ __forceinline__ void load(const StatePool& pool, int64_t slot, int head, int column) {
    const int lane = threadIdx.x & 31;
    const State* base = static_cast<const State*>(pool.data) + slot * pool.stride_slot + head * pool.stride_h +
                        (column + lane / 4) * pool.stride_v + 8 * (lane & 3) * pool.stride_k;
    if (pool.stride_k == 1) {
#pragma unroll
      for (int i = 0; i < kDk / 32; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int part = 0; part < kPerRow / 4; ++part) {
            const uint4 v = load_global_16(base + 8 * r * pool.stride_v + 32 * i + 4 * part);
            uint32_t* out = raw + (2 * i + r) * kPerRow + 4 * part;
            out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
          }
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kDk / 32; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < kPerRow; ++e) {
          const State* at = base + 8 * r * pool.stride_v;
          uint32_t& out = raw[(2 * i + r) * kPerRow + e];
          if constexpr (kSplit) {
            out = __float_as_uint(at[(32 * i + e) * pool.stride_k]);
          } else {
            const auto* bits = reinterpret_cast<const uint16_t*>(at);
            out = bits[(32 * i + 2 * e) * pool.stride_k] | uint32_t(bits[(32 * i + 2 * e + 1) * pool.stride_k]) << 16;
          }
        }
      }
    }
  }

  // Turns fp32 values into their two bf16 parts, in place.
  __device__ __forceinline__ void split() {
    if constexpr (kSplit) {
#pragma unroll
      for (int i = 0; i < kDk / 32 * kPerRow; ++i) {
        split2(__uint_as_float(raw[2 * i]), __uint_as_float(raw[2 * i + 1]), raw[2 * i], raw[2 * i + 1]);
      }
    }
  }

  // The operand of step `half` (0, 1) of channels 32 i to 32 i + 31; part 0 is the high one, bf16 states have no other.
  __device__ __forceinline__ void operand(int i, int half, int part, uint32_t (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        a[2 * pair + r] = raw[(2 * i + r) * kPerRow + (kSplit ? 4 * half + 2 * pair + part : 2 * half + pair)];
      }
    }
  }
};

// Byte offset of a 16-byte chunk in a row of q or k: eight rows' same chunk, and two rows' four neighbouring chunks,
// lie in distinct banks.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return (chunk ^ ((row & 1) << 2 | (row >> 1 & 3))) << 4;
}

// The same in a row of per-channel decays.
__device__ __forceinline__ int decay_offset(int row, int channel) {
  return ((channel >> 2 ^ (row & 1)) << 4) + (channel & 3) * 4;
}

// Byte offset of row t, columns 8 h to 8 h + 7 of a 16x16 block.
__device__ __forceinline__ int block_offset(int t, int h) { return t * 32 + ((h ^ (t >> 2 & 1)) << 4); }

__device__ __forceinline__ constexpr int block_index(int i, int j) { return i * (i + 1) / 2 + j; }

template <typename Traits>
struct VerifyBlock {
  static constexpr int kDk = Traits::kDk, kNodes = Traits::kNodes, kTiles = Traits::kTiles, kBlocks = Traits::kBlocks;
  static constexpr int kSystem = kBlocks * Traits::kBlockBytes;  // bytes of one part of A or M
  using Nodes = typename Traits::Nodes;
  using NodeSet = typename Traits::NodeSet;

  const RecurrentVerifyParams& p;
  char* smem;
  Nodes& nodes;
  int column_warps, warps, warp, lane, head, key_head, slice;
  int64_t row0;
  bool delta;

  __device__ __forceinline__ VerifyBlock(const RecurrentVerifyParams& params, int with_columns, char* shared)
      : p(params),
        smem(shared),
        nodes(*reinterpret_cast<Nodes*>(shared + Traits::kNodesOffset)),
        column_warps(with_columns) {
    warps = blockDim.x / 32;
    warp = threadIdx.x / 32;
    lane = threadIdx.x & 31;
    slice = blockIdx.x;
    head = blockIdx.y;
    key_head = head / p.heads_per_key;
    row0 = int64_t(blockIdx.z) * p.num_nodes;
    delta = p.kind == RecurrentKind::kGatedDelta || p.kind == RecurrentKind::kChannelDelta;
  }

  __device__ __forceinline__ static NodeSet node_set(const uint32_t (&words)[2]) {
    if constexpr (kNodes <= 32) return words[0];
    return words[0] | NodeSet(words[1]) << (kNodes <= 32 ? 0 : 32);
  }
  __device__ __forceinline__ static int last_of(NodeSet nodes) {
    return kNodes <= 32 ? 31 - __clz(int(nodes)) : 63 - __clzll(static_cast<long long>(nodes));
  }

  __device__ __forceinline__ char* k_row(int row) const { return smem + row * Traits::kRowBytes; }
  __device__ __forceinline__ char* q_row(int row) const { return smem + Traits::kQOffset + row * Traits::kRowBytes; }
  __device__ __forceinline__ char* decay_row(int row) const { return smem + Traits::kDecayOffset + row * kDk * 4; }
  __device__ __forceinline__ float* diagonal(int tile) const {
    char* base = Traits::kWide ? reinterpret_cast<char*>(stashed_by(0, 0)) : smem + Traits::kDiagonalOffset;
    return reinterpret_cast<float*>(base) + tile * 256;
  }
  // part 0, 1: A's; 2, 3: M's.
  __device__ __forceinline__ char* block(int part, int index) const {
    return smem + Traits::kSystemOffset + part * kSystem + index * Traits::kBlockBytes;
  }
  __device__ __forceinline__ char* slab(int row) const {
    return smem + Traits::kSlabOffset + row * slab_pitch(column_warps) + 2 * kColumnsPerWarp * warp;
  }
  __device__ __forceinline__ bool writes_gates() const { return slice == 0; }
  __device__ __forceinline__ bool writes_keys() const { return slice == 0 && head == key_head * p.heads_per_key; }

  __device__ __forceinline__ void zero_outputs() const {
    const int columns = column_warps * kColumnsPerWarp, first = slice * columns,
              chunks = min(columns, p.d_v - first) / 8;
    for (int i = threadIdx.x; i < p.num_nodes * chunks; i += blockDim.x) {
      auto* out = static_cast<__nv_bfloat16*>(const_cast<void*>(p.o.data)) + (row0 + i / chunks) * p.o.stride_t +
                  head * p.o.stride_h + first + i % chunks * 8;
      *reinterpret_cast<uint4*>(out) = make_uint4(0, 0, 0, 0);
    }
  }

  // Rows of 2^log_chunks chunks of 16 bytes, those past `valid_chunks` zero.
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

  // What a node's gates are made of, as read: all loads are under way before the first is waited for.
  struct Gates {
    uint32_t decay, beta, gate, bias;
    NodeSet mask;
  };

  // A thread has the node of its own number, if there is one: a block has at least kMaxRecurrentNodes threads.
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

  // Masks, beta and g of the nodes. Whole warps take part, for the vote.
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

  // How many threads, a power of two of at most 16, share each of `count` tasks; as a logarithm.
  __device__ __forceinline__ static int log_threads_per(int count) {
    return 31 - __clz(max(int(blockDim.x) / count, 1));
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

  // G of each node: a few threads share its ancestors.
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

  // An element of A: what is not finite marks its node and gives zero, so that the inverses stay finite.
  __device__ __forceinline__ float checked(float x, int node) const {
    if (is_finite(x)) return x;
    atomicOr(&nodes.bad[node / 32], 1u << node % 32);
    return 0.f;
  }

  // This warp's first task of those that all warps share: helpers come first.
  __device__ __forceinline__ int first_task() const { return (warp + warps - column_warps) % warps; }

  // A and M with one decay per node: products of tiles of nodes, a 16x16 block at a time. Blocks on the diagonal come
  // first, because a warp also inverts them.
  __device__ __forceinline__ void make_system() const {
    for (int task = first_task(); task < kBlocks; task += warps) {
      int i = task, j = task;
      if (task >= kTiles) {
        for (i = 1, j = task - kTiles; j >= i; ++i) j -= i;
      }
      if constexpr (!Traits::kWide) {
        make_block<true, true>(i, j);
      } else {  // apart, for want of registers
        if (delta) make_block<true, false>(i, j);
        make_block<false, true>(i, j);
      }
      if (delta && i == j) {
        __syncwarp();
        invert_diagonal(i);
      }
    }
  }

  // A block of A, of M, or of both.
  template <bool kOfA, bool kOfM>
  __device__ __forceinline__ void make_block(int i, int j) const {
    const int g = lane / 4, c = lane & 3;
    float of_k[2][4] = {}, of_q[2][4] = {};
#pragma unroll(Traits::kWide ? 2 : kDk / 32)
    for (int step = 0; step < kDk / 32; ++step) {
      const int at = chunk_offset(g, 4 * step + c);  // rows g, g + 8, g + 16 ... are swizzled alike
      const uint4 y0 = *reinterpret_cast<const uint4*>(k_row(16 * j + g) + at);
      const uint4 y1 = *reinterpret_cast<const uint4*>(k_row(16 * j + g + 8) + at);
      const auto accumulate = [&](float (&d)[2][4], const char* row) {
        const uint4 x0 = *reinterpret_cast<const uint4*>(row + at);
        const uint4 x1 = *reinterpret_cast<const uint4*>(row + 8 * Traits::kRowBytes + at);
        const uint32_t first[4] = {x0.x, x1.x, x0.y, x1.y}, second[4] = {x0.z, x1.z, x0.w, x1.w};
        mma_m16n8k16<__nv_bfloat16>(d[0], first, y0.x, y0.y);
        mma_m16n8k16<__nv_bfloat16>(d[1], first, y1.x, y1.y);
        mma_m16n8k16<__nv_bfloat16>(d[0], second, y0.z, y0.w);
        mma_m16n8k16<__nv_bfloat16>(d[1], second, y1.z, y1.w);
      };
      if (kOfA && delta) accumulate(of_k, k_row(16 * i + g));
      if (kOfM) accumulate(of_q, q_row(16 * i + g));
    }

    const int index = block_index(i, j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int s = 16 * j + 8 * h + 2 * c;
      const float4 sum_s = *reinterpret_cast<const float4*>(&nodes.sum[s]);
      const float2 factor_s = *reinterpret_cast<const float2*>(&nodes.k_factor[s]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int t = 16 * i + g + 8 * r;
        const uint32_t mask = uint32_t(nodes.mask[t] >> s);
        const SplitFloat sum_t = nodes.sum[t];
        // Computed for all pairs of nodes; the mask then selects those that count.
        const float x0 = factor_s.x * __expf((sum_t.hi - sum_s.x) + (sum_t.lo - sum_s.y));
        const float x1 = factor_s.y * __expf((sum_t.hi - sum_s.z) + (sum_t.lo - sum_s.w));
        const auto store = [&](int part, float first, float second) {
          const int at = block_offset(g + 8 * r, h) + c * 4;
          uint32_t hi, lo;
          split2(first, second, hi, lo);
          *reinterpret_cast<uint32_t*>(block(part, index) + at) = hi;
          *reinterpret_cast<uint32_t*>(block(part + 1, index) + at) = lo;
        };
        if constexpr (kOfM) {
          const float q = nodes.q_factor[t];
          store(2, mask & 1 ? q * x0 * of_q[h][2 * r] : 0.f, mask & 2 ? q * x1 * of_q[h][2 * r + 1] : 0.f);
        }
        if (!kOfA || !delta) continue;
        const float factor = nodes.k_factor[t] * nodes.beta[t];
        const float a0 = checked(mask & 1 && s != t ? factor * x0 * of_k[h][2 * r] : 0.f, t);
        const float a1 = checked(mask & 2 && s + 1 != t ? factor * x1 * of_k[h][2 * r + 1] : 0.f, t);
        if (i == j) {
          float* at = diagonal(i) + (8 * h + 2 * c) * 16 + g + 8 * r;
          at[0] = a0, at[16] = a1;
        } else {
          store(0, -a0, -a1);
        }
      }
    }
  }

  __device__ __forceinline__ void store_element(int part, int index, int t, int s, float x) const {
    const int at = block_offset(t, s / 8) + (s & 7) * 2;
    const __nv_bfloat16 hi = __float2bfloat16_rn(x);
    *reinterpret_cast<__nv_bfloat16*>(block(part, index) + at) = hi;
    *reinterpret_cast<__nv_bfloat16*>(block(part + 1, index) + at) = __float2bfloat16_rn(x - __bfloat162float(hi));
  }

  // A and M with a decay per channel: a warp walks from a node up to the root and multiplies the decays on the way.
  __device__ __forceinline__ void make_system_by_channel() const {
    constexpr int kPairs = kDk / 64;  // of channels per lane
    const int channel = lane * 2 * kPairs;
    for (int t = warp; t < p.num_nodes; t += warps) {
      float q[2 * kPairs], k[2 * kPairs];
      const auto read = [&](const char* row, int n, float* out) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int at = chunk_offset(n, channel / 8) + (channel & 7) * 2 + i * 4;
          const uint32_t pair = *reinterpret_cast<const uint32_t*>(row + at);
          out[2 * i] = low_float(pair), out[2 * i + 1] = high_float(pair);
        }
      };
      read(q_row(t), t, q);
      read(k_row(t), t, k);
      int s = t;
      for (NodeSet rest = nodes.mask[t];;) {
        float other[2 * kPairs], of_k = 0.f, of_q = 0.f;
        read(k_row(s), s, other);
#pragma unroll
        for (int e = 0; e < 2 * kPairs; ++e) {
          of_k += k[e] * other[e];
          of_q += q[e] * other[e];
        }
#pragma unroll
        for (int step = 16; step; step /= 2) {
          of_k += __shfl_xor_sync(0xffffffff, of_k, step);
          of_q += __shfl_xor_sync(0xffffffff, of_q, step);
        }
        if (lane == 0) {
          const int i = t / 16, j = s / 16, index = block_index(i, j);
          store_element(2, index, t % 16, s % 16, nodes.q_factor[t] * nodes.k_factor[s] * of_q);
          if (s != t) {
            const float x = checked(nodes.beta[t] * nodes.k_factor[t] * nodes.k_factor[s] * of_k, t);
            if (i == j) {
              diagonal(i)[s % 16 * 16 + t % 16] = x;
            } else {
              store_element(0, index, t % 16, s % 16, -x);
            }
          }
        }
        // exp(G_t - G_p) = exp(G_t - G_s) exp(g_s), p the parent of s.
#pragma unroll
        for (int e = 0; e < 2 * kPairs; ++e) {
          const float factor = *reinterpret_cast<const float*>(decay_row(s) + decay_offset(s, channel + e));
          q[e] *= factor;
          k[e] *= factor;
        }
        rest &= ~(NodeSet(1) << s);
        if (rest == 0) break;
        s = last_of(rest);
      }
    }
  }

  // q and k times exp(G) in two parts, in place: a thread owns a channel. The decays' words take the low parts.
  __device__ __forceinline__ void scale_channels() const {
    for (int channel = threadIdx.x; channel < kDk; channel += blockDim.x) {
      const auto decay = [&](int n) -> uint32_t& {
        return *reinterpret_cast<uint32_t*>(decay_row(n) + decay_offset(n, channel));
      };
      for (int n = 1; n < p.num_nodes; ++n) {
        const NodeSet above = nodes.mask[n] & ((NodeSet(1) << n) - 1);
        if (above == 0) continue;
        const float parent = __uint_as_float(decay(last_of(above)));
        decay(n) = __float_as_uint(__uint_as_float(decay(n)) * parent);
      }
      for (int n = 0; n < kNodes; ++n) {
        const float factor = __uint_as_float(decay(n));
        const int at = chunk_offset(n, channel / 8) + (channel & 7) * 2;
        auto& k = *reinterpret_cast<uint16_t*>(k_row(n) + at);
        auto& q = *reinterpret_cast<uint16_t*>(q_row(n) + at);
        uint32_t hi, lo;
        split2(low_float(k) * factor, low_float(q) * factor, hi, lo);
        k = hi & 0xffff;
        q = hi >> 16;
        decay(n) = lo;
      }
    }
  }

  // T = (I + A_ii)^-1 of a tile of nodes, by substitution: a lane has a column.
  __device__ __forceinline__ void invert_diagonal(int tile) const {
    const int column = lane & 15;
    const float* a = diagonal(tile);  // [s][t]
    float x[16];
#pragma unroll
    for (int t = 0; t < 16; ++t) x[t] = t == column ? 1.f : 0.f;
#pragma unroll
    for (int s = 0; s < 15; ++s) {
#pragma unroll
      for (int t = s + 1; t < 16; ++t) x[t] -= a[s * 16 + t] * x[s];
    }
    if (lane < 16) {
#pragma unroll
      for (int t = 0; t < 16; ++t) store_element(0, block_index(tile, tile), t, column, x[t]);
    }
  }

  // The address that this lane gives to ldmatrix for a 16x16 block.
  __device__ __forceinline__ int lane_offset() const {
    return block_offset((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
  }

  // d [16 columns of S, 16 nodes t] += u^T [16, nodes of tile j] block^T, each operand in two parts.
  __device__ __forceinline__ void multiply(float (&d)[2][4], const uint32_t (&hi)[4], const uint32_t (&lo)[4], int part,
                                           int index) const {
    uint32_t b_hi[4], b_lo[4];
    ldmatrix_x4(b_hi, smem_address(block(part, index) + lane_offset()));
    ldmatrix_x4(b_lo, smem_address(block(part + 1, index) + lane_offset()));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mma_m16n8k16<__nv_bfloat16>(d[h], hi, b_hi[2 * h], b_hi[2 * h + 1]);
      mma_m16n8k16<__nv_bfloat16>(d[h], hi, b_lo[2 * h], b_lo[2 * h + 1]);
      mma_m16n8k16<__nv_bfloat16>(d[h], lo, b_hi[2 * h], b_hi[2 * h + 1]);
    }
  }

  // This lane's part of u of a tile, kept for the tiles after it.
  __device__ __forceinline__ uint4* stashed(int tile) const { return stashed_by(warp, tile) + lane; }
  __device__ __forceinline__ uint4* stashed_by(int of_warp, int tile) const {
    char* base = smem + Traits::kSlabOffset + kNodes * slab_pitch(column_warps);
    return reinterpret_cast<uint4*>(base + (of_warp * (kTiles - 1) + tile) * kStashBytes);
  }
  __device__ __forceinline__ void stash(int tile, const uint32_t (&hi)[4], const uint32_t (&lo)[4]) const {
    stashed(tile)[0] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    stashed(tile)[32] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
  }
  __device__ __forceinline__ void unstash(int tile, uint32_t (&hi)[4], uint32_t (&lo)[4]) const {
    const uint4 x = stashed(tile)[0], y = stashed(tile)[32];
    hi[0] = x.x, hi[1] = x.y, hi[2] = x.z, hi[3] = x.w;
    lo[0] = y.x, lo[1] = y.y, lo[2] = y.z, lo[3] = y.w;
  }

  // An accumulator [16 columns, 16 nodes] as an A operand in two parts.
  __device__ __forceinline__ static void split_operand(const float (&d)[2][4], uint32_t (&hi)[4], uint32_t (&lo)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) split2(d[h][2 * r], d[h][2 * r + 1], hi[2 * h + r], lo[2 * h + r]);
    }
  }

  // Zeroes the nodes of a tile that have something not finite, or are in `known`; returns them, for all lanes.
  __device__ __forceinline__ uint32_t drop_bad(float (&d)[2][4], uint32_t known) const {
    const int c = lane & 3;
    uint32_t mine = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!is_finite(d[h][e]) || !is_finite(d[h][2 + e])) mine |= 1u << (8 * h + 2 * c + e);
      }
    }
    const uint32_t bad = known | __reduce_or_sync(0xffffffff, mine);
    if (bad) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (bad >> (8 * h + 2 * c + e) & 1) d[h][e] = d[h][2 + e] = 0.f;
        }
      }
    }
    return bad;
  }

  // v of tile i: [h][..] as an accumulator has it, columns of S by nodes.
  __device__ __forceinline__ void read_v(int tile, float (&v)[2][4]) const {
    uint32_t raw[4];
    ldmatrix_x4_trans(raw, smem_address(slab(16 * tile + (lane >> 4) * 8 + (lane & 7)) + (lane >> 3 & 1) * 16));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) v[h][2 * r] = low_float(raw[2 * h + r]), v[h][2 * r + 1] = high_float(raw[2 * h + r]);
    }
  }

  __device__ __forceinline__ void write_o(int tile, const float (&o)[2][4]) const {
    uint32_t raw[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) raw[2 * h + r] = pack2<__nv_bfloat16>(o[h][2 * r], o[h][2 * r + 1]);
    }
    stmatrix_x4_trans(smem_address(slab(16 * tile + (lane >> 4) * 8 + (lane & 7)) + (lane >> 3 & 1) * 16), raw);
  }

  // k S_0, q S_0 or both of a tile of nodes for this warp's columns.
  template <bool kOfK, bool kOfQ>
  __device__ __forceinline__ void multiply_state(int tile, const StateFragment<typename Traits::State, kDk>& state,
                                                 float (&of_k)[2][4], float (&of_q)[2][4]) const {
    constexpr bool kSplit = StateFragment<typename Traits::State, kDk>::kSplit;
    const int g = lane / 4, c = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (kOfK) of_k[h][e] = 0.f;
        if constexpr (kOfQ) of_q[h][e] = 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < kDk / 32; ++i) {
      uint32_t hi[2][4], lo[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.operand(i, half, 0, hi[half]);
        if constexpr (kSplit) state.operand(i, half, 1, lo[half]);
      }
      const int at = chunk_offset(g, 4 * i + c);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * tile + 8 * h + g;
        uint4 k_low{}, q_low{};
        if constexpr (Traits::kChannel) {
          const uint4 x = *reinterpret_cast<const uint4*>(decay_row(row) + decay_offset(g, 32 * i + 8 * c));
          const uint4 y = *reinterpret_cast<const uint4*>(decay_row(row) + decay_offset(g, 32 * i + 8 * c + 4));
          k_low = {__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410), __byte_perm(y.x, y.y, 0x5410),
                   __byte_perm(y.z, y.w, 0x5410)};
          q_low = {__byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x7632), __byte_perm(y.x, y.y, 0x7632),
                   __byte_perm(y.z, y.w, 0x7632)};
        }
        const auto accumulate = [&](float (&d)[4], const char* data, const uint4& low) {
          const uint4 x = *reinterpret_cast<const uint4*>(data + at);
          mma_m16n8k16<__nv_bfloat16>(d, hi[0], x.x, x.y);
          mma_m16n8k16<__nv_bfloat16>(d, hi[1], x.z, x.w);
          if constexpr (kSplit) {
            mma_m16n8k16<__nv_bfloat16>(d, lo[0], x.x, x.y);
            mma_m16n8k16<__nv_bfloat16>(d, lo[1], x.z, x.w);
          }
          if constexpr (Traits::kChannel) {
            mma_m16n8k16<__nv_bfloat16>(d, hi[0], low.x, low.y);
            mma_m16n8k16<__nv_bfloat16>(d, hi[1], low.z, low.w);
          }
        };
        if (kOfK && delta) accumulate(of_k[h], k_row(row), k_low);
        if constexpr (kOfQ) accumulate(of_q[h], q_row(row), q_low);
      }
    }
  }

  // U and O of this warp's columns, a tile of nodes after the other; o stays in the slab. If kStateFirst, of_k and of_q
  // come with the products of the first tile.
  __device__ __forceinline__ void solve(const StateFragment<typename Traits::State, kDk>& state, int column,
                                        float (&of_k)[2][4], float (&of_q)[2][4]) const {
    const int g = lane / 4, c = lane & 3;
    const float skip = p.skip.data ? load_float(p.skip, 0, head) : 0.f;
    NodeSet bad = node_set(nodes.bad);
    uint32_t u_hi[Traits::kWide ? 1 : kTiles][4], u_lo[Traits::kWide ? 1 : kTiles][4];
    // Adds u of tile j times a block.
    const auto add_product = [&](float (&d)[2][4], int i, int j, int part) {
      if constexpr (Traits::kWide) {
        if (j < i) {
          uint32_t hi[4], lo[4];
          unstash(j, hi, lo);
          multiply(d, hi, lo, part, block_index(i, j));
        } else {
          multiply(d, u_hi[0], u_lo[0], part, block_index(i, j));
        }
      } else {
        multiply(d, u_hi[j], u_lo[j], part, block_index(i, j));
      }
    };
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float v[2][4], u[2][4];
      if (i > 0 || !Traits::kStateFirst) multiply_state<true, !Traits::kWide>(i, state, of_k, of_q);
      read_v(i, v);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int n = 16 * i + 8 * h + 2 * c + (e & 1);
          float x = v[h][e];
          if (delta) x -= (Traits::kChannel ? 1.f : nodes.decay[n]) * nodes.k_factor[n] * of_k[h][e];
          u[h][e] = nodes.beta[n] * x;
        }
      }
      uint32_t bad_here = drop_bad(u, uint32_t(bad >> 16 * i) & 0xffff);
      if (delta) {
#pragma unroll
        for (int j = 0; j < i; ++j) add_product(u, i, j, 0);
        uint32_t hi[4], lo[4];
        split_operand(u, hi, lo);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int e = 0; e < 4; ++e) u[h][e] = 0.f;
        }
        multiply(u, hi, lo, 0, block_index(i, i));
        bad_here = drop_bad(u, bad_here);
      }
      bad |= NodeSet(bad_here) << 16 * i;
      split_operand(u, u_hi[Traits::kWide ? 0 : i], u_lo[Traits::kWide ? 0 : i]);
      if (Traits::kWide && i + 1 < kTiles) stash(i, u_hi[0], u_lo[0]);
      float o[2][4];
      const auto keep_u = [&](int h, int e) {
        const int local = 8 * h + 2 * c + (e & 1), n = 16 * i + local;
        if (n < p.num_nodes) {
          p.u_kept[((row0 + n) * p.h_v + head) * p.d_v + column + g + 4 * (e & 2)] =
              bad_here >> local & 1 ? quiet_nan() : u[h][e] * nodes.k_factor[n];
        }
      };
      const auto begin_o = [&](int h, int e) {
        const int n = 16 * i + 8 * h + 2 * c + (e & 1);
        o[h][e] = (Traits::kChannel ? 1.f : nodes.decay[n]) * nodes.q_factor[n] * of_q[h][e];
        if (p.skip.data) o[h][e] += skip * v[h][e];
      };
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (!Traits::kWide) begin_o(h, e);
          keep_u(h, e);
        }
      }
      if constexpr (Traits::kWide) {  // only now, for want of registers
        multiply_state<false, true>(i, state, of_k, of_q);
        if (p.skip.data) read_v(i, v);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int e = 0; e < 4; ++e) begin_o(h, e);
        }
      }
#pragma unroll
      for (int j = 0; j <= i; ++j) add_product(o, i, j, 2);
      if (bad) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (nodes.mask[16 * i + 8 * h + 2 * c + (e & 1)] & bad) o[h][e] = quiet_nan();
          }
        }
      }
      write_o(i, o);
    }
  }

  __device__ __forceinline__ void store_o(int column) const {
    __syncwarp();
    for (int i = lane; i < 2 * p.num_nodes; i += 32) {
      auto* out = static_cast<__nv_bfloat16*>(const_cast<void*>(p.o.data)) + (row0 + i / 2) * p.o.stride_t +
                  head * p.o.stride_h + column + i % 2 * 8;
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(slab(i / 2) + i % 2 * 16);
    }
  }
};

// Grid: (slices of the columns, value heads, requests). A block has `column_warps` warps with columns of the state,
// then helpers, which only share the work on A and M.
template <typename Traits>
__global__ void __maxnreg__(Traits::kRegisters)
    recurrent_verify_kernel(const __grid_constant__ RecurrentVerifyParams p, int column_warps) {
  extern __shared__ __align__(16) char smem[];
  const VerifyBlock<Traits> block(p, column_warps, smem);
  // None of these loads waits for another.
  const int64_t slot = load_index(p.state_indices, blockIdx.z);
  block.load_inputs();
  const auto gates = block.read_gates();
  if (slot < 0) {
    cp_async_wait_all();
    block.zero_outputs();
    return;
  }
  const int column = (block.slice * column_warps + block.warp) * kColumnsPerWarp;
  const bool active = block.warp < column_warps && column < p.d_v;

  StateFragment<typename Traits::State, Traits::kDk> state;
  float of_k[2][4], of_q[2][4];
  if (active) state.load(p.states, slot, block.head, column);
  block.set_gates(gates);
  if constexpr (Traits::kChannel) block.load_channel_gates();
  cp_async_wait_all();
  __syncthreads();

  if (block.writes_keys()) block.keep_keys();
  block.compute_norms();
  if constexpr (!Traits::kChannel) block.sum_gates();
  __syncthreads();

  if constexpr (Traits::kChannel) {
    block.make_system_by_channel();
    __syncthreads();
    for (int tile = block.first_task(); tile < Traits::kTiles; tile += block.warps) block.invert_diagonal(tile);
    block.scale_channels();
  } else {
    if (Traits::kStateFirst && active) {
      state.split();
      block.template multiply_state<true, true>(0, state, of_k, of_q);
    }
    block.make_system();
  }
  __syncthreads();

  if (!active) return;
  if constexpr (!Traits::kStateFirst) state.split();
  block.solve(state, column, of_k, of_q);
  block.store_o(column);
}

}  // namespace ddtree
