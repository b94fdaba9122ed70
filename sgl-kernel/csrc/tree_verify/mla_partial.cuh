// Tree-verify attention over MLA latents: 576 dimensions for S, the first 512 of the same bytes for O.
//
// Grid: x = work item (see tile_scheduler.cuh), y = M tile of 64 packed rows m = tree row * h_q + head. One block fills
// the multiprocessor's registers: the 64 x 512 fp32 accumulator takes half of them and Q another quarter, which leaves
// shared memory to the latents. What limits the kernel next is shared-memory bandwidth, so within a group of four warps:
//   S: each warp sums 144 of the dimensions of all 32 rows, so that a K fragment feeds four mma; the partial sums are
//      exchanged through shared memory and warp w finishes rows 8 w .. 8 w + 7.
//   O: each warp owns 128 value dimensions of all 32 rows.
// Pipeline: a ring of latent tiles. bf16 / fp16: group 1, which runs behind, copies every tile as soon as it is done with
// the tile before the last, 18 copies a thread. fp8: the groups take turns, since they also convert what they copied.
// Slots come through cp.async as well: a load to a register would hold up the next matrix load's scoreboard.
// Synchronization: full[stage] counts the copying group's threads, empty[stage] the eight warps that are done with it.
// Groups meet nowhere else. A group has three barriers a tile: before the exchange is written (P, which lies in the same
// memory, has been read), between writing and reading it, and between writing P and the rescale factors and reading
// them. A warp writes its rows of P where it alone has read its part of the exchange.
#pragma once

#include "../common/cp_async.cuh"
#include "../common/fp8.cuh"
#include "../common/mbarrier.cuh"
#include "../common/mma_sm80.cuh"
#include "../common/softmax.cuh"
#include "epilogue.cuh"
#include "traits.h"
#include "tree_mask.cuh"

