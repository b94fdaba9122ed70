// A and M of the verify kernel, and the inverses of the diagonal blocks of I + A: made once per block of threads.
#pragma once

#include "tree_recurrent/verify_inputs.cuh"

namespace ddtree {

template <typename Traits>
struct VerifySystem : VerifyInputs<Traits> {
  using Base = VerifyInputs<Traits>;
  using Base::Base, Base::kDk, Base::kNodes, Base::kTiles, Base::kBlocks;
  using Base::last_of, Base::k_row, Base::q_row, Base::decay_row, Base::diagonal, Base::block, Base::first_task;
  using Base::p, Base::nodes, Base::warps, Base::warp, Base::lane, Base::delta;
  using typename Base::NodeSet;

  // An element of A. If it is not finite, marks its node and returns zero, so that the inverses stay finite.
  __device__ __forceinline__ float checked(float x, int node) const {
    if (is_finite(x)) return x;
    atomicOr(&nodes.bad[node / 32], 1u << node % 32);
    return 0.f;
  }

  // A and M with one decay per node: products of tiles of nodes, one 16x16 block at a time. Blocks on the diagonal come
  // first, because their warp also inverts them.
  __device__ __forceinline__ void make_system() const {
    for (int task = first_task(); task < kBlocks; task += warps) {
      int i = task, j = task;
      if (task >= kTiles) {
        for (i = 1, j = task - kTiles; j >= i; ++i) j -= i;
      }
      if constexpr (!Traits::kWide) {
        make_block<true, true>(i, j);
      } else {  // one after the other, because both at once need too many registers
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
        // exp(G_t - G_p) = exp(G_t - G_s) exp(g_s), where p is the parent of s.
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

  // q and k times exp(G) in two parts, in place. Each thread owns a channel. The low parts replace the decays.
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

  // T = (I + A_ii)^-1 of a tile of nodes, by substitution. Each lane has a column.
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
};

}  // namespace ddtree
