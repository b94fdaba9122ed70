// Tree-verify attention over MLA latents with Hopper's wgmma: what ../mla_partial.cuh computes, for sm_90a only.
//
// Grid as there: x = M tile of 64 packed rows, y = work item. A block is three warpgroups. The producers gather tiles
// of 64 latents by slot into two stages; each consumer group owns half of the 512 value dimensions of O, and computes S
// and P of every other tile for both: group 0 the even tiles (stage 0), group 1 the odd ones (stage 1). P and the
// running maximum pass from thread t of one group to thread t of the other, which holds the same rows in the same
// layout, through a mailbox that only these two threads touch; they take turns, so one suffices. While one group is at
// its softmax, the tensor cores work for the other.
//
// A stage is filled and freed in two parts: part 0 holds the value dimensions of the group that computes S, and the 64
// dimensions that are no values; part 1 the other group's value dimensions. A group that is done with P V of its own
// dimensions frees their part, however late the other group is.
//
// Barriers (mbarrier.cuh): full[stage][0], by the stage's producers ([1] is spare); empty[stage][part], by the warps of
// the group that owns its value dimensions; posted[group], by the group's threads, P is in the mailbox; meeting, by all
// consumers, before the first tile and after the last. The producers' writes are ordinary ones to the tensor cores'
// asynchronous reads: each producer thread waits for its copies, fences, then arrives.
#pragma once

#include "../../common/cp_async.cuh"
#include "../../common/fp8.cuh"
#include "../../common/mbarrier.cuh"
#include "../../common/pdl.cuh"
#include "../../common/softmax.cuh"
#include "../../common/wgmma.cuh"
#include "../epilogue.cuh"
#include "../traits.h"
#include "../tree_mask.cuh"

