// Host-side plan of a tree-verify launch: tile height, split count and workspace. It depends only on the static shape
// and the card, never on lengths, so a plan made at capture is valid for every replay. No CUDA and no torch here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tree_verify/params.h"

namespace ddtree {

constexpr int kMlaTileM = 64;
constexpr int kMaxSplits = 256;
constexpr int kMaxWorkItems = 8192;  // bs * num_splits; combine keeps one weight per work item in shared memory

// Size of the M dimension for one KV head: the query heads that share it times the nodes.
inline int packed_rows(int num_nodes, int h_q, int h_kv) { return num_nodes * (h_q / h_kv); }

// Height of the tensor-core tile. 128 rows need two m16 fragments per warp, which fit in registers up to head size 128.
inline int gqa_tile_m(int packed, int d_qk) {
  if (packed <= 16) return 16;
  return packed <= 64 || d_qk > 128 ? 64 : 128;
}

// Average splits per request for `tiles` = bs x KV heads x M tiles. Blocks that share a multiprocessor share its
// bandwidth and tensor cores. The best plan gives every multiprocessor the same number of blocks, and enough of them
// (up to `blocks`, the number that fits) to hide each other's latency. It uses one wave if possible, because more
// splits mean more partial results. The kernels distribute the bs * num_splits work items by device lengths, so a long
// request may get more of them than a short one.
inline int choose_num_splits(int64_t tiles, int multiprocessors, int blocks) {
  if (tiles <= 0 || multiprocessors <= 0 || blocks <= 0) return 1;
  const int64_t resident = int64_t(multiprocessors) * blocks;
  const int limit = int(std::clamp<int64_t>(resident / tiles, tiles > resident ? 4 : 1, kMaxSplits));
  auto score = [&](int splits) {
    const int64_t launched = tiles * splits, each = (launched + multiprocessors - 1) / multiprocessors;
    return double(launched) / double(multiprocessors * each) * double(std::min<int64_t>(each, blocks) + 1);
  };
  double best = 0;
  for (int s = 1; s <= limit; ++s) best = std::max(best, score(s));
  for (int s = 1; s < limit; ++s)
    if (score(s) >= 0.95 * best) return s;
  return limit;
}

// Partial O [bs * num_splits, N, h_q, d_v] fp32, then partial LSE [bs * num_splits, N, h_q] fp32 (base 2). A single
// split writes the output directly and needs no workspace.
inline int64_t workspace_bytes(const TreeVerifyParams& p) {
  if (p.num_splits <= 1) return 0;
  return int64_t(p.bs) * p.num_splits * p.num_nodes * p.h_q * (p.d_v + 1) * int64_t(sizeof(float));
}

}  // namespace ddtree