namespace ddtree {

// Eight threads a token, 16 tokens a pass.
template <typename Traits>
__device__ __forceinline__ void mla_load_tile(const TreeVerifyParams& p, uint32_t to, uint32_t slots, int left) {
  constexpr int kBytes = Traits::kFp8 ? 1 : 2, kChunks = kMlaQkDim * kBytes / 16;
  constexpr int kPitch = Traits::kFp8 ? kMlaQkDim : Traits::kPitch;
  const int row = threadIdx.x % Traits::kGroupThreads / 8, part = threadIdx.x % 8;
  to += row * kPitch + part * 16;
#pragma unroll 1  // the accumulators leave no registers for two addresses
  for (int r = 0; r < Traits::kRounds; ++r) {
    const bool valid = r * 16 + row < left;
    const uint32_t slot = load_shared_u32(slots + (r * 16 + row) * 4);  // 0 past the end
    const char* from = static_cast<const char*>(p.k_cache) + part * 16 +
                       uint64_t(slot) * uint32_t(p.k_stride_slot * kBytes);
#pragma unroll
    for (int i = 0; i < (kChunks + 7) / 8; ++i)
      if (kChunks % 8 == 0 || i * 8 + part < kChunks) cp_async_16(to + r * 16 * kPitch + i * 128, from + i * 128, valid);
  }
}

// Converts the chunks that this thread copied itself (same mapping as mla_load_tile).
template <typename Traits>
__device__ __forceinline__ void mla_convert_tile(const char* from, char* to) {
  constexpr int kChunks = kMlaQkDim / 16;
  const int row = threadIdx.x % Traits::kGroupThreads / 8, part = threadIdx.x % 8;
#pragma unroll 1  // conversion needs registers that the accumulators hold
  for (int chunk = part; chunk < kChunks; chunk += 8) {
    uint4 lo, hi;
    e4m3x16_to_16bit<typename Traits::Element>(*reinterpret_cast<const uint4*>(from + row * kMlaQkDim + chunk * 16), lo,
                                               hi);
    uint4* out = reinterpret_cast<uint4*>(to + row * Traits::kPitch + chunk * 32);
    out[0] = lo, out[1] = hi;
  }
}

// The stage of the ring that tile t passes through, and the parity of that use.
template <int kStages>
struct RingIndex {
  int stage, phase;
  __device__ __forceinline__ explicit RingIndex(int t) : stage(t % kStages), phase(t / kStages & 1) {}
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) mla_partial_kernel(const __grid_constant__ TreeVerifyParams p) {
  using T = typename Traits::Element;
  constexpr int kPitch = Traits::kPitch, kTileN = Traits::kTileN, kSteps = Traits::kSteps;
  constexpr int kStages = Traits::kStages, kFragsV = Traits::kWarpV / 8;
  extern __shared__ __align__(16) char smem[];
  const int lane = threadIdx.x & 31, group = threadIdx.x / Traits::kGroupThreads, warp = threadIdx.x >> 5 & 3;
  const uint32_t smem_base = pinned_smem_address(smem);
  const uint32_t full = smem_base + Traits::kBarrierOffset, empty = full + kStages * 8;
  const uint32_t own = smem_base + Traits::kGroupOffset + group * Traits::kGroupBytes;  // the group's own memory

  __shared__ WorkItem work;  // in shared memory: the main loop has no registers to spare
  __shared__ int64_t kv_start;
  if (threadIdx.x < 32) {
    const WorkItem found = find_work(p, blockIdx.x);
    if (threadIdx.x == 0) {
      work = found;
      kv_start = found.index < 0 ? 0 : p.kv_indptr[found.index];
      for (int s = 0; s < kStages; ++s) {
        mbarrier_init(full + s * 8, Traits::kGroupThreads);
        mbarrier_init(empty + s * 8, Traits::kThreads / 32);
      }
    }
  }
  __syncthreads();
  const int m0 = blockIdx.y * Traits::kTileM, m_end = work.request.rows * p.h_q;
  if (work.index < 0 || m0 >= m_end) return;
  const Request& request = work.request;
  const int tiles = ceil_div(work.end - work.begin, kTileN);

  // Copies. A warp's threads fetch and use the slots of their own tokens only.
  const uint32_t slots = own + Traits::kSlotOffset;
  const uint32_t fp8_tile = smem_base + Traits::kFp8Offset + group * Traits::kFp8Bytes;
  auto fetch_slots = [&](int t) {
    if (threadIdx.x % 8 != 0) return;
#pragma unroll 1
    for (int r = 0; r < Traits::kRounds; ++r) {
      const int row = r * 16 + threadIdx.x % Traits::kGroupThreads / 8, token = work.begin + t * kTileN + row;
      const bool valid = token < work.end;
      cp_async_4(slots + row * 4, token_slot(p, request, kv_start, valid ? token : work.begin), valid);
    }
  };
  // Copies tile t, whose slots have been fetched, and fetches those of this group's next tile.
  auto copy_tile = [&](int t, uint32_t to, uint32_t barrier) {
    mla_load_tile<Traits>(p, to, slots, work.end - work.begin - t * kTileN);
    if constexpr (!Traits::kFp8) mbarrier_arrive_after_cp_async(barrier);
    __syncwarp();
    fetch_slots(t + (Traits::kFp8 ? 2 : 1));
  };
  // Fills tile t's stage if that is this group's task.
  auto produce = [&](int t) {
    if (t < tiles && (Traits::kFp8 ? t % 2 : 1) == group) {
      const RingIndex<kStages> fill(t);
      const uint32_t barrier = full + fill.stage * 8;
      cp_async_wait_all();
      __syncwarp();
      mbarrier_wait(empty + fill.stage * 8, fill.phase ^ 1);
      if constexpr (Traits::kFp8) {
        mla_convert_tile<Traits>(smem + Traits::kFp8Offset + group * Traits::kFp8Bytes,
                                 smem + fill.stage * Traits::kStageBytes);
        mbarrier_arrive(barrier);
        copy_tile(t + 2, fp8_tile, 0);
      } else {
        copy_tile(t, smem_base + fill.stage * Traits::kStageBytes, barrier);
      }
    }
  };
  if (Traits::kFp8 || group == 1) {
    const int first = Traits::kFp8 ? group : 0;
    fetch_slots(first);
    if constexpr (Traits::kFp8) {
      cp_async_wait_all();
      __syncwarp();
      copy_tile(first, fp8_tile, 0);
    }
  }
  produce(0);

  const int group_m = m0 + group * Traits::kGroupM;
  uint32_t q_frag[2][kSteps][4];
#pragma unroll
  for (int f = 0; f < 2; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = group_m + f * 16 + half * 8 + lane / 4;
      const bool exists = m < m_end;
      const T* q = static_cast<const T*>(p.q) + (request.row0 + int64_t(exists ? m / p.h_q : 0)) * p.q_stride_t +
                   m % p.h_q * p.q_stride_h + warp * Traits::kWarpK + lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        q_frag[f][k][half] = exists ? *reinterpret_cast<const uint32_t*>(q + k * 16) : 0;
        q_frag[f][k][half + 2] = exists ? *reinterpret_cast<const uint32_t*>(q + k * 16 + 8) : 0;
      }
    }
  }

  const float factor = make_logit_scale(p.sm_scale, load_scale(p.k_scale), p.logit_cap).factor;
  // Tiles from this one on touch the tree or the end.
  const int masked_tile = max(0, UnmaskedRange(p, request, kTileN).last + kTileN - work.begin) / kTileN;
  float o[2][kFragsV][4], row_max = neg_inf(), row_sum = 0.f;  // max and sum of row 8 * warp + lane / 4
