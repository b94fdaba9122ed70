// Threads and shared memory of the index-logits kernels. Compiles without CUDA.
#pragma once

#include "common/draft_tree.h"
#include "common/shared_memory.h"
#include "indexer/params.h"

namespace ddtree {

// A block keeps the queries of one request, then their weights.
DDTREE_HOST_DEVICE constexpr int index_fragment_bytes(int rows_x_heads) { return rows_x_heads * kIndexHeadDim * 2; }
DDTREE_HOST_DEVICE constexpr int index_shared_bytes(int rows_x_heads) {
  return index_fragment_bytes(rows_x_heads) + rows_x_heads * static_cast<int>(sizeof(float));
}

constexpr int kMaxIndexSharedBytes = index_shared_bytes(kMaxIndexRows * kMaxIndexHeads);

// The kernel for every architecture: a warp takes a tile of keys at a time.
struct IndexTraits {
  static constexpr int kTileKeys = kIndexTileKeys;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 2;  // per multiprocessor, by registers; sm_120 has room for one with 4 rows of 64 heads
  static_assert(kMaxIndexSharedBytes <= kMaxSharedMemory);
};

// The kernel of sm_90: a warpgroup takes a tile of keys at a time, and every row has room for kMaxIndexHeads heads.
struct IndexSm90Traits {
  static constexpr int kTileKeys = 64;  // the height of wgmma
  static constexpr int kWarpgroups = 4, kThreads = 128 * kWarpgroups;
  static constexpr int kBlocks = 1;
  static_assert(kMaxIndexSharedBytes <= kMaxSharedMemorySm90);
};

}  // namespace ddtree
