// Host-side plan of a tree-verify launch: tile height, split count and workspace. Depends on static shape facts and
// the card only, never on lengths, so that what is decided at capture holds for every replay. No CUDA, no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace ddtree {

constexpr int kMlaTileM = 64;
constexpr int kMaxSplits = 256;
constexpr int kMaxWorkItems = 8192;  // b * num_splits; the combine kernel keeps one weight each in shared memory

// Rows of the M dimension that one KV head serves: heads that share it x tree rows.
inline int packed_rows(int max_rows, int h_q, int h_kv) { return max_rows * (h_q / h_kv); }

// Height of the tensor-core tile. 128 rows need 2 m16 fragments a warp, which fit the registers up to head size 128.
inline int gqa_tile_m(int packed, int d_qk) {
  if (packed <= 16) return 16;
  return packed <= 64 || d_qk > 128 ? 64 : 128;
}

// Splits a request (on average), for `tiles` = b x KV heads x M tiles. Blocks that share a multiprocessor share its
// bandwidth and tensor cores, so what counts is that all multiprocessors get the same number of blocks, and enough of
// them (up to `blocks`, those that fit) to cover each other's latency. One wave where it can be had: more splits mean
// more partial results. The kernels deal b * num_splits work items out by device lengths, so a long request may get
// more and a short one fewer.
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

// Partial O [b * num_splits, max_rows, h_q, d_v] fp32, then partial LSE [b * num_splits, max_rows, h_q] fp32 (base 2).
// One split writes the output directly and needs none.
inline int64_t workspace_bytes(const TreeVerifyParams& p) {
  if (p.num_splits <= 1) return 0;
  return int64_t(p.b) * p.num_splits * p.max_rows * p.h_q * (p.d_v + 1) * int64_t(sizeof(float));
}

}  // namespace ddtree
