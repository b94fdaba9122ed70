// Host-side plan of a tree-verify launch: tile height, split count and workspace. Depends on static shape facts and
// the card's size only, never on lengths, so that what is decided at capture holds for every replay. No CUDA, no torch.
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

// Splits a request (on average) so that b x KV heads x M tiles x splits fills the card in whole waves. The kernels deal
// b * num_splits work items out by device lengths, so a long request may get more and a short one fewer.
inline int choose_num_splits(int b, int max_rows, int h_q, int h_kv, int d_qk, int d_v, int sm_count) {
  const bool mla = d_qk == kMlaQkDim && d_v == kMlaVDim;
  const int packed = packed_rows(max_rows, h_q, h_kv);
  const int tile_m = mla ? kMlaTileM : gqa_tile_m(packed, d_qk);
  const int64_t tiles = int64_t(b) * h_kv * ((packed + tile_m - 1) / tile_m);
  const int64_t resident = int64_t(sm_count) * (mla ? 1 : tile_m == 128 ? 2 : 3);  // blocks that share a multiprocessor
  if (tiles <= 0) return 1;
  const int limit = int(std::clamp<int64_t>(4 * resident / tiles, 1, kMaxSplits));
  auto efficiency = [&](int splits) {
    const int64_t ctas = tiles * splits, waves = (ctas + resident - 1) / resident;
    return double(ctas) / double(waves * resident);
  };
  const int one_wave = int(std::clamp<int64_t>(resident / tiles, 1, kMaxSplits));
  double best = 0;
  for (int s = one_wave; s <= limit; ++s) best = std::max(best, efficiency(s));
  for (int s = one_wave; s <= limit; ++s)
    if (efficiency(s) >= 0.9 * best) return s;
  return 1;
}

// Partial O [b * num_splits, max_rows, h_q, d_v] fp32, then partial LSE [b * num_splits, max_rows, h_q] fp32 (base 2).
// One split writes the output directly and needs none.
inline int64_t workspace_bytes(const TreeVerifyParams& p) {
  if (p.num_splits <= 1) return 0;
  return int64_t(p.b) * p.num_splits * p.max_rows * p.h_q * (p.d_v + 1) * int64_t(sizeof(float));
}

}  // namespace ddtree
