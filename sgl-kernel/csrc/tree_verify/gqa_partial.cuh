// Tree-verify attention over one chunk of a request's KV, for one KV head and one M tile of packed rows.
//
// Grid: x = KV head * M tiles + M tile, y = work item (see tile_scheduler.cuh). Packed row m = node * heads + head for
// the `heads` query heads that share the KV head, so each KV head and M tile reads the KV once.
// Main loop (over tiles j): Q stays in registers. K and V tiles of kTileN tokens pass through a ring of kStages stages,
// which cp.async fills by gathering slots. fp8 KV is multiplied as it is stored (fp8_operands.cuh), or the threads that
// copied a stage convert it to a single 16-bit tile.
// Synchronization: cp.async.wait_group makes a thread's own copies visible to it, and the barrier that follows makes
// them visible to the block. The same barrier shows that every warp has finished the previous tile. The stage that is
// refilled right after it, and the converted tile, are therefore free.
#pragma once

#include "common/cp_async.cuh"
#include "common/fp8.cuh"
#include "common/mma_sm80.cuh"
#include "common/pdl.cuh"
#include "common/softmax.cuh"
#include "tree_verify/epilogue.cuh"
#include "tree_verify/fp8_operands.cuh"
#include "tree_verify/traits.h"
#include "tree_verify/tree_mask.cuh"

