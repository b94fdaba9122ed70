// Tree-verify attention over MLA latents: S uses all 576 dimensions, O the first 512 of the same bytes.
//
// Grid: x = M tile of 64 packed rows m = node * h_q + head, y = work item (see tile_scheduler.cuh). One block fills the
// multiprocessor's registers: the 64 x 512 fp32 accumulator takes half of them and Q another quarter. (Each thread
// keeps its last Q fragments in shared memory.) That leaves shared memory to the latents. Shared-memory bandwidth
// limits this kernel, so the two products use different warp layouts:
//   S: warp w sums rows 16 (w % 4) .. + 16 over half w / 4 of the dimensions. The pair of warps exchanges its halves
//      through shared memory. Both then hold the same S, and each turns 16 of the 32 tokens into P.
//   O: warp w owns value dimensions 64 w .. + 64 of all 64 rows, so V is read from shared memory once.
// The running maximum is raised only if a tile exceeds it by more than 2^8. P stays below 2^8, in range for fp16, and
// the accumulators are rarely rescaled.
// Synchronization per tile:
//   (1) Each thread waits for its own copies, then a barrier. The tile is visible, and every warp has finished the O of
//       the previous tile, so that tile's buffer, P and the rescale factors are free.
//   (2) A barrier of the two warps of a pair, between writing and reading the exchange. Its next write comes after (3).
//   (3) A barrier: P is complete.
// fp8 KV is multiplied as it is stored (fp8_operands.cuh). Converted instead, a barrier before (1) frees the 16-bit
// tile, and each thread converts the bytes that it copied.
#pragma once

#include "common/cp_async.cuh"
#include "common/fp8.cuh"
#include "common/mma_sm80.cuh"
#include "common/softmax.cuh"
#include "tree_verify/epilogue.cuh"
#include "tree_verify/fp8_operands.cuh"
#include "tree_verify/traits.h"
#include "tree_verify/tree_mask.cuh"

