// Tree-verify attention over MLA latents of Q's type with wgmma. Computes what mla_partial.cuh computes, for sm_90a
// only.
//
// The grid is the same: x = M tile of 64 packed rows, y = work item. A block is three warpgroups. The producers load
// tiles of 64 latents into two stages: by page (pages.cuh) or gathered by slot. Each of the two consumer groups owns
// half of the 512 value dimensions of O, and computes S and P of every other tile for both groups: group 0 the even
// tiles (stage 0), group 1 the odd tiles (stage 1). Thread t of one group passes P and the running maximum to thread t
// of the other, which holds the same rows in the same layout. They use a mailbox that no other thread touches, and
// because they take turns, one mailbox per pair is enough. While one group computes its softmax, the tensor cores work
// for the other.
//
// A stage is filled and freed in two parts. Part 0 holds the value dimensions of the group that computes S and the 64
// dimensions that are not values. Part 1 holds the other group's value dimensions. S starts when part 0 has arrived. A
// group that has finished P V for its own dimensions frees their part, regardless of the other group's progress.
//
// Group 1 starts S of its tile only when group 0 has nearly finished S of the tile before. If the tensor cores computed
// both at the same time, both groups would have their softmax at the same time, and the tensor cores nothing to do.
//
// Barriers (mbarrier.cuh) and who arrives at them:
//   full[stage][part]     the copies of the producers' lanes, or the lane that copies pages for all of them
//   empty[stage][part]    the warps of the group that owns the part's value dimensions
//   posted[group]         the group's threads, once P is in the mailbox
//   turn                  the warps of group 0, before the last block of S
//   meeting               all consumers, before the first tile and after the last
// A tile is gathered through the generic proxy, and the tensor cores read through the async proxy. Each consumer
// therefore waits for `full`, fences, then multiplies. TMA writes through the async proxy, so its tiles need no fence.
#pragma once

#include "common/cp_async.cuh"
#include "common/mbarrier.cuh"
#include "common/pdl.cuh"
#include "common/wgmma.cuh"
#include "tree_verify/epilogue.cuh"
#include "tree_verify/sm90/mla_exchange.cuh"
#include "tree_verify/sm90/online_softmax.cuh"
#include "tree_verify/sm90/pages.cuh"
#include "tree_verify/traits.h"
#include "tree_verify/tree_mask.cuh"

namespace ddtree {

// What every thread of a block knows.
struct MlaSm90Block {
  const WorkItem& work;
  int m0, tiles, paged;         // leading tiles that are copied by page
  uint32_t q, stages, mailbox;  // shared-memory addresses
  uint32_t barriers;            // shared-memory address of MlaSm90Barriers
  __device__ __forceinline__ uint32_t full(int stage, int part) const {
    return barriers + offsetof(MlaSm90Barriers, full) + stage * 16 + part * 8;
  }
  __device__ __forceinline__ uint32_t empty(int stage, int part) const {
    return barriers + offsetof(MlaSm90Barriers, empty) + stage * 16 + part * 8;
  }
  __device__ __forceinline__ uint32_t posted(int group) const {
    return barriers + offsetof(MlaSm90Barriers, posted) + group * 8;
  }
  __device__ __forceinline__ uint32_t turn() const { return barriers + offsetof(MlaSm90Barriers, turn); }
  __device__ __forceinline__ uint32_t meeting() const { return barriers + offsetof(MlaSm90Barriers, meeting); }
  // Barrier of the two consumer groups; `time` counts its uses in the block. (bar.sync would work too, but synccheck
  // objects to producers that exit in the meantime.)
  __device__ __forceinline__ void meet(int time) const {
    mbarrier_arrive(meeting());
    mbarrier_wait(meeting(), time & 1);
  }
};

// The blocks of 64 dimensions that form a part of a stage: their number, and the i-th of them.
__host__ __device__ constexpr int part_blocks(int part) { return part == 0 ? 5 : 4; }
__host__ __device__ constexpr int part_block(int stage, int part, int i) { return i == 4 ? 8 : (stage ^ part) * 4 + i; }

// A producer warp copies its 16 tokens of a tile to stage kStage. Lane i holds the slot of token i.
template <typename Traits, int kStage>
__device__ __forceinline__ void mla_sm90_copy(const TreeVerifyParams& p, const MlaSm90Block& block, int token0,
                                              int slot, uint32_t parity) {
  const int lane = threadIdx.x % 32;
  const char* const cache = static_cast<const char*>(p.k_cache);
  const uint32_t to = block.stages + kStage * Traits::kTileBytes;
  // Eight lanes copy 128 bytes of one token.
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    mbarrier_wait(block.empty(kStage, part), parity ^ 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = i * 4 + lane / 8, s = __shfl_sync(0xffffffff, slot, token);
      const char* const latent = cache + (s < 0 ? 0 : s) * p.k_stride_slot * 2 + lane % 8 * 16;
      const uint32_t at = to + swizzled(token0 + token, lane % 8);
#pragma unroll
      for (int d = 0; d < part_blocks(part); ++d) {
        const int b = part_block(kStage, part, d);
        cp_async_16(at + b * Traits::kBlockBytes, latent + b * kSwizzleRowBytes, s >= 0);
      }
    }
    mbarrier_arrive_after_copies(block.full(kStage, part));
  }
}