namespace ddtree {

// What every thread of a block knows.
struct MlaSm90Block {
  const WorkItem& work;
  int m0, tiles;
  uint32_t q, stages, mailbox;  // shared-memory addresses
  float* q_unscale;             // [kTileM] kScaleQ: what takes a row's q.k back
  uint32_t barriers;            // full[2][2], empty[2][2], posted[2], meeting
  __device__ __forceinline__ uint32_t full(int stage, int part) const { return barriers + stage * 16 + part * 8; }
  __device__ __forceinline__ uint32_t empty(int stage, int part) const { return full(stage, part) + 32; }
  __device__ __forceinline__ uint32_t posted(int group) const { return barriers + 64 + group * 8; }
  __device__ __forceinline__ uint32_t meeting() const { return barriers + 80; }
  // Barrier of the two consumer groups, the time-th of the block. (bar.sync would do, but for synccheck: it objects to
  // producers that exit meanwhile.)
  __device__ __forceinline__ void meet(int time) const {
    mbarrier_arrive(meeting());
    mbarrier_wait(meeting(), time & 1);
  }
};

__device__ __forceinline__ void store_shared_16(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Blocks of 64 dimensions of a part of a stage.
__host__ __device__ constexpr int part_blocks(int part) { return part == 0 ? 5 : 4; }
__host__ __device__ constexpr int part_block(int stage, int part, int i) { return i == 4 ? 8 : (stage ^ part) * 4 + i; }

// Two warps fill one stage with every other tile, 32 of its tokens each: lane i looks up the slot of token i.
template <typename Traits, int kStage>
__device__ __forceinline__ void mla_sm90_produce(const TreeVerifyParams& p, const MlaSm90Block& block) {
  const int lane = threadIdx.x % 32, token0 = threadIdx.x / 32 % 2 * 32;
  const WorkItem& work = block.work;
  const char* const cache = static_cast<const char*>(p.k_cache);
  const uint32_t to = block.stages + kStage * Traits::kTileBytes;
  auto load_slot = [&](int tile) {
    const int token = work.begin + tile * Traits::kTileN + token0 + lane;
    return token < work.end ? token_slot(p, work.request, work.request.kv_start, token) : -1;
  };

  int slot = load_slot(kStage);
  for (int tile = kStage; tile < block.tiles; tile += 2) {
    const uint32_t parity = tile / 2 & 1;
    if constexpr (!Traits::kFp8) {
      // Eight lanes copy 128 bytes of one token.
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        mbarrier_wait(block.empty(kStage, part), parity ^ 1);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int row = i * 4 + lane / 8, s = __shfl_sync(0xffffffff, slot, row);
          const char* const latent = cache + (s < 0 ? 0 : s) * p.k_stride_slot * 2 + lane % 8 * 16;
          const uint32_t at = to + swizzled(token0 + row, lane % 8);
#pragma unroll
          for (int d = 0; d < part_blocks(part); ++d) {
            const int b = part_block(kStage, part, d);
            cp_async_16(at + b * Traits::kBlockBytes, latent + b * kSwizzleRowBytes, s >= 0);
          }
        }
      }
      cp_async_commit();
      slot = load_slot(tile + 2);
      cp_async_wait<0>();
      fence_async_proxy();
      mbarrier_arrive(block.full(kStage, 0));
    } else {
      // Four lanes convert 64 dimensions of one token, through registers: the stages leave no room for the bytes.
      constexpr int kLoads = 4 * Traits::kBlocks;  // a tile, a thread; kAhead in flight
      constexpr int kAhead = 10;
      const uint32_t even = to + swizzled(token0 + lane / 4, lane % 4 * 2);
      const uint32_t odd = to + swizzled(token0 + lane / 4, lane % 4 * 2 + 1);
      uint4 bytes[kAhead];
      // Load i: part 0's blocks of four groups of eight tokens, then part 1's.
      auto part_of = [](int i) { return i < 4 * part_blocks(0) ? 0 : 1; };
      auto group_of = [&](int i) {
        return part_of(i) == 0 ? i / part_blocks(0) : (i - 4 * part_blocks(0)) / part_blocks(1);
      };
      auto block_of = [&](int i) {
        const int part = part_of(i);
        return part_block(kStage, part, part == 0 ? i % part_blocks(0) : (i - 4 * part_blocks(0)) % part_blocks(1));
      };
      const char* latent = nullptr;
      auto load = [&](int i) {
        if (i == 0 || group_of(i) != group_of(i - 1)) {
          const int s = __shfl_sync(0xffffffff, slot, group_of(i) * 8 + lane / 4);
          latent = s < 0 ? nullptr : cache + s * p.k_stride_slot + lane % 4 * 16;
        }
        bytes[i % kAhead] =
            latent ? __ldg(reinterpret_cast<const uint4*>(latent + block_of(i) * 64)) : make_uint4(0, 0, 0, 0);
      };
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (i == 0 || part_of(i) != part_of(i - 1)) {
          mbarrier_wait(block.empty(kStage, part_of(i)), parity ^ 1);
        }
        uint4 lo, hi;
        e4m3x16_to_16bit<typename Traits::Mma>(bytes[i % kAhead], lo, hi);
        if (i + kAhead < kLoads) load(i + kAhead);
        const int offset = block_of(i) * Traits::kBlockBytes + group_of(i) * kSwizzleAtomBytes;
        store_shared_16(even + offset, lo);
        store_shared_16(odd + offset, hi);
      }
      fence_async_proxy();
      mbarrier_arrive(block.full(kStage, 0));
      slot = load_slot(tile + 2);
    }
  }
  if constexpr (!Traits::kFp8) {  // no thread exits with copies in flight
    cp_async_commit();
    cp_async_wait<0>();
  }
}

template <typename Traits, int kGroup>
struct MlaSm90Consumer {
  using T = typename Traits::Element;
  using Mma = typename Traits::Mma;
  static constexpr int kStepsN = Traits::kTileN / 16;

  const TreeVerifyParams& p;
  const MlaSm90Block& block;
  const LogitScale logit_scale;
  const int thread, lane;
  float o[128], s[32], row_max[2], row_sum[2], q_unscale[2];
  uint32_t prob[kStepsN][4];