namespace ddtree {

// Eight threads per token. A negative slot loads zeros.
template <typename Traits>
__device__ __forceinline__ void mla_load_tile(const TreeVerifyParams& p, uint32_t stage, int slot) {
  constexpr int kBytes = Traits::kFp8 ? 1 : 2, kChunks = kMlaQkDim * kBytes / 16;
  constexpr int kPitch = Traits::kStagePitch;
  const int row = threadIdx.x / 8, part = threadIdx.x % 8;
  const bool valid = slot >= 0;
  const char* from = static_cast<const char*>(p.k_cache) + (valid ? slot : 0) * p.k_stride_slot * kBytes + part * 16;
  const uint32_t to = stage + row * kPitch + part * 16;
#pragma unroll
  for (int i = 0; i < (kChunks + 7) / 8; ++i)
    if (kChunks % 8 == 0 || i * 8 + part < kChunks) cp_async_16(to + i * 128, from + i * 128, valid);
}

template <typename Traits>
__device__ __forceinline__ void mla_convert_tile(const char* stage, char* tile) {
  constexpr int kChunks = kMlaQkDim / 16;
  const int row = threadIdx.x / 8, part = threadIdx.x % 8;
#pragma unroll 1  // the accumulators leave no registers for more
  for (int i = 0; i < (kChunks + 7) / 8; ++i) {
    if (i * 8 + part < kChunks) {
      uint4 lo, hi;
      e4m3x16_to_16bit<typename Traits::Element>(
          *reinterpret_cast<const uint4*>(stage + row * kMlaQkDim + (i * 8 + part) * 16), lo, hi);
      uint4* to = reinterpret_cast<uint4*>(tile + row * Traits::kPitch + (i * 8 + part) * 32);
      to[0] = lo, to[1] = hi;
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) mla_partial_kernel(const __grid_constant__ TreeVerifyParams p) {
  using T = typename Traits::Element;
  using Mma = typename Traits::Mma;
  constexpr int kPitch = Traits::kPitch, kTileN = Traits::kTileN, kSteps = Traits::kSteps, kStages = Traits::kStages;
  constexpr int kStepsRegisters = kSteps - Traits::kStepsShared;
  constexpr int kFragsV = Traits::kWarpV / 8;
  using Storage = typename Traits::Storage;
  extern __shared__ __align__(16) char smem[];
  Storage& storage = *reinterpret_cast<Storage*>(smem);
  float4* const exchange = reinterpret_cast<float4*>(storage.exchange);

  __shared__ WorkItem work;  // in shared memory, because the main loop has no registers to spare
  const int m0 = blockIdx.x * Traits::kTileM;
  if (threadIdx.x < 32) {
    const WorkItem found = find_work(p, blockIdx.y, m0, p.h_q);
    if (threadIdx.x == 0) work = found;
  }
  __syncthreads();
  if (work.index < 0) return;
  const Request& request = work.request;

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = warp & 3, half_k = warp >> 2;  // rows 16 * group, dimensions 288 * half_k
  const int tiles = ceil_div(work.end - work.begin, kTileN);
  const uint32_t smem_base = smem_address(smem);
  const uint32_t stages = smem_base + offsetof(Storage, stages);

  auto load_slot = [&](int tile) {
    const int token = work.begin + tile * kTileN + int(threadIdx.x / 8);
    return token < work.end ? token_slot(p, request, request.kv_start, token) : -1;
  };
  // Converted KV has one stage, which is free again when a tile has been converted.
  constexpr int kAhead = Traits::kConverts ? 1 : kStages - 1;  // tiles in flight
  int later_slots[kAhead];                                     // loaded together
  if constexpr (kAhead > 1) {
#pragma unroll
    for (int s = 1; s < kAhead; ++s) later_slots[s] = load_slot(s);
  }
  mla_load_tile<Traits>(p, stages, load_slot(0));
  cp_async_commit();
  if constexpr (kAhead > 1) {
#pragma unroll
    for (int s = 1; s < kAhead; ++s) {
      if (s < tiles) mla_load_tile<Traits>(p, stages + s * Traits::kStageBytes, later_slots[s]);
      cp_async_commit();
    }
  }
  int next_slot = load_slot(kAhead);

  uint32_t q_frag[kStepsRegisters][4];
  uint4* const q_shared = reinterpret_cast<uint4*>(storage.q) + threadIdx.x;
  float q_unscale[2];  // fp8 products: factor that undoes the scaling of a row's q.k
  if constexpr (Traits::kMmaFp8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = m0 + group * 16 + half * 8 + lane / 4, node = m / p.h_q;
      const bool exists = node < request.num_nodes;
      const T* q = static_cast<const T*>(p.q);
      if (exists) q += (request.row0 + int64_t(node)) * p.q_stride_t + m % p.h_q * p.q_stride_h;
      QuarterRow<T, kSteps> row, other;  // one scale for all dimensions of a row
      row.load(q + half_k * Traits::kHalf, exists);
      other.load(q + (half_k ^ 1) * Traits::kHalf, exists);
      const float scale = e4m3_scale(quad_max(fmaxf(row.abs_max(), other.abs_max())));
      row.round(scale, q_frag, half);
      q_unscale[half] = reciprocal_of_power(scale);
    }
  } else {
    uint32_t all[kSteps][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = m0 + group * 16 + half * 8 + lane / 4, node = m / p.h_q;
      const bool exists = node < request.num_nodes;
      const T* q = static_cast<const T*>(p.q) + (request.row0 + int64_t(node)) * p.q_stride_t +
                   m % p.h_q * p.q_stride_h + half_k * Traits::kHalf + lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        all[k][half] = exists ? *reinterpret_cast<const uint32_t*>(q + k * 16) : 0;
        all[k][half + 2] = exists ? *reinterpret_cast<const uint32_t*>(q + k * 16 + 8) : 0;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k >= kStepsRegisters) {
        q_shared[(k - kStepsRegisters) * Traits::kThreads] = make_uint4(all[k][0], all[k][1], all[k][2], all[k][3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) q_frag[k][i] = all[k][i];
      }
    }
  }

  const LogitScale logit_scale = make_logit_scale<true>(p.sm_scale, load_scale(p.k_scale), p.logit_cap);
  float o[4][kFragsV][4], row_max[2] = {neg_inf(), neg_inf()}, row_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int f = 0; f < 4; ++f) {
#pragma unroll
    for (int d = 0; d < kFragsV; ++d) o[f][d][0] = o[f][d][1] = o[f][d][2] = o[f][d][3] = 0.f;
  }

  const uint32_t k_lane = ((lane & 7) + (lane >> 4) * 8) * kPitch + half_k * kSteps * 32 + (lane >> 3 & 1) * 16;
  const uint32_t v_lane =
      Traits::kMmaFp8 ? lane * kPitch + warp * Traits::kWarpV
                      : ((lane & 7) + (lane >> 3 & 1) * 8) * kPitch + warp * Traits::kWarpV * 2 + (lane >> 4) * 16;
  const uint32_t p_lane = smem_address(storage.probs) + (lane & 15) * Traits::kPitchP + (lane >> 4) * 16;

  for (int j = 0; j < tiles; ++j) {
    cp_async_wait<kAhead - 1>();
    if constexpr (Traits::kConverts) {
      __syncthreads();
      mla_convert_tile<Traits>(storage.stages, storage.tile);
    }
    __syncthreads();
    if (j + kAhead < tiles) mla_load_tile<Traits>(p, stages + (j + kAhead) % kStages * Traits::kStageBytes, next_slot);
    cp_async_commit();
    next_slot = load_slot(j + kAhead + 1);

    // One row per lane. Computed before S is live, because the mask needs registers too.
    const int token0 = work.begin + j * kTileN;
    const bool masked = needs_mask(request, p.sliding_window, token0, kTileN);
    const uint32_t row_mask = masked ? tree_mask(p, request, (m0 + group * 16 + (lane & 15)) / p.h_q, token0) : 0;

    const uint32_t tile = Traits::kConverts ? smem_base : stages + j % kStages * Traits::kStageBytes;
    float s[4][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t q[4];
      if (k < kStepsRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = q_frag[k][i];
      } else {
        const uint4 v = q_shared[(k - kStepsRegisters) * Traits::kThreads];
        q[0] = v.x, q[1] = v.y, q[2] = v.z, q[3] = v.w;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t b[4];
        ldmatrix_x4(b, tile + k_lane + n * 16 * kPitch + k * 32);
        mma_m16n8<Mma>(s[2 * n], q, b[0], b[1]);
        mma_m16n8<Mma>(s[2 * n + 1], q, b[2], b[3]);
      }
    }

    // Add the two halves of the dimensions. Addition commutes, so both warps of the pair get the same bits.
#pragma unroll
    for (int n = 0; n < 4; ++n) exchange[(warp * 4 + n) * 32 + lane] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
    asm volatile("bar.sync %0, 64;" ::"r"(1 + group) : "memory");
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float4 other = exchange[((warp ^ 4) * 4 + n) * 32 + lane];
      if constexpr (Traits::kMmaFp8) {
        s[n][0] = logit_scale((s[n][0] + other.x) * q_unscale[0]),
        s[n][1] = logit_scale((s[n][1] + other.y) * q_unscale[0]);
        s[n][2] = logit_scale((s[n][2] + other.z) * q_unscale[1]),
        s[n][3] = logit_scale((s[n][3] + other.w) * q_unscale[1]);
      } else {
        s[n][0] = logit_scale(s[n][0] + other.x), s[n][1] = logit_scale(s[n][1] + other.y);
        s[n][2] = logit_scale(s[n][2] + other.z), s[n][3] = logit_scale(s[n][3] + other.w);
      }
    }

    if (masked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t mask = __shfl_sync(0xffffffff, row_mask, half * 8 + lane / 4);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(mask >> (n * 8 + lane % 4 * 2 + e) & 1)) s[n][half * 2 + e] = neg_inf();
        }
      }
    }
    constexpr float kHeadroom = Traits::kMmaFp8 ? kE4m3Headroom : 0.f;
    constexpr float kThreshold = Traits::kMmaFp8 ? 0.f : kRescaleThreshold;
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = neg_inf();
#pragma unroll
      for (int n = 0; n < 4; ++n) top = fmaxf(top, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      top = quad_max(top) - kHeadroom;
      const float old = row_max[half];
      if (top > old + kThreshold) row_max[half] = top;
      const float base = row_max[half] == neg_inf() ? 0.f : row_max[half];
      shrink[half] = old == row_max[half] ? 1.f : fast_exp2(old - base);
      float sum = 0.f, prob[2][2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          prob[n][e] = fast_exp2((half_k ? s[n + 2][half * 2 + e] : s[n][half * 2 + e]) - base);
          sum += prob[n][e];
        }
        if constexpr (!Traits::kMmaFp8)
          *reinterpret_cast<uint32_t*>(storage.probs + (group * 16 + half * 8 + lane / 4) * Traits::kPitchP +
                                       half_k * 32 + n * 16 + lane % 4 * 4) = pack2<T>(prob[n][0], prob[n][1]);
      }
      if constexpr (Traits::kMmaFp8)  // tokens in the order of weights_e4m3
        *reinterpret_cast<uint32_t*>(storage.probs + (group * 16 + half * 8 + lane / 4) * Traits::kPitchP +
                                     half_k * 16 + lane % 4 * 4) =
            to_e4m3x4(prob[0][0], prob[0][1], prob[1][0], prob[1][1]);
      row_sum[half] = row_sum[half] * shrink[half] + sum;
    }
    const bool any = __any_sync(0xffffffff, shrink[0] != 1.f || shrink[1] != 1.f);
    if (half_k == 0) {
      if (lane % 4 == 0) {
        storage.rescale[group * 16 + lane / 4] = shrink[0];
        storage.rescale[group * 16 + 8 + lane / 4] = shrink[1];
      }
      if (lane == 0) storage.rescale_any[group] = any;
    }
    __syncthreads();

