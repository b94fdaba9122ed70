// Distributes the KV of a ragged batch over a fixed grid of bs * num_splits work items. Each item is one contiguous
// chunk of one request's tokens. The chunk length is the smallest multiple of kChunkGranule (for MLA at least
// kMinGranulesMla of them) for which all chunks of all requests fit the grid, so a long request gets more items than a
// short one. Every warp computes the length itself from the lengths on the device. This needs no planning kernel and no
// length on the host. The partial and combine kernels call the same functions, so they agree.
#pragma once

#include "common/softmax.cuh"
#include "tree_verify/params.h"
#include "tree_verify/work_item.h"

namespace ddtree {

constexpr int kChunkGranule = 64;  // a multiple of every KV tile
// MLA's partial results are large, so its shortest chunk is longer. At 4096 tokens, 33 chunks of 128 tokens beat 65 of
// 64.
constexpr unsigned kMinGranulesMla = 2;

__device__ __forceinline__ Request load_request(const TreeVerifyParams& p, int r) {
  Request q;
  q.row0 = p.qo_indptr[r];
  q.num_nodes = p.qo_indptr[r + 1] - q.row0;
  q.prefix = p.prefix_lens[r];
  q.kv_start = p.kv_indptr[r];
  q.kv_begin = p.sliding_window < 0 ? 0 : max(0, q.prefix - p.sliding_window);
  return q;
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The request that a lane holds among the first 32 of the batch. Loaded once, because all later work waits for these
// loads.
__device__ __forceinline__ Request load_lane_request(const TreeVerifyParams& p) {
  const int lane = threadIdx.x & 31;
  return lane < p.bs ? load_request(p, lane) : Request{};
}

// The request that lane `source` holds.
__device__ __forceinline__ Request broadcast(const Request& mine, int source) {
  Request q;
  q.row0 = __shfl_sync(0xffffffff, mine.row0, source);
  q.num_nodes = __shfl_sync(0xffffffff, mine.num_nodes, source);
  q.prefix = __shfl_sync(0xffffffff, mine.prefix, source);
  q.kv_begin = __shfl_sync(0xffffffff, mine.kv_begin, source);
  q.kv_start = __shfl_sync(0xffffffff, mine.kv_start, source);
  return q;
}

// Tokens per chunk. Warp-collective, with the same result in every lane. `mine` is load_lane_request().
__device__ inline int chunk_tokens(const TreeVerifyParams& p, const Request& mine) {
  if (p.num_splits == 1) return 1 << 30;
  const int lane = threadIdx.x & 31, items = p.bs * p.num_splits;
  unsigned total = mine.tokens(), longest = total;
  for (int r = lane + 32; r < p.bs; r += 32) {
    const unsigned n = load_request(p, r).tokens();
    total += n, longest = max(longest, n);
  }
  total = __reduce_add_sync(0xffffffff, total);
  longest = __reduce_max_sync(0xffffffff, longest);
  const unsigned per_unit = unsigned(items) * kChunkGranule;
  unsigned lo = max(p.d_qk == kMlaQkDim ? kMinGranulesMla : 1u, (total + per_unit - 1) / per_unit);
  unsigned hi = max(lo, (longest + kChunkGranule - 1) / kChunkGranule);
  for (unsigned probe = lo; lo < hi; probe = (lo + hi) / 2) {  // requests of equal length fit at the first probe
    unsigned chunks = ceil_div(mine.tokens(), probe * kChunkGranule);
    for (int r = lane + 32; r < p.bs; r += 32) chunks += ceil_div(load_request(p, r).tokens(), probe * kChunkGranule);
    if (__reduce_add_sync(0xffffffff, chunks) <= unsigned(items)) {
      hi = probe;
    } else {
      lo = probe + 1;
    }
  }
  return lo * kChunkGranule;
}

// The chunk of work item `item`. Warp-collective.
__device__ inline WorkItem find_work(const TreeVerifyParams& p, int item) {
  const int lane = threadIdx.x & 31;
  Request q = load_lane_request(p);
  const int chunk = chunk_tokens(p, q);
  int first = 0;  // work items before this group of 32 requests
  for (int base = 0; base < p.bs; base += 32) {
    if (base > 0) q = base + lane < p.bs ? load_request(p, base + lane) : Request{};
    const int mine = ceil_div(q.tokens(), chunk);
    int until = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int up = __shfl_up_sync(0xffffffff, until, step);
      if (lane >= step) until += up;
    }
    const unsigned owner = __ballot_sync(0xffffffff, item < first + until);
    if (owner) {
      const int source = __ffs(owner) - 1;
      WorkItem w;
      w.index = base + source;
      w.num_chunks = __shfl_sync(0xffffffff, mine, source);
      const int start = first + __shfl_sync(0xffffffff, until, source) - w.num_chunks;
      w.request = broadcast(q, source);
      w.begin = w.request.kv_begin + (item - start) * chunk;
      w.end = min(w.begin + min(chunk, 1 << 30), w.request.prefix + w.request.num_nodes);
      return w;
    }
    first += __shfl_sync(0xffffffff, until, 31);
  }
  WorkItem none{};
  none.index = -1;
  return none;
}

// Work item `item` for a block of packed rows that starts at m0, where `heads` rows share a node. `index` is -1 if
// there are no such rows. The item keeps tokens of later nodes, because nodes of a draft block see them.
// Warp-collective.
__device__ inline WorkItem find_work(const TreeVerifyParams& p, int item, int m0, int heads) {
  WorkItem work = find_work(p, item);
  if (m0 >= work.request.num_nodes * heads) work.index = -1;
  return work;
}

// Without splits: the work item of the request with the `rank`-th most tokens, of up to 32. Warp-collective.
__device__ inline WorkItem find_longest(const TreeVerifyParams& p, int rank) {
  const int lane = threadIdx.x & 31;
  const Request mine = load_lane_request(p);
  const int tokens = mine.tokens();
  int longer = 0;
  for (int other = 0; other < p.bs; ++other) {
    const int n = __shfl_sync(0xffffffff, tokens, other);
    longer += n > tokens || (n == tokens && other < lane);
  }
  WorkItem w{};
  w.index = __ffs(__ballot_sync(0xffffffff, lane < p.bs && longer == rank)) - 1;
  w.request = broadcast(mine, max(w.index, 0));
  w.num_chunks = 1;
  w.begin = w.request.kv_begin, w.end = w.request.prefix + w.request.num_nodes;
  if (w.request.num_nodes == 0) w.index = -1;
  return w;
}

struct RowChunks {
  int request;     // -1: no request owns the row
  int node;        // index within the request
  int first_item;  // work items [first_item, first_item + num_chunks) hold its partials
  int num_chunks;
};

// Locates the partial results of row `t` of q. Warp-collective.
__device__ inline RowChunks find_row_chunks(const TreeVerifyParams& p, int t) {
  const int lane = threadIdx.x & 31;
  Request q = load_lane_request(p);
  const int chunk = chunk_tokens(p, q);
  int first = 0;
  for (int base = 0; base < p.bs; base += 32) {
    if (base > 0) q = base + lane < p.bs ? load_request(p, base + lane) : Request{};
    const int mine = ceil_div(q.tokens(), chunk);
    const unsigned owner = __ballot_sync(0xffffffff, t >= q.row0 && t < q.row0 + q.num_nodes);
    const int source = owner ? __ffs(owner) - 1 : 32;
    const int before = __reduce_add_sync(0xffffffff, unsigned(lane < source ? mine : 0));
    if (owner)
      return {base + source, t - __shfl_sync(0xffffffff, q.row0, source), first + before,
              __shfl_sync(0xffffffff, mine, source)};
    first += before;
  }
  return {-1, 0, 0, 0};
}

}  // namespace ddtree
