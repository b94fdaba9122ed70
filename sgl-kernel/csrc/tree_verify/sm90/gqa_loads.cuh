// How the GQA kernels of sm_90 load K and V into the stages of a block. Tiles are in the 128-byte swizzle: blocks of
// 128 bytes of every row, each [kTileN][128 bytes].
//
// Tiles in the prefix are copied by page, if there are pages: by TMA, from one thread. Producer warps gather the others
// with cp.async. The consumers of a gathered tile issue the proxy fence between those writes and their products. (In a
// thread with copies in flight that fence would wait for all of them, which is one reason for separate producers.)
//
// Each stage has two mbarriers. `full` completes when the tile has landed. `empty` completes when everything that reads
// the stage has finished.
#pragma once

#include "common/cp_async.cuh"
#include "common/mbarrier.cuh"
#include "common/wgmma.cuh"
#include "tree_verify/sm90/pages.cuh"
#include "tree_verify/tree_mask.cuh"

namespace ddtree {

// Shared-memory addresses of a block's stages.
template <typename Traits>
struct KvStages {
  using Storage = typename Traits::Storage;
  uint32_t base;
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + offsetof(Storage, stages) + stage * 2 * Traits::kTileBytes;
  }
  __device__ __forceinline__ uint32_t v(int stage) const { return k(stage) + Traits::kTileBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + offsetof(Storage, full) + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + offsetof(Storage, empty) + stage * 8; }
};

// A barrier of `threads` threads of the block. Id 0 is the barrier of __syncthreads().
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Byte offset of a row's 16-byte chunk in a tile of `rows` rows.
__device__ __forceinline__ uint32_t swizzled_columns(int rows, int row, int chunk) {
  return chunk / 8 * rows * kSwizzleRowBytes + swizzled(row, chunk % 8);
}

// Calls f(slot, offset in the row, offset in the tile) for each 16-byte vector of K or V that this lane of a producer
// warp copies. The warp's tokens start at `token0`; lane i holds the slots of tokens 32 r + i.
template <typename Traits, typename F>
__device__ __forceinline__ void for_each_vector(int token0, const int (&slots)[(Traits::kProducerTokens + 31) / 32],
                                                F f) {
  // kGroup lanes share a token, and each takes every kGroup-th vector.
  constexpr int kVectors = Traits::kRowBytes / 16, kPower = kVectors & -kVectors, kGroup = kPower < 16 ? kPower : 16;
  constexpr int kTokens = Traits::kProducerTokens, kPassTokens = 32 / kGroup;
  const int lane = threadIdx.x & 31, part = lane % kGroup;
#pragma unroll
  for (int r = 0; r < (kTokens + 31) / 32; ++r) {
#pragma unroll Traits::kAhead
    for (int pass = 0; pass < min(32, kTokens) / kPassTokens; ++pass) {
      const int at = pass * kPassTokens + lane / kGroup, token = token0 + r * 32 + at;
      const int slot = __shfl_sync(0xffffffff, slots[r], at);
#pragma unroll
      for (int i = 0; i < kVectors / kGroup; ++i)
        f(slot, (part + i * kGroup) * 16, swizzled_columns(Traits::kTileN, token, part + i * kGroup));
    }
  }
}

// A warp copies the first `tiles` tiles by page, to stages from `at` on. Calls before(j) before tile j.
template <typename Traits, typename F>
__device__ __forceinline__ void copy_pages(const TreeVerifyParams& p, const WorkItem& work, const Pages& pages,
                                           const KvStages<Traits>& stages, int kv_head, int tiles,
                                           RingPosition<Traits::kStages> at, F before) {
  constexpr int kTileN = Traits::kTileN, kRowBlocks = Traits::kTileBytes / (kTileN * kSwizzleRowBytes);
  const int lane = threadIdx.x & 31;
  // Lane i looks up the slot of box i.
  auto load_slot = [&](int tile) { return work_slot(p, work, work.begin + tile * kTileN + lane * kBoxTokens); };
  int next = load_slot(0);
  for (int j = 0; j < tiles; ++j, at.advance()) {
    before(j);
    int slots[kTileN / kBoxTokens];
#pragma unroll
    for (int i = 0; i < kTileN / kBoxTokens; ++i) slots[i] = __shfl_sync(0xffffffff, next, i);
    next = load_slot(j + 1);
    const uint32_t full = stages.full(at.stage);
    mbarrier_wait(stages.empty(at.stage), at.parity ^ 1);
    if (lane == 0) {
      mbarrier_expect(full, 2 * Traits::kTileBytes);
      mbarrier_arrive(full, 32 * Traits::kProducers);
#pragma unroll
      for (int i = 0; i < kTileN / kBoxTokens; ++i) {
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          const uint32_t to = stages.k(at.stage) + (b * kTileN + i * kBoxTokens) * kSwizzleRowBytes;
          copy_box(to, pages.k, b * kSwizzleRowBytes, kv_head, slots[i], full);
          copy_box(to + Traits::kTileBytes, pages.rest, b * kSwizzleRowBytes, kv_head, slots[i], full);
        }
      }
    }
  }
  __syncwarp();
}

