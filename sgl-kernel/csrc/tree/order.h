// The canonical order of a tree's nodes, for host and device. No other file restates this rule.
//
// A node precedes another if its score is higher. Ties are broken by lower depth, then by lower index of the parent,
// then by lower rank, which is the index among the position's candidates. Nodes are numbered in this order (after the
// top-1 path, if that is kept), so the parents being compared already have their index. A parent precedes its children,
// because their scores are not higher and they are deeper, and a sibling precedes the next one. Best-first search
// therefore visits the nodes in exactly this order.
#pragma once

#include <cstdint>
#include <cstring>

#include "tree/params.h"

namespace ddtree {

// A node's place in the tree: its depth (1 to D), its parent's index and its rank (0 to K - 1). pack() gives larger
// values to nodes that come earlier.
struct Node {
  int depth, parent, rank;

  DDTREE_HOST_DEVICE uint32_t pack() const {
    return static_cast<uint32_t>(kMaxDepth - depth) << 13 | static_cast<uint32_t>(kMaxNodes - 1 - parent) << 5 |
           static_cast<uint32_t>(kMaxCandidates - 1 - rank);
  }
  static DDTREE_HOST_DEVICE Node unpack(uint32_t bits) {
    return {kMaxDepth - static_cast<int>(bits >> 13), kMaxNodes - 1 - static_cast<int>(bits >> 5 & 0xff),
            kMaxCandidates - 1 - static_cast<int>(bits & 0x1f)};
  }
};
static_assert(kMaxNodes <= 1 << 8 && kMaxCandidates <= 1 << 5,
              "the fields of Node::pack() must hold every index and rank");

constexpr uint64_t kNoKey = 0;  // less than the key of any node

// Maps floats to unsigned integers of the same order.
DDTREE_HOST_DEVICE uint32_t ordered_bits(float value) {
#ifdef __CUDA_ARCH__
  const uint32_t bits = __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
#endif
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DDTREE_HOST_DEVICE float ordered_value(uint32_t ordered) {
  const uint32_t bits = ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered;
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// Larger keys come earlier. A score is never -0, because its sum starts at +0.
DDTREE_HOST_DEVICE uint64_t order_key(float score, Node node) {
  return static_cast<uint64_t>(ordered_bits(score)) << 32 | node.pack();
}

DDTREE_HOST_DEVICE Node node_of(uint64_t key) { return Node::unpack(static_cast<uint32_t>(key)); }
DDTREE_HOST_DEVICE float score_of(uint64_t key) { return ordered_value(static_cast<uint32_t>(key >> 32)); }

// The log-probability that enters a score. Rounding can leave the input slightly above 0, which would order a child
// before its parent. NaN counts as -inf.
DDTREE_HOST_DEVICE float clamped_log_prob(float log_prob) {
  if (log_prob != log_prob) return -__builtin_huge_valf();
  return log_prob < 0.0f ? log_prob : 0.0f;
}

DDTREE_HOST_DEVICE bool is_possible(float score) { return score > -__builtin_huge_valf(); }

}  // namespace ddtree
