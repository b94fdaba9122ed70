// Which of 32 consecutive tokens a node attends to. Only tiles that touch the tree, the end or the edge of the sliding
// window need this mask.
#pragma once

#include "tree_verify/tile_scheduler.cuh"

namespace ddtree {

struct TokenRange {
  int begin, end;
  __device__ __forceinline__ bool contains(int first, int width) const {
    return first >= begin && first + width <= end;
  }
};

// The tokens that every node of the request attends to. Among them no mask is needed.
__device__ __forceinline__ TokenRange shared_tokens(const Request& q, int window) {
  return {window < 0 ? 0 : q.prefix + q.num_nodes - 1 - window, q.prefix};
}

// Those of a chunk, which may end within a tile while its request continues.
__device__ __forceinline__ TokenRange shared_tokens(const TreeVerifyParams& p, const WorkItem& work) {
  TokenRange range = shared_tokens(work.request, p.sliding_window);
  range.end = min(range.end, work.end);
  return range;
}

// Whether tokens [begin, begin + width) of the request need tree_mask().
__device__ __forceinline__ bool needs_mask(const Request& q, int window, int begin, int width) {
  return !shared_tokens(q, window).contains(begin, width);
}

// Bit j is set if the request's node `node` attends to token begin + j. Nodes past the end attend to nothing.
__device__ inline uint32_t tree_mask(const TreeVerifyParams& p, const Request& q, int node, int begin) {
  if (node >= q.num_nodes) return 0;
  const uint64_t* ancestors = p.ancestors + int64_t(q.row0 + node) * p.words;
  const int words = ancestor_words(q.num_nodes);
  const int first = begin - q.prefix;    // node index at bit 0, negative in the prefix
  const int left = q.num_nodes - first;  // tokens up to the end
  const int in_prefix = min(max(-first, 0), 32);
  uint32_t mask = in_prefix == 32 ? 0xffffffffu : (1u << in_prefix) - 1;
  if (in_prefix < 32 && left > 0) {
    if (first < 0) {
      mask |= uint32_t(ancestors[0]) << in_prefix;
    } else {
      const int w = first / kAncestorWordBits, shift = first % kAncestorWordBits;
      uint64_t bits = ancestors[w] >> shift;
      if (shift > kAncestorWordBits - 32 && w + 1 < words) bits |= ancestors[w + 1] << (kAncestorWordBits - shift);
      mask = uint32_t(bits);
    }
  }
  if (left < 32) mask &= left > 0 ? (1u << left) - 1 : 0u;
  if (p.sliding_window < 0) return mask;

  const int depth = node_depth(ancestors, words);
  const int outside = min(q.prefix + depth - p.sliding_window - begin, in_prefix);  // prefix tokens before the window
  if (outside > 0) mask &= outside == 32 ? 0u : ~((1u << outside) - 1);
  if (depth > p.sliding_window && in_prefix < 32) {
#pragma unroll 1
    for (uint32_t rest = mask >> in_prefix << in_prefix; rest; rest &= rest - 1) {
      const int j = __ffs(rest) - 1;
      const uint64_t* key = p.ancestors + int64_t(q.row0 + first + j) * p.words;
      if (node_depth(key, words) < depth - p.sliding_window) mask &= ~(1u << j);
    }
  }
  return mask;
}

// Shortens a work item of packed rows [m0, m0 + rows) by the last tokens that none of its nodes sees, if that may save
// a tile. A tree's node sees no later one, but a draft block's node does, so this reads the ancestors. At least one
// token is left. `heads` rows share a node. Warp-collective.
__device__ inline void drop_unseen_nodes(const TreeVerifyParams& p, WorkItem& work, int m0, int rows, int heads,
                                         int tile_n) {
  const Request& q = work.request;
  const int first = m0 / heads, last = min((m0 + rows - 1) / heads, q.num_nodes - 1);
  const int fewest = max(q.prefix + last + 1 - work.begin, 1);
  if (work.index < 0 || ceil_div(fewest, tile_n) >= ceil_div(work.end - work.begin, tile_n)) return;
  int seen = last;
  for (int node = first + int(threadIdx.x & 31); node <= last; node += 32) {
    const uint64_t* ancestors = p.ancestors + int64_t(q.row0 + node) * p.words;
    for (int w = 0; w < ancestor_words(q.num_nodes); ++w) {
      if (ancestors[w] != 0) seen = max(seen, w * kAncestorWordBits + 63 - __clzll(ancestors[w]));
    }
  }
  seen = __reduce_max_sync(0xffffffff, seen);
  work.end = max(work.begin + 1, min(work.end, q.prefix + seen + 1));
}

// Pool slot of a token. Of an int64 index only the low word is read, because a pool has fewer than 2^31 slots.
__device__ __forceinline__ int token_slot(const TreeVerifyParams& p, const Request& q, int64_t kv_start, int token) {
  if (token < q.prefix) {
    const int64_t i = kv_start + token;
    return static_cast<const int32_t*>(p.kv_indices)[p.kv_indices_is_64 ? 2 * i : i];
  }
  const int64_t i = int64_t(q.row0) + token - q.prefix;
  return static_cast<const int32_t*>(p.tree_slots)[p.tree_slots_is_64 ? 2 * i : i];
}

// Pool slot of a token of a work item, or -1 past its end.
__device__ __forceinline__ int work_slot(const TreeVerifyParams& p, const WorkItem& work, int token) {
  return token < work.end ? token_slot(p, work.request, work.request.kv_start, token) : -1;
}

}  // namespace ddtree