// A warp copies the tiles that are loaded by page.
template <typename Traits>
__device__ __forceinline__ void mla_sm90_copy_pages(const TreeVerifyParams& p, const MlaSm90Block& block,
                                                    const Pages& pages) {
  static_assert(Traits::kTileN == kBoxTokens);
  auto load_slot = [&](int tile) { return work_slot(p, block.work, block.work.begin + tile * Traits::kTileN); };
  int next = load_slot(0);
  for (int tile = 0; tile < block.paged; ++tile) {
    const int stage = tile % 2, slot = next;
    next = load_slot(tile + 1);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      mbarrier_wait(block.empty(stage, part), tile / 2 & 1 ^ 1);
      if (threadIdx.x % 32 != 0) continue;
      mbarrier_expect(block.full(stage, part), part_blocks(part) * Traits::kBlockBytes);
      mbarrier_arrive(block.full(stage, part), 128);
#pragma unroll
      for (int i = 0; i < part_blocks(part); ++i) {
        const int b = part_block(stage, part, i);
        copy_box(block.stages + stage * Traits::kTileBytes + b * Traits::kBlockBytes, pages.k, b * kSwizzleRowBytes, 0,
                 slot, block.full(stage, part));
      }
    }
  }
  __syncwarp();
}

// A producer warp copies 16 tokens of every tile. Lanes i and i + 16 look up the slot of token i.
template <typename Traits>
__device__ __forceinline__ void mla_sm90_produce(const TreeVerifyParams& p, const MlaSm90Block& block,
                                                 const Pages& pages) {
  const int token0 = threadIdx.x / 32 % 4 * 16;
  auto load_slot = [&](int tile) {
    return work_slot(p, block.work, block.work.begin + tile * Traits::kTileN + token0 + int(threadIdx.x % 16));
  };
  int even = load_slot(block.paged), odd = load_slot(block.paged + 1);
  if (Traits::kPaged && block.paged > 0) {
    if (threadIdx.x / 32 % 4 == 0) mla_sm90_copy_pages<Traits>(p, block, pages);
    meet_producers(128);
  }
  for (int tile = block.paged; tile < block.tiles; tile += 2) {
    const uint32_t parity = tile / 2 & 1;
    const int now = even, then = odd;
    even = load_slot(tile + 2), odd = load_slot(tile + 3);
    mla_sm90_copy<Traits, 0>(p, block, token0, now, parity);
    if (tile + 1 < block.tiles) mla_sm90_copy<Traits, 1>(p, block, token0, then, parity);
  }
  cp_async_wait_all();  // no thread may exit with copies in flight
}

template <typename Traits, int kGroup>
struct MlaSm90Consumer {
  using T = typename Traits::Element;
  static constexpr int kStepsN = Traits::kTileN / 16;