// A producer warp copies its tokens of every tile, or waits for the warp that copies pages. `at` is the stage of the
// first tile, and afterwards the one after the last. Calls before(j) before tile j, for j < kStages at least.
template <typename Traits, typename F>
__device__ __forceinline__ void produce(const TreeVerifyParams& p, const WorkItem& work, const Pages& pages,
                                        const KvStages<Traits>& stages, int kv_head, int warp, int tiles,
                                        RingPosition<Traits::kStages>& at, F before) {
  constexpr int kTileN = Traits::kTileN, kTokens = Traits::kProducerTokens, kSlots = (kTokens + 31) / 32;
  constexpr int kElement = Traits::kRowBytes / Traits::kD;
  const int lane = threadIdx.x & 31, token0 = warp * kTokens;
  const char* k = static_cast<const char*>(p.k_cache) + kv_head * p.k_stride_h * kElement;
  const char* v = static_cast<const char*>(p.v_cache) + kv_head * p.v_stride_h * kElement;
  const uint32_t k_stride = p.k_stride_slot * kElement, v_stride = p.v_stride_slot * kElement;
  int slots[kSlots];
  auto load_slots = [&](int tile) {
    const int first = work.begin + tile * kTileN + token0 + lane;
#pragma unroll
    for (int r = 0; r < kSlots; ++r) slots[r] = work_slot(p, work, first + r * 32);
  };
  const int paged = pages.tiles<Traits>(work);
  load_slots(paged);
  if constexpr (Traits::kPaged) {
    if (paged > 0) {
      if (warp == 0) {
        copy_pages<Traits>(p, work, pages, stages, kv_head, paged, at, before);
      } else {
        for (int j = 0; j < min(paged, Traits::kStages); ++j) before(j);
      }
      meet_producers(32 * Traits::kProducers);
      at.skip(paged);
    }
  }
  for (int j = paged; j < tiles; ++j, at.advance()) {
    before(j);
    int now[kSlots];
#pragma unroll
    for (int r = 0; r < kSlots; ++r) now[r] = slots[r];
    load_slots(j + 1);
    mbarrier_wait(stages.empty(at.stage), at.parity ^ 1);
    const uint32_t to_k = stages.k(at.stage), to_v = stages.v(at.stage);
    auto copy_tile = [&](auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      auto copy = [&](uint32_t to, const char* cache, uint32_t stride, int slot, int from) {
        cp_async_16(to, cache + uint64_t(uint32_t(kWhole ? slot : max(slot, 0))) * stride + from, kWhole || slot >= 0);
      };
      if constexpr (Traits::kTogether) {
        for_each_vector<Traits>(token0, now, [&](int slot, int from, uint32_t at_vector) {
          copy(to_k + at_vector, k, k_stride, slot, from);
          copy(to_v + at_vector, v, v_stride, slot, from);
        });
      } else {
        for_each_vector<Traits>(token0, now, [&](int slot, int from, uint32_t at_vector) {
          copy(to_k + at_vector, k, k_stride, slot, from);
        });
        for_each_vector<Traits>(token0, now, [&](int slot, int from, uint32_t at_vector) {
          copy(to_v + at_vector, v, v_stride, slot, from);
        });
      }
    };
    if (work.begin + (j + 1) * kTileN <= work.end) {
      copy_tile(std::true_type());
    } else {
      copy_tile(std::false_type());
    }
    mbarrier_arrive_after_copies(stages.full(at.stage));
  }
}

// A producer warp of a block with one work item.
template <typename Traits>
__device__ __forceinline__ void produce(const TreeVerifyParams& p, const WorkItem& work, const Pages& pages,
                                        const KvStages<Traits>& stages, int kv_head, int warp, int tiles) {
  RingPosition<Traits::kStages> at;
  produce<Traits>(p, work, pages, stages, kv_head, warp, tiles, at, [](int) {});
  cp_async_wait_all();  // no thread may exit with copies in flight
}

}  // namespace ddtree