namespace ddtree {

// Queues the copies of this warp's tokens of one K/V tile. Lane i < kTokensPerWarp holds the slot of the warp's token
// i, or -1 past the end. `k` and `v` point to the KV head in slot 0.
template <typename Traits>
__device__ __forceinline__ void gqa_load_tile(const char* k, const char* v, uint32_t k_stride, uint32_t v_stride,
                                              uint32_t stage, int slot) {
  constexpr int kChunks = Traits::kD * (Traits::kFp8 ? 1 : 2) / 16;  // 16-byte chunks per token
  constexpr int kItems = Traits::kTokensPerWarp * kChunks;
  constexpr int kPitch = Traits::kStagePitch;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // More would exceed the registers.
  constexpr int kUnroll = Traits::kMmaFp8 && Traits::kD == 192 ? 2 : kItems > 8 * 32 || Traits::kD == 256 ? 4 : 8;
#pragma unroll kUnroll
  for (int i = 0; i < (kItems + 31) / 32; ++i) {
    const int at = i * 32 + lane, token = at / kChunks, chunk = at % kChunks;
    const int s = __shfl_sync(0xffffffff, slot, token);
    if (kItems % 32 == 0 || at < kItems) {
      const bool valid = s >= 0;
      const uint64_t from = max(s, 0);
      const uint32_t to = stage + (warp * Traits::kTokensPerWarp + token) * kPitch + chunk * 16;
      cp_async_16(to, k + from * k_stride + chunk * 16, valid);
      cp_async_16(to + Traits::kTileN * kPitch, v + from * v_stride + chunk * 16, valid);
    }
  }
}

// Converts the chunks that this thread itself copied (the mapping is that of gqa_load_tile).
template <typename Traits>
__device__ __forceinline__ void gqa_convert_tile(const char* stage, char* tile) {
  constexpr int kChunks = Traits::kD / 16, kItems = Traits::kTokensPerWarp * kChunks;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll 2  // the accumulators leave no registers for more
    for (int i = 0; i < (kItems + 31) / 32; ++i) {
      const int at = i * 32 + lane, row = half * Traits::kTileN + warp * Traits::kTokensPerWarp + at / kChunks;
      const int chunk = at % kChunks;
      if (kItems % 32 == 0 || at < kItems) {
        uint4 lo, hi;
        e4m3x16_to_16bit<typename Traits::Mma>(*reinterpret_cast<const uint4*>(stage + row * Traits::kD + chunk * 16),
                                               lo, hi);
        uint4* to = reinterpret_cast<uint4*>(tile + row * Traits::kPitch + chunk * 32);
        to[0] = lo, to[1] = hi;
      }
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    gqa_partial_kernel(const __grid_constant__ TreeVerifyParams p) {
  using T = typename Traits::Element;
  using Mma = typename Traits::Mma;
  constexpr int kD = Traits::kD, kFragsM = Traits::kFragsM, kFragsN = Traits::kWarpTokens / 8;
  constexpr int kStages = Traits::kStages, kTileN = Traits::kTileN, kPitch = Traits::kPitch;
  using Pipeline = typename Traits::Pipeline;
  extern __shared__ __align__(16) char smem[];
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(smem);
  Pipeline& pipeline = storage.pipeline;

  const int heads = p.h_q / p.h_kv, m_tiles = gridDim.x / p.h_kv;
  const int kv_head = blockIdx.x / m_tiles, m_tile = blockIdx.x % m_tiles;
  const WorkItem work = find_work(p, blockIdx.y);
  allow_dependents();
  const int m0 = m_tile * Traits::kTileM;
  if (work.index < 0 || m0 >= work.request.num_nodes * heads) return;
  const Request& request = work.request;

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int warp_m = warp % Traits::kWarpsM, warp_n = warp / Traits::kWarpsM;
  const int tiles = ceil_div(work.end - work.begin, kTileN);
  const uint32_t smem_base = pinned_smem_address(smem), stages = smem_base + offsetof(Pipeline, stages);

  constexpr int kBytes = Traits::kFp8 ? 1 : 2;
  const char* k_head = static_cast<const char*>(p.k_cache) + kv_head * p.k_stride_h * kBytes;
  const char* v_head = static_cast<const char*>(p.v_cache) + kv_head * p.v_stride_h * kBytes;
  auto load_slot = [&](int tile) {
    const int token = work.begin + tile * kTileN + warp * Traits::kTokensPerWarp + lane;
    return lane < Traits::kTokensPerWarp && token < work.end ? token_slot(p, request, request.kv_start, token) : -1;
  };
  auto load_tile = [&](int stage, int slot) {
    gqa_load_tile<Traits>(k_head, v_head, uint32_t(p.k_stride_slot * kBytes), uint32_t(p.v_stride_slot * kBytes),
                          stages + stage * Traits::kStageBytes, slot);
  };
  int first_slots[kStages];  // loaded together, because the copies of each tile wait for its slots
#pragma unroll
  for (int s = 0; s < kStages; ++s) first_slots[s] = load_slot(s);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < tiles) load_tile(s, first_slots[s]);
    cp_async_commit();
  }
  int next_slot = first_slots[kStages - 1];

  // Q is zero for rows that do not exist. It is held as fragments in registers, or as rows in shared memory that the
  // loop's first barrier publishes.
  const int warp_row0 = m0 + warp_m * kFragsM * 16;
  auto q_row = [&](int m) {
    return static_cast<const T*>(p.q) + (request.row0 + int64_t(m / heads)) * p.q_stride_t +
           (kv_head * heads + m % heads) * p.q_stride_h;
  };
  const int m_end = request.num_nodes * heads;
  uint32_t q_frag[kFragsM][Traits::kQShared ? 1 : Traits::kSteps][4];
  float q_unscale[kFragsM][2];  // kScaleQ: factor that undoes the scaling of a row's q.k
  if constexpr (Traits::kQShared) {
    constexpr int kChunks = kD / 8;
    for (int i = threadIdx.x; i < Traits::kTileM * kChunks; i += Traits::kThreads) {
      const int m = i / kChunks, chunk = i % kChunks;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (m0 + m < m_end) value = *reinterpret_cast<const uint4*>(q_row(m0 + m) + chunk * 8);
      if constexpr (Traits::kScaleQ) {
        float top = fmaxf(fmaxf(bf16x2_abs_max(value.x), bf16x2_abs_max(value.y)),
                          fmaxf(bf16x2_abs_max(value.z), bf16x2_abs_max(value.w)));
#pragma unroll
        for (int lanes = 1; lanes < kChunks; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, lanes));
        const float scale = range_scale(top);
        value.x = bf16x2_to_half2(value.x, scale), value.y = bf16x2_to_half2(value.y, scale);
        value.z = bf16x2_to_half2(value.z, scale), value.w = bf16x2_to_half2(value.w, scale);
        if (chunk == 0) pipeline.q_unscale[m] = 1.f / scale;
      }
      *reinterpret_cast<uint4*>(pipeline.q + m * kPitch + chunk * 16) = value;
    }
  } else if constexpr (Traits::kMmaFp8) {
#pragma unroll
    for (int f = 0; f < kFragsM; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = warp_row0 + f * 16 + half * 8 + lane / 4;
        QuarterRow<T, Traits::kSteps> row;
        row.load(q_row(m < m_end ? m : 0), m < m_end);
        const float scale = e4m3_scale(quad_max(row.abs_max()));
        row.round(scale, q_frag[f], half);
        q_unscale[f][half] = reciprocal_of_power(scale);
      }
    }
  } else {
#pragma unroll
    for (int f = 0; f < kFragsM; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = warp_row0 + f * 16 + half * 8 + lane / 4;
        const bool exists = m < m_end;
        const T* q = q_row(exists ? m : 0) + lane % 4 * 2;
#pragma unroll
        for (int k = 0; k < kD / 16; ++k) {
          q_frag[f][k][half] = exists ? *reinterpret_cast<const uint32_t*>(q + k * 16) : 0;
          q_frag[f][k][half + 2] = exists ? *reinterpret_cast<const uint32_t*>(q + k * 16 + 8) : 0;
        }
        if constexpr (Traits::kScaleQ) {
          float top = 0.f;
#pragma unroll
          for (int k = 0; k < kD / 16; ++k)
            top = fmaxf(top, fmaxf(bf16x2_abs_max(q_frag[f][k][half]), bf16x2_abs_max(q_frag[f][k][half + 2])));
          const float scale = range_scale(quad_max(top));
          q_unscale[f][half] = 1.f / scale;
#pragma unroll
          for (int k = 0; k < kD / 16; ++k) {
            q_frag[f][k][half] = bf16x2_to_half2(q_frag[f][k][half], scale);
            q_frag[f][k][half + 2] = bf16x2_to_half2(q_frag[f][k][half + 2], scale);
          }
        }
      }
    }
  }
  const uint32_t q_lane = smem_base + (warp_m * kFragsM * 16 + (lane & 15)) * kPitch + (lane >> 4) * 16;

  const LogitScale logit_scale = make_logit_scale(p.sm_scale, load_scale(p.k_scale), p.logit_cap);
  float o[kFragsM][kD / 8][4], row_max[kFragsM][2], row_sum[kFragsM][2];