  const TreeVerifyParams& p;
  const MlaSm90Block& block;
  const LogitScale logit_scale;
  const int thread, lane;
  float o[128], s[32], row_max[2], row_sum[2];
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
    for (int half = 0; half < 2; ++half) row_max[half] = neg_inf(), row_sum[half] = 0.f;
  }

  __device__ __forceinline__ void wait_for(int tile, int part) {
    mbarrier_wait(block.full(tile & 1, part), tile / 2 & 1);
    if (!Traits::kPaged || tile >= block.paged) fence_async_proxy();
  }

  // Computes s = Q K^T for a tile of this group. Complete on return.
  __device__ __forceinline__ void scores(int tile) {
    const uint64_t q = wgmma_descriptor(block.q, 16, kSwizzleAtomBytes);
    const uint64_t k = wgmma_descriptor(block.stages + kGroup * Traits::kTileBytes, 16, kSwizzleAtomBytes);
    if (kGroup == 1) mbarrier_wait(block.turn(), tile / 2 & 1);
    wait_for(tile, 0);
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 1) {
        wait_for(tile, 1);
        wgmma_fence();
      }
#pragma unroll
      for (int i = 0; i < part_blocks(part); ++i) {
        if (kGroup == 0 && part == 1 && i == part_blocks(1) - 1) wgmma_commit();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const int offset = (part_block(kGroup, part, i) * Traits::kBlockBytes + step * 32) >> 4;
          wgmma_ss<T>(s, q + offset, k + offset, part + i + step > 0);
        }
      }
    }
    wgmma_commit();
    if (kGroup == 0) {
      wgmma_wait<1>();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(block.turn());
    }
    wgmma_wait<0>();
    wgmma_pin(s);
  }

  // Starts O += P V for this group's dimensions. Still running on return.
  __device__ __forceinline__ void start_values(int stage) {
    const uint64_t v = wgmma_descriptor(block.stages + stage * Traits::kTileBytes + kGroup * 4 * Traits::kBlockBytes,
                                        Traits::kBlockBytes, kSwizzleAtomBytes);
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStepsN; ++step) wgmma_rs<T>(o, prob[step], v + (step * 16 * kSwizzleRowBytes >> 4));
    wgmma_commit();
  }

  __device__ __forceinline__ void finish_values(int stage) {
    wgmma_wait<0>();
    wgmma_pin(o);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(block.empty(stage, stage ^ kGroup));
  }

  // Turns s into probabilities in place, relative to the raised maximum, and updates the row sums. Returns the factors
  // to multiply O by.
  __device__ __forceinline__ float2 softmax(int tile) {
    if (logit_scale.cap > 0.f) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = logit_scale.capped(s[i]);
    }
    const int token0 = block.work.begin + tile * Traits::kTileN;
    if (needs_mask(block.work.request, p.sliding_window, token0, Traits::kTileN))
      mask_scores<Traits::kTileN>(p, block.work, (block.m0 + thread / 32 * 16 + lane % 16) / p.h_q, token0, s);
    const float factor = logit_scale.cap > 0.f ? 1.f : logit_scale.in;
    return online_softmax<Traits::kTileN>(s, {factor, factor}, 0.f, kRescaleThreshold, row_max, row_sum);
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int step = 0; step < kStepsN; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) prob[step][i] = pack2<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    }
  }

  // Shared-memory addresses of this thread's part of the mailbox.
  __device__ __forceinline__ uint32_t mailed_prob(int step) const {
    return block.mailbox + offsetof(typename Traits::Mailbox, prob) + (step * 128 + thread) * 16;
  }
  __device__ __forceinline__ uint32_t mailed_maxima() const {
    return block.mailbox + offsetof(typename Traits::Mailbox, maxima) + thread * 8;
  }

  __device__ __forceinline__ void post() {
#pragma unroll
    for (int step = 0; step < kStepsN; ++step)
      store_shared_16(mailed_prob(step), make_uint4(prob[step][0], prob[step][1], prob[step][2], prob[step][3]));
    store_shared_pair(mailed_maxima(), row_max);
    mbarrier_arrive(block.posted(kGroup));
  }

  // Takes the other group's P and maxima. Returns the factors to multiply O by.
  __device__ __forceinline__ float2 receive(uint32_t parity) {
    mbarrier_wait(block.posted(kGroup ^ 1), parity);
#pragma unroll
    for (int step = 0; step < kStepsN; ++step)
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(prob[step][0]), "=r"(prob[step][1]), "=r"(prob[step][2]), "=r"(prob[step][3])
                   : "r"(mailed_prob(step))
                   : "memory");
    return take_maxima(mailed_maxima(), row_max, row_sum);
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
        scores(2 * i);
        const float2 shrink = softmax(2 * i);
        pack();
        post();
        rescale(shrink);
        start_values(0);
        finish_values(0);
        if (i < pairs) {
          rescale(receive(parity));
          wait_for(2 * i + 1, 1);
          start_values(1);
          finish_values(1);
        }
      }
    } else {
      for (int i = 0; i < pairs; ++i) {
        const uint32_t parity = i & 1;
        scores(2 * i + 1);
        wait_for(2 * i, 1);
        rescale(receive(parity));
        start_values(0);
        const float2 shrink = softmax(2 * i + 1);  // overlaps the products
        finish_values(0);
        pack();
        post();
        rescale(shrink);
        start_values(1);
        finish_values(1);
      }
      if (odd) {
        wait_for(2 * pairs, 1);
        rescale(receive(pairs & 1));
        start_values(0);
        finish_values(0);
      }
    }

    add_other_sums(block, block.mailbox, kGroup, thread, row_sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = block.m0 + thread / 32 * 16 + half * 8 + lane / 4;
      RowWriter<T>(p, block.work, blockIdx.y, 0, m, row_max[half], row_sum[half], kGroup == 0 && lane % 4 == 0)
          .template store_all<32>(kGroup * 256 + lane % 4 * 2, o, half * 2);
    }
  }
};