  __device__ __forceinline__ MlaSm90Consumer(const TreeVerifyParams& p, const MlaSm90Block& block)
      : p(p),
        block(block),
        logit_scale(make_logit_scale<true>(p.sm_scale, load_scale(p.k_scale), p.logit_cap)),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32) {
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[half] = neg_inf(), row_sum[half] = 0.f;
      if constexpr (Traits::kScaleQ) q_unscale[half] = block.q_unscale[thread / 32 * 16 + half * 8 + lane / 4];
    }
  }

  __device__ __forceinline__ int token_of(int tile) const { return block.work.begin + tile * Traits::kTileN; }

  __device__ __forceinline__ bool is_masked(int tile) const {
    return needs_mask(block.work.request, p.sliding_window, token_of(tile), Traits::kTileN);
  }

  // A lane a row of the warp's 16 and a half of the tile.
  __device__ __forceinline__ uint32_t lane_mask(int tile) const {
    const int m = block.m0 + thread / 32 * 16 + lane % 16;
    return tree_mask(p, block.work.request, m / p.h_q, token_of(tile) + lane / 16 * 32);
  }

  // s = Q K^T of a tile in this group's stage, complete on return.
  __device__ __forceinline__ void scores(uint32_t parity) {
    const uint64_t q = wgmma_descriptor(block.q, 16, kSwizzleAtomBytes);
    const uint64_t k = wgmma_descriptor(block.stages + kGroup * Traits::kTileBytes, 16, kSwizzleAtomBytes);
    mbarrier_wait(block.full(kGroup, 0), parity);
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < part_blocks(part); ++i) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const int offset = (part_block(kGroup, part, i) * Traits::kBlockBytes + step * 32) >> 4;
          wgmma_ss<Mma>(s, q + offset, k + offset, part + i + step > 0);
        }
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
  }

  // O += P V of this group's dimensions; runs on.
  __device__ __forceinline__ void start_values(int stage) {
    const uint64_t v = wgmma_descriptor(block.stages + stage * Traits::kTileBytes + kGroup * 4 * Traits::kBlockBytes,
                                        Traits::kBlockBytes, kSwizzleAtomBytes);
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStepsN; ++step) wgmma_rs<Mma>(o, prob[step], v + (step * 16 * kSwizzleRowBytes >> 4));
    wgmma_commit();
  }

  __device__ __forceinline__ void finish_values(int stage) {
    wgmma_wait<0>();
    wgmma_pin(o);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(block.empty(stage, stage ^ kGroup));
  }

  // s to probabilities, relative to the raised maximum, in place; the row sums. Returns what to multiply O by.
  __device__ __forceinline__ float2 softmax(bool masked, uint32_t row_mask) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = logit_scale(Traits::kScaleQ ? s[i] * q_unscale[i / 2 % 2] : s[i]);
    if (masked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const uint32_t mask = __shfl_sync(0xffffffff, row_mask, n / 4 * 16 + half * 8 + lane / 4);
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(mask >> (n % 4 * 8 + lane % 4 * 2 + e) & 1)) s[4 * n + half * 2 + e] = neg_inf();
        }
      }
    }
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = neg_inf();
#pragma unroll
      for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(s[4 * n + half * 2], s[4 * n + half * 2 + 1]));
      shrink[half] = raise_max(row_max[half], quad_max(top));
      const float base = exponent_base(row_max[half]);
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * n + half * 2 + e];
          x = fast_exp2(x - base);
          sum += x;
        }
      }
      row_sum[half] = row_sum[half] * shrink[half] + sum;
    }
    return make_float2(shrink[0], shrink[1]);
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int step = 0; step < kStepsN; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) prob[step][i] = pack2<Mma>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    }
  }

  // The mailbox: [step][thread] 16 bytes of P, then [thread] the two running maxima.
  __device__ __forceinline__ uint32_t maxima() const { return block.mailbox + kStepsN * 128 * 16 + thread * 8; }

  __device__ __forceinline__ void post() {
#pragma unroll
    for (int step = 0; step < kStepsN; ++step)
      store_shared_16(block.mailbox + (step * 128 + thread) * 16,
                      make_uint4(prob[step][0], prob[step][1], prob[step][2], prob[step][3]));
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(maxima()), "f"(row_max[0]), "f"(row_max[1]) : "memory");
    mbarrier_arrive(block.posted(kGroup));
  }

  // The other group's P and maximum. Returns what to multiply O by: the bits that softmax() returned there.
  __device__ __forceinline__ float2 receive(uint32_t parity) {
    mbarrier_wait(block.posted(kGroup ^ 1), parity);
#pragma unroll
    for (int step = 0; step < kStepsN; ++step)
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(prob[step][0]), "=r"(prob[step][1]), "=r"(prob[step][2]), "=r"(prob[step][3])
                   : "r"(block.mailbox + (step * 128 + thread) * 16)
                   : "memory");
    float raised[2], shrink[2];
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(raised[0]), "=f"(raised[1]) : "r"(maxima()) : "memory");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shrink[half] = raised[half] == row_max[half] ? 1.f : fast_exp2(row_max[half] - raised[half]);
      row_max[half] = raised[half];
      row_sum[half] *= shrink[half];
    }
    return make_float2(shrink[0], shrink[1]);
  }

  __device__ __forceinline__ void rescale(float2 shrink) {
    if (!__any_sync(0xffffffff, shrink.x != 1.f || shrink.y != 1.f)) return;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      o[4 * j] *= shrink.x, o[4 * j + 1] *= shrink.x, o[4 * j + 2] *= shrink.y, o[4 * j + 3] *= shrink.y;
  }

  __device__ __forceinline__ void run() {
    const int pairs = block.tiles / 2;
    const bool odd = block.tiles & 1;
    if constexpr (kGroup == 0) {
      for (int i = 0; i < pairs + odd; ++i) {
        const uint32_t parity = i & 1;
        const bool masked = is_masked(2 * i);
        const uint32_t row_mask = masked ? lane_mask(2 * i) : 0;
        scores(parity);
        const float2 shrink = softmax(masked, row_mask);
        pack();
        post();
        rescale(shrink);
        start_values(0);
        finish_values(0);
        if (i < pairs) {
          mbarrier_wait(block.full(1, 0), parity);
          rescale(receive(parity));
          start_values(1);
          finish_values(1);
        }
      }
    } else {
      for (int i = 0; i < pairs; ++i) {
        const uint32_t parity = i & 1;
        const bool masked = is_masked(2 * i + 1);
        const uint32_t row_mask = masked ? lane_mask(2 * i + 1) : 0;
        scores(parity);
        mbarrier_wait(block.full(0, 0), parity);
        rescale(receive(parity));
        start_values(0);
        const float2 shrink = softmax(masked, row_mask);  // beside the products
        finish_values(0);
        pack();
        post();
        rescale(shrink);
        start_values(1);
        finish_values(1);
      }
      if (odd) {
        mbarrier_wait(block.full(0, 0), pairs & 1);
        rescale(receive(pairs & 1));
        start_values(0);
        finish_values(0);
      }
    }

    // Each group summed its own tiles; both end with the same maximum.
    block.meet(1);  // the mailbox's last reader is done
    const uint32_t sums = block.mailbox + thread * 8;
    float other[2];
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(sums + kGroup * 1024), "f"(row_sum[0]), "f"(row_sum[1])
                 : "memory");
    block.meet(2);
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(other[0]), "=f"(other[1])
                 : "r"(sums + (kGroup ^ 1) * 1024)
                 : "memory");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(row_sum[half] + other[half]);
      const int m = block.m0 + thread / 32 * 16 + half * 8 + lane / 4;
      RowWriter<T>(p, block.work, blockIdx.y, 0, m, row_max[half], sum, kGroup == 0 && lane % 4 == 0)
          .template store_all<32>(kGroup * 256 + lane % 4 * 2, o, half * 2);
    }
  }
};