#pragma unroll
    for (int f = 0; f < 4; ++f) {
      if (storage.rescale_any[f]) {
        const float low = storage.rescale[f * 16 + lane / 4], high = storage.rescale[f * 16 + 8 + lane / 4];
#pragma unroll
        for (int d = 0; d < kFragsV; ++d) o[f][d][0] *= low, o[f][d][1] *= low, o[f][d][2] *= high, o[f][d][3] *= high;
      }
    }
    if constexpr (Traits::kMmaFp8) {
      static_assert(kTileN == 32);
      uint32_t prob[4][4];
#pragma unroll
      for (int f = 0; f < 4; ++f) ldmatrix_x4(prob[f], p_lane + f * 16 * Traits::kPitchP);
#pragma unroll
      for (int d = 0; d < kFragsV / 2; ++d) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, tile + v_lane + d * 16);
        const ValuesE4m3 v(b);
#pragma unroll
        for (int f = 0; f < 4; ++f) v.add_product(o[f][2 * d], o[f][2 * d + 1], prob[f]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kTileN / 16; ++k) {
        uint32_t prob[4][4];
#pragma unroll
        for (int f = 0; f < 4; ++f) ldmatrix_x4(prob[f], p_lane + f * 16 * Traits::kPitchP + k * 32);
#pragma unroll
        for (int d = 0; d < kFragsV / 2; ++d) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, tile + v_lane + k * 16 * kPitch + d * 32);
