// Parameters of the draft-tree ops, shared by the CUDA kernels and the CPU reference. No torch here: api.cc turns
// tensors into these structs. All tensors are contiguous. N, D, F and K: common/draft_tree.h.
//
// A tree is stored at width N. Node 0 is the root, nodes 1 to size - 1 follow with parents before children, and the
// rest is padding.
#pragma once

#include <cstdint>

#include "common/draft_tree.h"

namespace ddtree {

// Builds the best tree of each request. Let q be the drafter's distribution of a token, given the path above it. A node
// at depth d stands for the tokens on its path, and its score is the sum of their log q (float32, summed from the root
// down). A tree takes the first N - 1 nodes in the canonical order (order.h), in which a parent always precedes its
// children. Candidates of probability 0 (log -inf, or NaN) never become nodes, so a tree can be smaller than N.
//
// What q depends on is the shape of log_probs:
//   W = 0            on the depth alone (marginals)
//   W > 0, no beam   also on the previous token (pairs): W = K, and row w follows candidate w of the depth above
//   W > 0, a beam    on the whole path: row w of a position belongs to the one path that beam[w] names
// The root has row 0. A node without a row has no children.
struct BuildParams {
  const int64_t* candidates;  // [bs, D, K] tokens, distinct at each position
  const float* log_probs;     // [bs, D, K] log q, or logits if log_sum is given; non-increasing at each position
                              // or [bs, D, W, K] log q after the path of row w
  const float* log_sum;       // [bs, D] logsumexp of the logits, or nullptr; only if W = 0
  // [bs, D, W] or nullptr. For row w of position d: the last node of its path, as row * K + candidate of position
  // d - 1, or -1 for no path. Position 0 is not read.
  const int32_t* beam;
  const int64_t* bonus;  // [bs] tokens of the roots

  int64_t* tokens;        // [bs, N] padding: the root's token, which is a valid vocabulary id
  int32_t* parents;       // [bs, N] node index of the parent; root and padding: -1
  int32_t* depths;        // [bs, N] root and padding: 0
  uint64_t* ancestors;    // [bs, N, words] ancestor words; padding: only its own bit
  int32_t* first_child;   // [bs, N] node index, or -1; siblings are linked best first
  int32_t* next_sibling;  // [bs, N] node index, or -1
  int32_t* sizes;         // [bs] nodes of each tree: 1 to N
  float* scores;          // [bs, N] score of each node; root: 0, padding: -inf. Or nullptr

  int32_t bs, max_depth /* D */, num_paths /* W */, num_candidates /* K */, num_nodes /* N */, words;
  // Nodes 1, 2, ... are then the top-1 path: the best child at every depth. The remaining nodes are the best of the
  // others. Tokens accepted along the top-1 path are already in their final slots.
  bool keep_top1_path;
};

// Walks each tree from the root. Each visited node emits the target's token at that node. If a child holds that token,
// the walk accepts the child and continues there; if two children hold it, the lower index wins.
struct AcceptParams {
  const int64_t* tokens;   // [bs, N]
  const int32_t* parents;  // [bs, N]
  const int64_t* target;   // [bs, N] the target's token at each node: its argmax or one sample

  int64_t* path;     // [bs, F] visited nodes: the root, then the accepted nodes; past the length: 0
  int64_t* output;   // [bs, F] emitted tokens, target[path]; past the length: 0
  int32_t* lengths;  // [bs] accept length: visited nodes, which is also the tokens emitted and KV rows to commit
  int64_t* bonus;    // [bs] the last emitted token: the root of the next tree

  int32_t bs, num_nodes /* N */, block_size /* F: the walk stops after F nodes */;
};

// One buffer of the KV pool: K or V of a layer, or MLA's latent rows. The Python API (KVBuffers) stores it as three
// int64.
struct KVBuffer {
  char* base;
  int64_t row_bytes;   // bytes of one slot's row
  int64_t row_stride;  // bytes from one slot's row to the next
};

// For each request r and i < lengths[r], slot slots[r, i] of every KV buffer takes the row of slot
// slots[r, path[r, i]]. For all i < F, row i of hidden_out takes the hidden row of node path[r, i].
//
// path[r] increases up to its length, so path[r, i] >= i. A move in place is skipped, and moves in ascending i never
// read a row that an earlier move wrote. Slots of different requests are distinct.
struct CommitParams {
  const int64_t* path;      // [bs, F]
  const int32_t* lengths;   // [bs] 0 to F
  const int64_t* slots;     // [bs, N]
  const KVBuffer* buffers;  // [num_buffers], on the device of the op
  const char* hidden;       // [bs, N, hidden_bytes] or nullptr
  char* hidden_out;         // [bs, F, hidden_bytes]

  int64_t max_row_bytes;  // largest row_bytes of any buffer
  int64_t hidden_bytes;
  int32_t bs, num_nodes /* N */, block_size /* F */, num_buffers;
};

}  // namespace ddtree
