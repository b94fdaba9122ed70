// Tree-verify attention over one chunk of a request's KV, for one KV head and one M tile, with wgmma (sm_90a).
//
// Does the same work as gqa_partial.cuh, which defines packed rows and work items. A warpgroup of consumers owns 64
// rows. The block's one or two warpgroups share the K and V tiles. Producer warps copy those into a ring of stages,
// gathering slots with cp.async. Producers and consumers each have a main loop over tiles j. The tensor cores read
// every operand except P from shared memory in the 128-byte swizzle: blocks of 64 columns, each [rows][128 bytes].
// Warpgroups, and blocks that share a multiprocessor, overlap one's softmax with another's products. fp8: the consumers
// convert a tile while the products of the previous one run. Conversion permutes the columns, placing the first halves
// of all 16-byte vectors before the second halves, so that writes have no bank conflicts. Q is permuted in the same
// way, and the output is permuted back.
//
// Synchronization: each stage has two mbarriers. `full` completes when the copies of the producers' lanes have landed.
// Each consumer waits for it and then issues the proxy fence between those writes and its products. (In a thread with
// copies in flight that fence would wait for all of them, which is one reason for separate producers.) `empty`
// completes when each consumer warp has finished its products of the stage, or with fp8 its conversion. With fp8 there
// are two converted tiles. The consumers' barrier at the end of a tile guarantees that the next tile is converted and
// that the products of this one are done.
#pragma once

#include "common/cp_async.cuh"
#include "common/fp8.cuh"
#include "common/mbarrier.cuh"
#include "common/pdl.cuh"
#include "common/softmax.cuh"
#include "common/wgmma.cuh"
#include "tree_verify/epilogue.cuh"
#include "tree_verify/traits.h"
#include "tree_verify/tree_mask.cuh"

namespace ddtree {

// Byte offset of a row's 16-byte chunk (8 columns) in a tile of `rows` rows.
__device__ __forceinline__ uint32_t swizzled_columns(int rows, int row, int chunk) {
  return chunk / 8 * rows * kSwizzleRowBytes + swizzled(row, chunk % 8);
}

// How threads share a tile: kGroup threads per token, each taking every kGroup-th 16-byte vector.
template <typename Traits, int kThreads>
struct GqaSm90Lanes {
  static constexpr int kVectors = Traits::kD * (Traits::kFp8 ? 1 : 2) / 16;
  static constexpr int kPower = kVectors & -kVectors, kGroup = kPower < 16 ? kPower : 16;
  static constexpr int kEach = kVectors / kGroup;
  static constexpr int kPassTokens = kThreads / kGroup;  // tokens per pass
  static constexpr int kPasses = Traits::kTileN > kPassTokens ? Traits::kTileN / kPassTokens : 1;
};

// A producer warp copies its tokens of a tile, starting at `token0`. Lane i holds the slots of tokens 32 r + i. kAll
// means that every token exists.
template <typename Traits, bool kAll>
__device__ __forceinline__ void gqa_sm90_load_tile(const TreeVerifyParams& p, const char* k, const char* v,
                                                   uint32_t stage, int token0,
                                                   const int (&slots)[(Traits::kProducerTokens + 31) / 32]) {
  using Lanes = GqaSm90Lanes<Traits, 32>;
  constexpr int kTileN = Traits::kTileN, kHalf = Traits::kStageBytes / 2, kBytes = Traits::kFp8 ? 1 : 2;
  const uint32_t k_stride = p.k_stride_slot * kBytes, v_stride = p.v_stride_slot * kBytes;
  const int lane = threadIdx.x & 31, part = lane % Lanes::kGroup;
#pragma unroll
  for (int r = 0; r < (Traits::kProducerTokens + 31) / 32; ++r) {
#pragma unroll 8
    for (int pass = 0; pass < min(32, Traits::kProducerTokens) / Lanes::kPassTokens; ++pass) {
      const int at = pass * Lanes::kPassTokens + lane / Lanes::kGroup, token = token0 + r * 32 + at;
      const int s = __shfl_sync(0xffffffff, slots[r], at);
      const bool valid = kAll || s >= 0;
      const uint64_t from = kAll ? uint32_t(s) : uint32_t(max(s, 0));
      const char* k_token = k + from * k_stride + part * 16;
      const char* v_token = v + from * v_stride + part * 16;
#pragma unroll
      for (int i = 0; i < Lanes::kEach; ++i) {
        const int vector = part + i * Lanes::kGroup;
        const uint32_t to =
            stage + (Traits::kFp8 ? token * Traits::kD + vector * 16 : swizzled_columns(kTileN, token, vector));
        cp_async_16(to, k_token + i * Lanes::kGroup * 16, valid);
        cp_async_16(to + kHalf, v_token + i * Lanes::kGroup * 16, valid);
      }
    }
  }
}

// The consumers convert K or V of a tile from fp8 to fp16.
template <typename Traits>
__device__ __forceinline__ void gqa_sm90_convert(const char* stage, char* tile) {
  using Lanes = GqaSm90Lanes<Traits, Traits::kConsumers>;
  constexpr int kTileN = Traits::kTileN;
  const int part = threadIdx.x % Lanes::kGroup, token0 = threadIdx.x / Lanes::kGroup;
#pragma unroll
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
    const int token = pass * Lanes::kPassTokens + token0;
    if (Lanes::kPassTokens > kTileN && token >= kTileN) continue;
#pragma unroll
    for (int i = 0; i < Lanes::kEach; ++i) {
      const int vector = part + i * Lanes::kGroup;
      uint4 lo, hi;
      e4m3x16_to_16bit<__half>(*reinterpret_cast<const uint4*>(stage + token * Traits::kD + vector * 16), lo, hi);
      *reinterpret_cast<uint4*>(tile + swizzled_columns(kTileN, token, vector)) = lo;
      *reinterpret_cast<uint4*>(tile + swizzled_columns(kTileN, token, Lanes::kVectors + vector)) = hi;
    }
  }
}

