// The limits of a draft tree and the layout of its ancestor words. Kernels, CPU references and argument checks all take
// them from here. Python reads the limits through the op ddtree_limits.
//
//   N      num_nodes       nodes of a tree, root included; node 0 is the root, the bonus token of the previous step
//   D      max_depth       depth of the deepest node; the root has depth 0
//   F      block_size      D + 1: nodes on the longest path, which is also the most tokens that one step emits
//   K      num_candidates  candidates per draft position; position d - 1 of the draft holds the nodes of depth d
//   W      num_paths       paths per draft position, if the candidates are scored after each of several paths
//   words                  ancestor_words(N)
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DDTREE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DDTREE_HOST_DEVICE inline
#endif

namespace ddtree {

constexpr int kMaxNodes = 256;
constexpr int kMaxDepth = 32;
constexpr int kMaxCandidates = 32;
constexpr int kMaxPaths = 32;

// Bit j % 64 of word j / 64 of a node's words is set if node j is an ancestor of the node, or the node itself.
constexpr int kAncestorWordBits = 64;
constexpr int kMaxAncestorWords = kMaxNodes / kAncestorWordBits;

DDTREE_HOST_DEVICE constexpr int ancestor_words(int num_nodes) {
  return (num_nodes + kAncestorWordBits - 1) / kAncestorWordBits;
}

DDTREE_HOST_DEVICE constexpr uint64_t ancestor_bit(int node) { return uint64_t{1} << (node % kAncestorWordBits); }

DDTREE_HOST_DEVICE bool has_ancestor(const uint64_t* ancestors, int node) {
  return ancestors[node / kAncestorWordBits] >> (node % kAncestorWordBits) & 1;
}

// Depth of the node that these words belong to. A node is in its own words, so its depth is one less than the bits set.
DDTREE_HOST_DEVICE int node_depth(const uint64_t* ancestors, int words) {
  int bits = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 1  // the attention kernels have no registers to spare
  for (int w = 0; w < words; ++w) bits += __popcll(ancestors[w]);
#else
  for (int w = 0; w < words; ++w) bits += __builtin_popcountll(ancestors[w]);
#endif
  return bits - 1;
}

}  // namespace ddtree
