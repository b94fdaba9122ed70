// The canonical order of a tree's nodes, on the host and on the device: the one place for the rule.
//
// A node comes before another if its score is higher; at equal scores, if its depth is lower; then, if its parent's row
// is lower; then, if its rank among its parent's candidates is lower. Rows are numbered in that order (after the spine,
// if one is kept), so parents are compared by rows already given. A parent comes before its children (their scores are
// not above its own, and they are deeper) and a sibling before the next, so best first search meets the nodes in
// exactly this order.
#pragma once

#include <cstdint>
#include <cstring>

#include "tree/params.h"

#ifdef __CUDACC__
#define DDTREE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DDTREE_HOST_DEVICE inline
#endif

namespace ddtree {

// A node's place: its depth (1 to L), its parent's row and its rank (0 to K - 1). The first in order is the largest.
struct Node {
  int depth, parent, rank;

  DDTREE_HOST_DEVICE uint32_t pack() const {
    return static_cast<uint32_t>(kMaxDepth - depth) << 13 | static_cast<uint32_t>(kMaxRows - 1 - parent) << 5 |
           static_cast<uint32_t>(kMaxCandidates - 1 - rank);
  }
  static DDTREE_HOST_DEVICE Node unpack(uint32_t bits) {
    return {kMaxDepth - static_cast<int>(bits >> 13), kMaxRows - 1 - static_cast<int>(bits >> 5 & 0xff),
            kMaxCandidates - 1 - static_cast<int>(bits & 0x1f)};
  }
};
static_assert(kMaxRows <= 1 << 8 && kMaxCandidates <= 1 << 5, "the fields of Node::pack()");

constexpr uint64_t kNoKey = 0;  // below the key of every node

// Unsigned integers in the order of floats.
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

// Larger means earlier. Scores are never -0: a sum that starts at +0 is not.
DDTREE_HOST_DEVICE uint64_t order_key(float score, Node node) {
  return static_cast<uint64_t>(ordered_bits(score)) << 32 | node.pack();
}

// The log-probability that scores are summed from. Rounding can leave it a little above 0, which would put a child
// before its parent; NaN counts as -inf.
DDTREE_HOST_DEVICE float clamped_log_prob(float log_prob) {
  if (log_prob != log_prob) return -__builtin_huge_valf();
  return log_prob < 0.0f ? log_prob : 0.0f;
}

DDTREE_HOST_DEVICE bool is_possible(float score) { return score > -__builtin_huge_valf(); }

}  // namespace ddtree
