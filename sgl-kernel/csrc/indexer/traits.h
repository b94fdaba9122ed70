// Threads and shared memory of the index-logits kernel. Compiles without CUDA.
#pragma once

#include "common/draft_tree.h"
#include "common/shared_memory.h"
#include "indexer/params.h"

namespace ddtree {

constexpr int kIndexWarps = 8, kIndexThreads = 32 * kIndexWarps;
constexpr int kIndexBlocks = 2;  // per multiprocessor, by registers; sm_120 has room for one with 4 rows of 64 heads

// A block keeps the queries of one request, then their weights.
DDTREE_HOST_DEVICE constexpr int index_fragment_bytes(int rows_x_heads) { return rows_x_heads * kIndexHeadDim * 2; }
DDTREE_HOST_DEVICE constexpr int index_shared_bytes(int rows_x_heads) {
  return index_fragment_bytes(rows_x_heads) + rows_x_heads * static_cast<int>(sizeof(float));
}

constexpr int kMaxIndexSharedBytes = index_shared_bytes(kMaxIndexRows * kMaxIndexHeads);
static_assert(kMaxIndexSharedBytes <= kMaxSharedMemory);

}  // namespace ddtree