// A barrier of `threads` threads of the block. Id 0 is the barrier of __syncthreads().
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    gqa_sm90_partial_kernel(const __grid_constant__ TreeVerifyParams p) {
  using T = typename Traits::Element;
  using Mma = typename Traits::Mma;
  constexpr bool kFp8 = Traits::kFp8;
  constexpr int kD = Traits::kD, kTileM = Traits::kTileM, kTileN = Traits::kTileN, kStages = Traits::kStages;
  using Storage = typename Traits::Storage;
  extern __shared__ __align__(1024) char swizzled_smem[];
  Storage& storage = *reinterpret_cast<Storage*>(swizzled_smem);
  const uint32_t smem_base = smem_address(swizzled_smem), stages = smem_base + offsetof(Storage, stages);
  const uint32_t full = smem_base + offsetof(Storage, full), empty = smem_base + offsetof(Storage, empty);

  const int heads = p.h_q / p.h_kv, m_tiles = gridDim.x / p.h_kv;
  const int kv_head = blockIdx.x / m_tiles, m0 = blockIdx.x % m_tiles * kTileM;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  WorkItem& work = storage.work;
  if (warp == Traits::kConsumers / 32) {
    const WorkItem found = find_work(p, blockIdx.y);
    if (lane == 0) {
      work = found;
      for (int s = 0; s < kStages; ++s) {
        mbarrier_init(full + s * 8, 32 * Traits::kProducers);
        mbarrier_init(empty + s * 8, Traits::kConsumers / 32);
      }
    }
  }
  allow_dependents();
  __syncthreads();
  if (work.index < 0 || m0 >= work.request.num_nodes * heads) return;
  const Request& request = work.request;
  const int tiles = ceil_div(work.end - work.begin, kTileN);

  if (warp >= Traits::kConsumers / 32) {
    constexpr int kSlots = (Traits::kProducerTokens + 31) / 32, kBytes = kFp8 ? 1 : 2;
    const char* k = static_cast<const char*>(p.k_cache) + kv_head * p.k_stride_h * kBytes;
    const char* v = static_cast<const char*>(p.v_cache) + kv_head * p.v_stride_h * kBytes;
    const int token0 = (warp - Traits::kConsumers / 32) * Traits::kProducerTokens;
    int slots[kSlots];
    auto load_slots = [&](int tile) {
#pragma unroll
      for (int r = 0; r < kSlots; ++r) {
        const int token = work.begin + tile * kTileN + token0 + r * 32 + lane;
        slots[r] = token < work.end ? token_slot(p, request, request.kv_start, token) : -1;
      }
    };
    load_slots(0);
    int stage = 0, parity = 1;  // of the phase that frees the stage; the first phase counts as complete
    for (int j = 0; j < tiles; ++j) {
      int now[kSlots];
#pragma unroll
      for (int r = 0; r < kSlots; ++r) now[r] = slots[r];
      load_slots(j + 1);
      mbarrier_wait(empty + stage * 8, parity);
      const uint32_t to = stages + stage * Traits::kStageBytes;
      if (work.begin + (j + 1) * kTileN <= work.end) {
        gqa_sm90_load_tile<Traits, true>(p, k, v, to, token0, now);
      } else {
        gqa_sm90_load_tile<Traits, false>(p, k, v, to, token0, now);
      }
      mbarrier_arrive_after_copies(full + stage * 8);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    cp_async_wait_all();
    return;
  }

  // Load Q, with zeros for rows that do not exist: each warpgroup loads its own rows, with four threads per row. With
  // fp8 KV, Q is converted to fp16 and each row is scaled by a power of two to fit the range.
  const int m_end = request.num_nodes * heads, warpgroup = tid / 128;
#pragma unroll 1
  for (int m = warpgroup * 64 + tid % 128 / 4; m < warpgroup * 64 + 64; m += 32) {
    constexpr int kChunks = kD / 8, kEach = kChunks / 4;
    const bool exists = m0 + m < m_end;
    const int node = exists ? (m0 + m) / heads : 0, head = exists ? (m0 + m) % heads : 0;
    const T* q = static_cast<const T*>(p.q) + (request.row0 + int64_t(node)) * p.q_stride_t +
                 (kv_head * heads + head) * p.q_stride_h;
    uint4 value[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      value[i] = exists ? *reinterpret_cast<const uint4*>(q + (tid % 4 + i * 4) * 8) : make_uint4(0, 0, 0, 0);
    if constexpr (Traits::kScaleQ) {
      float top = 0.f;
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        top = fmaxf(top, fmaxf(fmaxf(bf16x2_abs_max(value[i].x), bf16x2_abs_max(value[i].y)),
                               fmaxf(bf16x2_abs_max(value[i].z), bf16x2_abs_max(value[i].w))));
      const float scale = range_scale(quad_max(top));
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        value[i].x = bf16x2_to_half2(value[i].x, scale), value[i].y = bf16x2_to_half2(value[i].y, scale);
        value[i].z = bf16x2_to_half2(value[i].z, scale), value[i].w = bf16x2_to_half2(value[i].w, scale);
      }
      if (tid % 4 == 0) storage.q_unscale[m] = 1.f / scale;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int chunk = tid % 4 + i * 4;
      *reinterpret_cast<uint4*>(
          storage.q + swizzled_columns(kTileM, m, kFp8 ? chunk % 2 * (kChunks / 2) + chunk / 2 : chunk)) = value[i];
    }
  }

  fence_async_proxy();
  named_barrier(1 + warpgroup, 128);

  const int warp_row0 = m0 + warp * 16;
  const LogitScale logit_scale = make_logit_scale(p.sm_scale, load_scale(p.k_scale), p.logit_cap);
  float factor[2] = {logit_scale.factor,
                     logit_scale.factor};  // from q.k to a base-2 logit, or with a cap to the argument of tanh
  if constexpr (Traits::kScaleQ) {
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] *= storage.q_unscale[warp * 16 + half * 8 + lane / 4];
  }
  float o[kD / 2], row_max[2] = {neg_inf(), neg_inf()}, row_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) o[i] = 0.f;
  const uint64_t q_desc = wgmma_descriptor(smem_base + warpgroup * 64 * kSwizzleRowBytes, 0, kSwizzleAtomBytes);

  int stage = 0, parity = 0;  // of this tile; with fp8, of the next tile
  auto release_stage = [&] {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + stage * 8);
    if (++stage == kStages) stage = 0, parity ^= 1;
  };
  // fp8: converts K (half 0) or V (half 1) of the tile in `stage`.
  auto convert = [&](int tile, int half) {
    gqa_sm90_convert<Traits>(
        swizzled_smem + offsetof(Storage, stages) + stage * Traits::kStageBytes + half * Traits::kStageBytes / 2,
        swizzled_smem + offsetof(Storage, tiles) + (tile & 1) * Traits::kTileBytes + half * Traits::kTileBytes / 2);
  };
  if constexpr (kFp8) {
    mbarrier_wait(full, 0);
    convert(0, 0), convert(0, 1);
    release_stage();
    fence_async_proxy();
    named_barrier(3, Traits::kConsumers);
  }

  for (int j = 0; j < tiles; ++j) {
    // Each lane covers one row and 32 tokens. A chunk may end within a tile while its request continues.
    const int token0 = work.begin + j * kTileN;
    const bool masked = needs_mask(request, p.sliding_window, token0, kTileN) || token0 + kTileN > work.end;
    uint32_t row_mask[(kTileN + 63) / 64] = {};
    if (masked) {
#pragma unroll
      for (int i = 0; i < (kTileN + 63) / 64; ++i) {
        const int begin = token0 + i * 64 + lane / 16 * 32, left = work.end - begin;
        row_mask[i] = tree_mask(p, request, (warp_row0 + lane % 16) / heads, begin);
        if (left < 32) row_mask[i] &= left > 0 ? (1u << left) - 1 : 0u;
      }
    }

    const uint32_t tile = kFp8 ? smem_base + offsetof(Storage, tiles) + (j & 1) * Traits::kTileBytes
                               : stages + stage * Traits::kStageBytes;
    const bool next = j + 1 < tiles;
    if constexpr (kFp8) {
      if (next) mbarrier_wait(full + stage * 8, parity);
    } else {
      mbarrier_wait(full + stage * 8, parity);
      fence_async_proxy();
    }
    const uint64_t k_desc = wgmma_descriptor(tile, 0, kSwizzleAtomBytes);
    const uint64_t v_desc =
        wgmma_descriptor(tile + Traits::kTileBytes / 2, kTileN * kSwizzleRowBytes, kSwizzleAtomBytes);
    float s[kTileN / 2];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      // Four steps of 32 bytes cross a block of columns.
      const int q_at = k / 4 * kTileM * kSwizzleRowBytes + k % 4 * 32;
      const int k_at = k / 4 * kTileN * kSwizzleRowBytes + k % 4 * 32;
      wgmma_ss<Mma>(s, q_desc + (q_at >> 4), k_desc + (k_at >> 4), k > 0);
    }
    wgmma_commit();
    if constexpr (kFp8) convert(j + 1, 0);  // after the last tile this converts stale bytes that nothing reads
    wgmma_wait<0>();
    wgmma_pin(s);

    if (p.logit_cap > 0.f) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) s[i] = logit_scale.capped(s[i] * factor[i % 4 / 2]);
    }
    if (masked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int w = 0; w < kTileN / 32; ++w) {
          const uint32_t mask =
              __shfl_sync(0xffffffff, row_mask[w / 2], w % 2 * 16 + half * 8 + lane / 4) >> lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (!(mask >> (n * 8 + e) & 1)) s[(w * 4 + n) * 4 + half * 2 + e] = neg_inf();
          }
        }
      }
    }
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = p.logit_cap > 0.f ? 1.f : factor[half];
      float top = neg_inf();