#pragma unroll
  for (int f = 0; f < kFragsM; ++f) {
    row_max[f][0] = row_max[f][1] = neg_inf();
    row_sum[f][0] = row_sum[f][1] = 0.f;
#pragma unroll
    for (int d = 0; d < kD / 8; ++d) o[f][d][0] = o[f][d][1] = o[f][d][2] = o[f][d][3] = 0.f;
  }

  // ldmatrix addresses of this lane. Rows of K are the n of B. V is transposed: its rows are the k of B.
  const uint32_t k_lane = (warp_n * Traits::kWarpTokens + (lane & 7) + (lane >> 4) * 8) * kPitch + (lane >> 3 & 1) * 16;
  const int v_row = kTileN + warp_n * Traits::kWarpTokens;
  const uint32_t v_lane = Traits::kMmaFp8 ? (v_row + lane) * kPitch
                                          : (v_row + (lane & 7) + (lane >> 3 & 1) * 8) * kPitch + (lane >> 4) * 16;
  // A warp without rows only loads. Large heads leave no register for this flag: size 256 in 16 bits on sm_120, and
  // sizes 192 and 256 in fp8 on sm_90.
  const bool idle = (Traits::kMmaFp8 ? kD < 192 : kD < 256 || Traits::kFp8) && warp_row0 >= m_end;

  for (int j = 0; j < tiles; ++j) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    if constexpr (Traits::kConverts) {
      gqa_convert_tile<Traits>(pipeline.stages + j % kStages * Traits::kStageBytes, pipeline.tile);
      __syncthreads();
    }
    if (Traits::kQShared && Traits::kScaleQ && j == 0) {
#pragma unroll
      for (int f = 0; f < kFragsM; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          q_unscale[f][half] = pipeline.q_unscale[warp_m * kFragsM * 16 + f * 16 + half * 8 + lane / 4];
      }
    }
    if (j + kStages - 1 < tiles) load_tile((j + kStages - 1) % kStages, next_slot);
    cp_async_commit();
    next_slot = load_slot(j + kStages);
    const int token0 = work.begin + j * kTileN + warp_n * Traits::kWarpTokens;
    if (idle) continue;
    if constexpr (kTileN > kChunkGranule) {  // a chunk that is not the request's last may end within a tile
      static_assert(kChunkGranule % Traits::kWarpTokens == 0);  // but not within a warp's tokens
      if (token0 >= work.end) continue;
    }

    // One row per lane. Computed before S is live, because the mask needs registers too.
    const bool masked = needs_mask(request, p.sliding_window, token0, Traits::kWarpTokens);
    const uint32_t row_mask = masked ? tree_mask(p, request, (warp_row0 + lane) / heads, token0) : 0;

    const uint32_t tile =
        Traits::kConverts ? smem_base + offsetof(Pipeline, tile) : stages + j % kStages * Traits::kStageBytes;
    float s[kFragsM][kFragsN][4] = {};