#pragma unroll
  for (int f = 0; f < 2; ++f) {
#pragma unroll
    for (int d = 0; d < kFragsV; ++d) o[f][d][0] = o[f][d][1] = o[f][d][2] = o[f][d][3] = 0.f;
  }

  // ldmatrix addresses of this lane: rows lane % 16, 16-byte columns lane / 16 of a 16 x 16 block.
  const uint32_t k_lane = smem_base + (lane & 15) * kPitch + (lane >> 4) * 16 + warp * Traits::kWarpK * 2;
  const uint32_t p_read =
      own + (lane >> 3 & 1) * Traits::kRegionBytes + (lane & 7) * Traits::kPitchP + (lane >> 4) * 16;
  // Region i of a group's exchange receives from the other three warps in order, rows 8 i .. 8 i + 7.
  const uint32_t receive = own + warp * Traits::kRegionBytes + lane * 16;
  // Formed anew each tile: one instruction instead of a register.
  auto send_address = [&] { return multiply_add(warp, Traits::kPartBytes - Traits::kRegionBytes, receive); };
  auto v_address = [&] { return multiply_add(warp, (Traits::kWarpV - Traits::kWarpK) * 2, k_lane); };
  auto p_write_address = [&] {
    return multiply_add(lane / 4, Traits::kPitchP - 64, multiply_add(lane % 4, 4 - 16, receive));
  };
  auto rescale = [&] { return own + Traits::kRescaleOffset + (threadIdx.x & 31) / 4 * 4; };
  auto group_sync = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
  const bool idle = group_m >= m_end;  // a group without rows only copies
  const bool staggered = m0 + Traits::kGroupM < m_end;

  for (int j = 0; j < tiles; ++j) {
    produce(j + 1);
    const RingIndex<kStages> use(j);
    mbarrier_wait(full + use.stage * 8, use.phase);
    if (!idle) {
      // Half a tile apart from the start: group 1's first S waits for group 0's.
      if (j == 0 && staggered && group == 1) asm volatile("bar.sync 3, 256;" ::: "memory");
      const uint32_t stage = use.stage * Traits::kStageBytes, send = send_address();
      float4 mine[Traits::kRounds];
#pragma unroll
      for (int r = 0; r < Traits::kRounds; ++r) {
        float s[2][2][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          uint32_t b[4];
          ldmatrix_x4(b, k_lane + stage + r * 16 * kPitch + k * 32);
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            mma_m16n8k16<T>(s[f][0], q_frag[f][k], b[0], b[2]);
            mma_m16n8k16<T>(s[f][1], q_frag[f][k], b[1], b[3]);
          }
        }
        if (r == 0) group_sync();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int f = i / 2, e = i % 2 * 2;
          const float4 part = make_float4(s[f][0][e], s[f][0][e + 1], s[f][1][e], s[f][1][e + 1]);
          if (i == warp) {
            mine[r] = part;
          } else {
            store_shared_float4(send + i * Traits::kRegionBytes + r * 512 - (warp > i ? Traits::kPartBytes : 0), part);
          }
        }
      }
      if (j == 0 && staggered && group == 0) asm volatile("bar.arrive 3, 256;" ::: "memory");
      group_sync();
      float x[Traits::kRounds][4];