#pragma unroll
          for (int f = 0; f < 4; ++f) {
            mma_m16n8k16<T>(o[f][2 * d], prob[f], b[0], b[1]);
            mma_m16n8k16<T>(o[f][2 * d + 1], prob[f], b[2], b[3]);
          }
        }
      }
    }
  }

  // The two warps of a pair summed different tokens, and every warp needs the result of every row for its dimensions.
  auto& totals = storage.totals;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(row_sum[half]);
    if (lane % 4 == 0) {
      const int row = group * 16 + half * 8 + lane / 4;
      totals.sums[half_k * Traits::kTileM + row] = sum;
      if (half_k == 0) totals.maxima[row] = row_max[half];
    }
  }
  __syncthreads();
#pragma unroll
  for (int f = 0; f < 4; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = f * 16 + half * 8 + lane / 4;
      const RowWriter<T> writer(p, work, blockIdx.y, 0, m0 + row, totals.maxima[row],
                                totals.sums[row] + totals.sums[Traits::kTileM + row], warp == 0 && lane % 4 == 0);
      if constexpr (Traits::kMmaFp8) {
#pragma unroll
        for (int d = 0; d < kFragsV / 2; ++d)
          writer.store4(warp * Traits::kWarpV + d * 16 + lane % 4 * 4, even_odd(o[f][2 * d], o[f][2 * d + 1], half));
      } else {
#pragma unroll
        for (int d = 0; d < kFragsV; ++d)
          writer.store2(warp * Traits::kWarpV + d * 8 + lane % 4 * 2, o[f][d][half * 2], o[f][d][half * 2 + 1]);
      }
    }
  }
}

}  // namespace ddtree