#pragma unroll
    for (int k = 0; k < Traits::kSteps; ++k) {
      if constexpr (Traits::kQShared) {
#pragma unroll
        for (int f = 0; f < kFragsM; ++f) ldmatrix_x4(q_frag[f][0], q_lane + f * 16 * kPitch + k * 32);
      }
      const int at = Traits::kQShared ? 0 : k;
#pragma unroll
      for (int n = 0; n < kFragsN / 2; ++n) {
        uint32_t b[4];
        ldmatrix_x4(b, tile + k_lane + n * 16 * kPitch + k * 32);
#pragma unroll
        for (int f = 0; f < kFragsM; ++f) {
          mma_m16n8<Mma>(s[f][2 * n], q_frag[f][at], b[0], b[1]);
          mma_m16n8<Mma>(s[f][2 * n + 1], q_frag[f][at], b[2], b[3]);
        }
      }
    }

    if (logit_scale.cap != 0.f) {
#pragma unroll
      for (int f = 0; f < kFragsM; ++f) {
#pragma unroll
        for (int n = 0; n < kFragsN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            s[f][n][e] = logit_scale.capped(Traits::kScaleQ ? s[f][n][e] * q_unscale[f][e / 2] : s[f][n][e]);
        }
      }
    }
    if (masked) {
#pragma unroll
      for (int f = 0; f < kFragsM; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t mask = __shfl_sync(0xffffffff, row_mask, f * 16 + half * 8 + lane / 4) >> lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < kFragsN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (!(mask >> (n * 8 + e) & 1)) s[f][n][half * 2 + e] = neg_inf();
          }
        }
      }
    }
#pragma unroll
    for (int f = 0; f < kFragsM; ++f) {
      float shrink[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor =
            Traits::kScaleQ && logit_scale.cap == 0.f ? logit_scale.factor * q_unscale[f][half] : logit_scale.factor;
        float top = neg_inf();
#pragma unroll
        for (int n = 0; n < kFragsN; ++n) top = fmaxf(top, fmaxf(s[f][n][half * 2], s[f][n][half * 2 + 1]));
        shrink[half] = Traits::kMmaFp8 ? raise_max_e4m3(row_max[f][half], quad_max(top) * factor)
                                       : raise_max(row_max[f][half], quad_max(top) * factor);
        const float base = exponent_base(row_max[f][half]);
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kFragsN; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float prob = fast_exp2(fmaf(s[f][n][half * 2 + e], factor, -base));
            s[f][n][half * 2 + e] = prob;
            sum += prob;
          }
        }
        row_sum[f][half] = row_sum[f][half] * shrink[half] + sum;
      }
      if (__any_sync(0xffffffff, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
        for (int d = 0; d < kD / 8; ++d) {
          o[f][d][0] *= shrink[0], o[f][d][1] *= shrink[0];
          o[f][d][2] *= shrink[1], o[f][d][3] *= shrink[1];
        }
      }
    }

    if constexpr (Traits::kMmaFp8) {
      static_assert(kFragsN == 4);
      constexpr int kBatch = kD == 192 ? 2 : 4;  // steps of 16 dimensions
      uint32_t prob[kFragsM][4];
#pragma unroll
      for (int f = 0; f < kFragsM; ++f) weights_e4m3(s[f], prob[f]);
#pragma unroll
      for (int d = 0; d < kD / 16; ++d) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, tile + v_lane + d * 16);
        const ValuesE4m3 v(b);