#pragma unroll
      for (int n = 0; n < kTileN / 8; ++n) top = fmaxf(top, fmaxf(s[n * 4 + half * 2], s[n * 4 + half * 2 + 1]));
      shrink[half] = raise_max(row_max[half], quad_max(top) * scale);
      const float base = exponent_base(row_max[half]);
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kTileN / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float prob = fast_exp2(fmaf(s[n * 4 + half * 2 + e], scale, -base));
          s[n * 4 + half * 2 + e] = prob;
          sum += prob;
        }
      }
      row_sum[half] = row_sum[half] * shrink[half] + sum;
    }
    if (__any_sync(0xffffffff, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) o[i] *= shrink[i % 4 / 2];
    }

    uint32_t prob[kTileN / 16][4];
#pragma unroll
    for (int k = 0; k < kTileN / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) prob[k][i] = pack2<Mma>(s[k * 8 + i * 2], s[k * 8 + i * 2 + 1]);
    }
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileN / 16; ++k) wgmma_rs<Mma>(o, prob[k], v_desc + (k * 2 * kSwizzleAtomBytes >> 4));
    wgmma_commit();
    if constexpr (kFp8) {
      convert(j + 1, 1);
      fence_async_proxy();
    }
    wgmma_wait<0>();
    wgmma_pin(o);
    if (!kFp8 || next) release_stage();
    if constexpr (kFp8) named_barrier(3, Traits::kConsumers);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = warp_row0 + half * 8 + lane / 4;
    const RowWriter<T> writer(p, work, blockIdx.y, kv_head, m, row_max[half], quad_sum(row_sum[half]), lane % 4 == 0);
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      const int chunk = kFp8 ? n % (kD / 16) * 2 + n / (kD / 16) : n;
      writer.store2(chunk * 8 + lane % 4 * 2, o[n * 4 + half * 2], o[n * 4 + half * 2 + 1]);
    }
  }
}

}  // namespace ddtree
