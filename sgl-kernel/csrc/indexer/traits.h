// Threads and shared memory of the index-logits kernels. Compiles without CUDA.
#pragma once

#include "common/draft_tree.h"
#include "common/shared_memory.h"
#include "indexer/params.h"

namespace ddtree {

// The kernel for every architecture: a warp takes a tile of keys at a time. A block keeps the queries of one request,
// then their weights.
struct IndexTraits {
  static constexpr int kTileKeys = kIndexTileKeys;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 2;  // per multiprocessor; sm_120 has shared memory for one with 4 rows of 64 heads

  static constexpr int kQueryBytes = kIndexHeadDim * 2;                                 // of one head
  static constexpr int kSharedPerHead = kQueryBytes + static_cast<int>(sizeof(float));  // and row
  static constexpr int kMaxSharedBytes = kMaxIndexRows * kMaxIndexHeads * kSharedPerHead;
  static_assert(kMaxSharedBytes <= kMaxSharedMemory);
};

// The kernel of sm_90: a warpgroup takes a tile of keys at a time, a quarter for each warp. A block keeps the queries
// of one request with room for kMaxIndexHeads heads per row, a ring of keys per warp, then weights, lengths and
// barriers.
struct IndexSm90Traits {
  static constexpr int kTileKeys = 64;  // the height of wgmma
  static constexpr int kWarpgroups = 3, kWarps = 4 * kWarpgroups, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 1;  // per multiprocessor, by registers

  static constexpr int kRowBytes = kMaxIndexHeads * kIndexHeadDim * 2;  // of a row's queries
  static constexpr int kWarpKeys = kTileKeys / 4, kStageBytes = kWarpKeys * kIndexHeadDim * 2;
  static constexpr int kMaxStages = 4;
  DDTREE_HOST_DEVICE static constexpr int stages(int rows) { return rows <= 2 ? 4 : 3; }  // more do not fit
  static constexpr int kSmallBytes =
      kMaxIndexRows * static_cast<int>(kMaxIndexHeads * sizeof(float) + sizeof(int32_t)) +
      kWarps * kMaxStages * static_cast<int>(sizeof(uint64_t));
  static constexpr int kMaxSharedBytes = 2 * kRowBytes + kWarps * 4 * kStageBytes + kSmallBytes;
  static_assert(4 * kRowBytes + kWarps * 3 * kStageBytes + kSmallBytes <= kMaxSharedBytes);
  static_assert(kMaxSharedBytes <= kMaxSharedMemorySm90);
};

}  // namespace ddtree