#pragma unroll
        for (int f = 0; f < kFragsM; ++f) v.add_product(o[f][2 * d], o[f][2 * d + 1], prob[f]);
        // Otherwise ptxas starts so many products that it spills.
        if (d % kBatch == kBatch - 1) __syncwarp();
      }
    } else {
#pragma unroll
      for (int k = 0; k < Traits::kWarpTokens / 16; ++k) {
        uint32_t prob[kFragsM][4];
#pragma unroll
        for (int f = 0; f < kFragsM; ++f) {
          prob[f][0] = pack2<Mma>(s[f][2 * k][0], s[f][2 * k][1]);
          prob[f][1] = pack2<Mma>(s[f][2 * k][2], s[f][2 * k][3]);
          prob[f][2] = pack2<Mma>(s[f][2 * k + 1][0], s[f][2 * k + 1][1]);
          prob[f][3] = pack2<Mma>(s[f][2 * k + 1][2], s[f][2 * k + 1][3]);
        }
#pragma unroll
        for (int d = 0; d < kD / 16; ++d) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, tile + v_lane + k * 16 * kPitch + d * 32);
#pragma unroll
          for (int f = 0; f < kFragsM; ++f) {
            mma_m16n8k16<Mma>(o[f][2 * d], prob[f], b[0], b[1]);
            mma_m16n8k16<Mma>(o[f][2 * d + 1], prob[f], b[2], b[3]);
          }
        }
      }
    }
  }

  int lane_id = lane;
  if constexpr (Traits::kMmaFp8) {  // nothing computed from `lane` above stays in registers during the loop
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_id));
  }
#pragma unroll
  for (int f = 0; f < kFragsM; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[f][half] = quad_sum(row_sum[f][half]);
  }

  if constexpr (Traits::kWarpsN == 1) {
#pragma unroll
    for (int f = 0; f < kFragsM; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = warp_row0 + f * 16 + half * 8 + lane_id / 4;
        const RowWriter<T> writer(p, work, blockIdx.y, kv_head, m, row_max[f][half], row_sum[f][half],
                                  lane_id % 4 == 0);
        if constexpr (Traits::kMmaFp8) {
#pragma unroll
          for (int d = 0; d < kD / 16; ++d)
            writer.store4(d * 16 + lane_id % 4 * 4, even_odd(o[f][2 * d], o[f][2 * d + 1], half));
        } else {
#pragma unroll
          for (int d = 0; d < kD / 8; ++d)
            writer.store2(d * 8 + lane_id % 4 * 2, o[f][d][half * 2], o[f][d][half * 2 + 1]);
        }
      }
    }
  } else {
    // Merge the warps' accumulators, each relative to its own maximum, in a fixed order.
    constexpr int kWarpsN = Traits::kWarpsN;
    typename Traits::Merge& merge = storage.merge;
    cp_async_wait<0>();
    __syncthreads();  // the pipeline is done: its memory holds `merge` from here on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane_id / 4;
      if (lane_id % 4 == 0)
        merge.maxima[warp_n * 16 + row] = row_max[0][half], merge.sums[warp_n * 16 + row] = row_sum[0][half];
      float* const output = merge.outputs + (warp_n * 16 + row) * kD;
      if constexpr (Traits::kMmaFp8) {
#pragma unroll
        for (int d = 0; d < kD / 16; ++d)
          *reinterpret_cast<float4*>(output + d * 16 + lane_id % 4 * 4) = even_odd(o[0][2 * d], o[0][2 * d + 1], half);
      } else {
#pragma unroll
        for (int d = 0; d < kD / 8; ++d)
          *reinterpret_cast<float2*>(output + d * 8 + lane_id % 4 * 2) =
              make_float2(o[0][d][half * 2], o[0][d][half * 2 + 1]);
      }
    }
    __syncthreads();
    // One row per quad, as before: 8 rows per warp and pass.
    for (int row = warp * 8 + lane_id / 4; row < 16; row += Traits::kWarps * 8) {
      float top = neg_inf(), sum = 0.f, weight[kWarpsN];
#pragma unroll
      for (int w = 0; w < kWarpsN; ++w) top = fmaxf(top, merge.maxima[w * 16 + row]);
#pragma unroll
      for (int w = 0; w < kWarpsN; ++w) {
        weight[w] = top == neg_inf() ? 0.f : fast_exp2(merge.maxima[w * 16 + row] - top);
        sum += weight[w] * merge.sums[w * 16 + row];
      }
      const RowWriter<T> writer(p, work, blockIdx.y, kv_head, m0 + row, top, sum, lane_id % 4 == 0);
#pragma unroll 2
      for (int d = lane_id % 4 * 2; d < kD; d += 8) {
        float2 total = make_float2(0.f, 0.f);
#pragma unroll
        for (int w = 0; w < kWarpsN; ++w) {
          const float2 part = *reinterpret_cast<const float2*>(merge.outputs + (w * 16 + row) * kD + d);
          total.x += weight[w] * part.x, total.y += weight[w] * part.y;
        }
        writer.store2(d, total.x, total.y);
      }
    }
  }
}

}  // namespace ddtree
