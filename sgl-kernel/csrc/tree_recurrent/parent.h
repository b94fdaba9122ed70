// A node's parent from its ancestor words, on the host and on the device.
#pragma once

#include "common/draft_tree.h"

namespace ddtree {

DDTREE_HOST_DEVICE int leading_zeros(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __clzll(static_cast<long long>(bits));
#else
  return __builtin_clzll(bits);
#endif
}

// Nodes come after their parents, so the parent is the highest ancestor bit below the node's own. -1: no ancestor.
DDTREE_HOST_DEVICE int parent_of(const uint64_t* ancestors, int node) {
  int w = node / kAncestorWordBits;
  uint64_t bits = ancestors[w] & (ancestor_bit(node) - 1);
  while (bits == 0 && w > 0) bits = ancestors[--w];
  return bits ? w * kAncestorWordBits + 63 - leading_zeros(bits) : -1;
}

}  // namespace ddtree