// Q's 64 packed rows, zero where no row exists; by the consumers.
template <typename Traits>
__device__ __forceinline__ void mla_sm90_load_q(const TreeVerifyParams& p, const MlaSm90Block& block) {
  using T = typename Traits::Element;
  const Request& request = block.work.request;
#pragma unroll
  for (int i = 0; i < Traits::kTileM / 32; ++i) {
    const int at = i * 32 + threadIdx.x / 8, chunk = threadIdx.x % 8;
    const int m = block.m0 + at, row = m / p.h_q;
    const bool exists = row < request.rows;
    const T* from = static_cast<const T*>(p.q) + chunk * 8;
    if (exists) from += (request.row0 + int64_t(row)) * p.q_stride_t + m % p.h_q * p.q_stride_h;
    const uint32_t to = block.q + swizzled(at, chunk);
    if constexpr (!Traits::kScaleQ) {
#pragma unroll
      for (int d = 0; d < Traits::kBlocks; ++d) cp_async_16(to + d * Traits::kBlockBytes, from + d * 64, exists);
    } else {
      uint4 values[Traits::kBlocks];
      float top = 0.f;
#pragma unroll
      for (int d = 0; d < Traits::kBlocks; ++d) {
        uint4& v = values[d];
        v = exists ? __ldg(reinterpret_cast<const uint4*>(from + d * 64)) : make_uint4(0, 0, 0, 0);
        top = fmaxf(fmaxf(fmaxf(top, bf16x2_abs_max(v.x)), fmaxf(bf16x2_abs_max(v.y), bf16x2_abs_max(v.z))),
                    bf16x2_abs_max(v.w));
      }
      top = quad_max(top);
      const float scale = range_scale(fmaxf(top, __shfl_xor_sync(0xffffffff, top, 4)));
      if (chunk == 0) block.q_unscale[at] = 1.f / scale;
#pragma unroll
      for (int d = 0; d < Traits::kBlocks; ++d) {
        const uint4 v = values[d];
        store_shared_16(to + d * Traits::kBlockBytes,
                        make_uint4(bf16x2_to_half2(v.x, scale), bf16x2_to_half2(v.y, scale),
                                   bf16x2_to_half2(v.z, scale), bf16x2_to_half2(v.w, scale)));
      }
    }
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_async_proxy();
  block.meet(0);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    mla_sm90_partial_kernel(const __grid_constant__ TreeVerifyParams p) {
  extern __shared__ __align__(1024) char sm90_smem[];
  const uint32_t base = smem_address(sm90_smem);
  WorkItem& work = *reinterpret_cast<WorkItem*>(sm90_smem + Traits::kWorkOffset);
  if (threadIdx.x < 32) {
    const WorkItem found = find_work(p, blockIdx.y);
    if (threadIdx.x == 0) work = found;
  }
  MlaSm90Block block{work,
                     int(blockIdx.x) * Traits::kTileM,
                     0,
                     base,
                     base + Traits::kTileBytes,
                     base + Traits::kMailboxOffset,
                     reinterpret_cast<float*>(sm90_smem + Traits::kScaleOffset),
                     base + Traits::kBarrierOffset};
  if (threadIdx.x == 128) {
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < 2; ++part) {
        mbarrier_init(block.full(i, part), 64);
        mbarrier_init(block.empty(i, part), 4);
      }
      mbarrier_init(block.posted(i), 128);
    }
    mbarrier_init(block.meeting(), 256);
  }
  __syncthreads();
  allow_dependents();
  if (work.index < 0 || block.m0 >= work.request.rows * p.h_q) return;
  block.tiles = ceil_div(work.end - work.begin, Traits::kTileN);

  const int group = threadIdx.x / 128;
  if (group == 2) {
    shrink_registers<Traits::kProducerRegisters>();
    if (threadIdx.x < 320) {
      mla_sm90_produce<Traits, 0>(p, block);
    } else {
      mla_sm90_produce<Traits, 1>(p, block);
    }
  } else if (group == 0) {
    grow_registers<Traits::kConsumerRegisters>();
    mla_sm90_load_q<Traits>(p, block);
    MlaSm90Consumer<Traits, 0>(p, block).run();
  } else {
    grow_registers<Traits::kConsumerRegisters>();
    mla_sm90_load_q<Traits>(p, block);
    MlaSm90Consumer<Traits, 1>(p, block).run();
  }
}

}  // namespace ddtree