// The consumers load the 64 packed rows of Q, with zeros for rows that do not exist.
template <typename Traits>
__device__ __forceinline__ void mla_sm90_load_q(const TreeVerifyParams& p, const MlaSm90Block& block) {
  using T = typename Traits::Element;
  const Request& request = block.work.request;
#pragma unroll
  for (int i = 0; i < Traits::kTileM / 32; ++i) {
    const int at = i * 32 + threadIdx.x / 8, chunk = threadIdx.x % 8;
    const int m = block.m0 + at, node = m / p.h_q;
    const bool exists = node < request.num_nodes;
    const T* from = static_cast<const T*>(p.q) + chunk * 8;
    if (exists) from += (request.row0 + int64_t(node)) * p.q_stride_t + m % p.h_q * p.q_stride_h;
    const uint32_t to = block.q + swizzled(at, chunk);
#pragma unroll
    for (int d = 0; d < Traits::kBlocks; ++d) cp_async_16(to + d * Traits::kBlockBytes, from + d * 64, exists);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_async_proxy();
  block.meet(0);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    mla_sm90_partial_kernel(const __grid_constant__ TreeVerifyParams p, const __grid_constant__ Pages pages) {
  extern __shared__ __align__(1024) char sm90_smem[];
  using Storage = typename Traits::Storage;
  Storage& storage = *reinterpret_cast<Storage*>(sm90_smem);
  const uint32_t base = smem_address(sm90_smem);
  WorkItem& work = storage.work;
  const int m0 = int(blockIdx.x) * Traits::kTileM;
  if (threadIdx.x < 32) {
    WorkItem found = find_work(p, blockIdx.y, m0, p.h_q);
    drop_unseen_nodes(p, found, m0, Traits::kTileM, p.h_q, Traits::kTileN);
    if (threadIdx.x == 0) work = found;
  }
  MlaSm90Block block{work,
                     m0,
                     0,
                     0,
                     base + uint32_t(offsetof(Storage, q)),
                     base + uint32_t(offsetof(Storage, stages)),
                     base + uint32_t(offsetof(Storage, mailbox)),
                     base + uint32_t(offsetof(Storage, barriers))};
  if (threadIdx.x == 128) {
    if (Traits::kPaged) pages.prefetch();
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < 2; ++part) {
        mbarrier_init(block.full(i, part), 128);
        mbarrier_init(block.empty(i, part), 4);
      }
      mbarrier_init(block.posted(i), 128);
    }
    mbarrier_init(block.turn(), 4);
    mbarrier_init(block.meeting(), 256);
    fence_mbarrier_init();
  }
  __syncthreads();
  allow_dependents();
  if (work.index < 0) return;
  block.tiles = ceil_div(work.end - work.begin, Traits::kTileN);
  block.paged = pages.tiles<Traits>(work) / 2 * 2;

  const int group = threadIdx.x / 128;
  if (group == 2) {
    shrink_registers<Traits::kProducerRegisters>();
    mla_sm90_produce<Traits>(p, block, pages);
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