#pragma unroll
      for (int r = 0; r < Traits::kRounds; ++r) {
        x[r][0] = mine[r].x, x[r][1] = mine[r].y, x[r][2] = mine[r].z, x[r][3] = mine[r].w;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          const float4 part = load_shared_float4(receive + i * Traits::kPartBytes + r * 512);
          x[r][0] += part.x, x[r][1] += part.y, x[r][2] += part.z, x[r][3] += part.w;
        }
      }

      if (p.logit_cap > 0.f) {
        const LogitScale logit_scale = make_logit_scale(p.sm_scale, load_scale(p.k_scale), p.logit_cap);
#pragma unroll
        for (int r = 0; r < Traits::kRounds; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[r][e] = logit_scale.capped(x[r][e]);
        }
      }
      if (j >= masked_tile ||
          (p.sliding_window >= 0 && work.begin + j * kTileN < UnmaskedRange(p, request, kTileN).first)) {
        const int token0 = work.begin + j * kTileN;
        const uint32_t mask =
            tree_mask(p, request, (group_m + warp * 8 + lane / 4) / p.h_q, token0) >> lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < Traits::kRounds; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (!(mask >> (r * 16 + e / 2 * 8 + e % 2) & 1)) x[r][e] = neg_inf();
        }
      }
      const uint32_t p_write = p_write_address();
      float top = neg_inf(), sum = 0.f;
#pragma unroll
      for (int r = 0; r < Traits::kRounds; ++r) top = fmaxf(top, fmaxf(fmaxf(x[r][0], x[r][1]), fmaxf(x[r][2], x[r][3])));
      const float shrink = raise_max(row_max, quad_max(top) * factor);
      const float base = exponent_base(row_max);
      __syncwarp();  // every lane has read the exchange
#pragma unroll
      for (int r = 0; r < Traits::kRounds; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[r][e] = fast_exp2(fmaf(x[r][e], factor, -base));
          sum += x[r][e];
        }
        store_shared_u32(p_write + r * 32, pack2<T>(x[r][0], x[r][1]));
        store_shared_u32(p_write + r * 32 + 16, pack2<T>(x[r][2], x[r][3]));
      }
      row_sum = row_sum * shrink + sum;
      const bool any = __any_sync(0xffffffff, shrink != 1.f);
      if (any && lane % 4 == 0) store_shared_float(rescale() + warp * 32, shrink);
      if (lane == 0) store_shared_u32(own + Traits::kFlagOffset + warp * 4, any);
      group_sync();

      const uint32_t v_lane = v_address();
      const float4 any_row = load_shared_float4(own + Traits::kFlagOffset);
      const uint32_t raised[4] = {__float_as_uint(any_row.x), __float_as_uint(any_row.y), __float_as_uint(any_row.z),
                                  __float_as_uint(any_row.w)};
      if (raised[0] | raised[1] | raised[2] | raised[3]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (raised[i]) {
            const float shrink_i = load_shared_float(rescale() + i * 32);
#pragma unroll
            for (int d = 0; d < kFragsV; ++d) o[i / 2][d][i % 2 * 2] *= shrink_i, o[i / 2][d][i % 2 * 2 + 1] *= shrink_i;
          }
        }
      }
#pragma unroll
      for (int r = 0; r < Traits::kRounds; ++r) {
        uint32_t a[2][4];
        ldmatrix_x4(a[0], p_read + r * 32);
        ldmatrix_x4(a[1], p_read + 2 * Traits::kRegionBytes + r * 32);
#pragma unroll
        for (int d = 0; d < kFragsV / 2; ++d) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, v_lane + stage + r * 16 * kPitch + d * 32);
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            mma_m16n8k16<T>(o[f][2 * d], a[f], b[0], b[1]);
            mma_m16n8k16<T>(o[f][2 * d + 1], a[f], b[2], b[3]);
          }
        }
      }
      __syncwarp();
    }
    if (lane == 0) mbarrier_arrive(empty + use.stage * 8);
  }
  if (idle) return;

  // The warps that own the value dimensions need every row's result.
  const uint32_t sums = own + lane / 4 * 4;
  group_sync();
  const float sum = quad_sum(row_sum);
  if (lane % 4 == 0) store_shared_float(rescale() + warp * 32, row_max), store_shared_float(sums + warp * 32, sum);
  group_sync();
#pragma unroll
  for (int f = 0; f < 2; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rows = f * 16 + half * 8;
      const RowWriter<T> writer(p, work, blockIdx.x, 0, group_m + rows + lane / 4, load_shared_float(rescale() + rows * 4),
                                load_shared_float(sums + rows * 4), warp == 0 && lane % 4 == 0);
#pragma unroll
      for (int d = 0; d < kFragsV; ++d)
        writer.store2(warp * Traits::kWarpV + d * 8 + lane % 4 * 2, o[f][d][half * 2], o[f][d][half * 2 + 1]);
    }
  }
}

}  // namespace ddtree
