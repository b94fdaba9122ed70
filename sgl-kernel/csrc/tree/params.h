// Parameters of the draft-tree ops, shared by the CUDA kernels and the CPU reference.
// No torch here or below: api.cc turns tensors into these structs.
//
// A tree has N rows: row 0 is the root, the bonus token of the step before; rows 1 to num_rows - 1 are its nodes,
// parents before children; the rest is padding. All tensors are contiguous.
#pragma once

#include <cstdint>

namespace ddtree {

constexpr int kMaxRows = 256;       // N, the limit of the verify kernels; the budget of nodes B is N - 1
constexpr int kMaxDepth = 32;       // L, draft positions
constexpr int kMaxCandidates = 32;  // K, of a position
constexpr int kWordBits = 64;       // of a word of ancestors

// The best trees of a batch. With q_l the drafter's distribution at position l, a node at depth d stands for the tokens
// of its path and has the score log q_1 + ... + log q_d (float32, summed from the root down). A tree is the budget's
// number of prefixes that come first in the canonical order (order.h); they are closed under taking parents. Candidates
// of probability 0 (log -inf, or NaN) are never nodes, so a tree can have fewer.
struct BuildParams {
  const int64_t* candidates;   // [b, L, K] tokens, distinct and best first at each position
  const float* log_probs;      // [b, L, K] log q, or logits where log_sum is given; non-increasing at each position
  const float* log_sum;        // [b, L] logsumexp of the logits, or nullptr
  const int64_t* bonus;        // [b] tokens of the roots
  const int32_t* budget;       // [b] most nodes of each tree, read on the device; nullptr: N - 1
  const int64_t* prefix_lens;  // [b] positions of the roots; nullptr: none are wanted

  int64_t* tokens;        // [b, N] padding: the root's, a valid vocabulary id
  int32_t* parents;       // [b, N] row of the parent; root and padding: -1
  int32_t* depths;        // [b, N] root and padding: 0
  uint64_t* ancestors;    // [b, N, words] bit j: row j is an ancestor of the row or the row itself; padding: itself
  int32_t* first_child;   // [b, N] row, or -1. Siblings are linked best first
  int32_t* next_sibling;  // [b, N] row, or -1
  int32_t* num_rows;      // [b] 1 to N
  int64_t* positions;     // [b, N] prefix_lens + depths, or nullptr

  int32_t b, depth /* L */, candidates_per_position /* K */, rows /* N */, words;
  // The first candidates of all depths (as many as the budget has nodes) are rows 1, 2, ...; the other nodes are the
  // first of the rest. A path accepted along this spine lies in its final slots already.
  bool keep_spine;
};

// The walk from the root: at each row the target's token there is emitted; while a child of the row holds that token,
// it is accepted (the lowest row, were there two) and the walk goes on from it.
struct AcceptParams {
  const int64_t* tokens;   // [b, N]
  const int32_t* parents;  // [b, N]
  const int64_t* target;   // [b, N] the target's token at each row: argmax or one sample

  int64_t* path;     // [b, D] rows walked: the root, then the accepted nodes; past the length: 0
  int64_t* output;   // [b, D] tokens emitted, target[path]; past the length: 0
  int32_t* lengths;  // [b] accepted nodes + 1: rows walked, tokens emitted, KV rows to commit. Upstream's accept_lens
  int64_t* bonus;    // [b] the last token emitted: the next root

  int32_t b, rows /* N */, max_length /* D: the walk stops after D rows */;
};

// One buffer of the KV pool: K or V of a layer, or MLA's latent rows. As three int64 in KVBuffers of the Python API.
struct KVBuffer {
  char* base;
  int64_t row_bytes;   // of one slot
  int64_t row_stride;  // bytes from a slot to the next
};

// For each request r and i < lengths[r]: slot slots[r, i] of every KV buffer takes the row of slot
// slots[r, path[r, i]]; and row i of hidden_out takes row path[r, i] of the request's hidden rows, for all i < D.
//
// path[r] increases up to the length, so path[r, i] >= i: a move in place is skipped, and taking the moves in
// ascending i never reads a row that an earlier move wrote. Slots of different requests are distinct.
struct CommitParams {
  const int64_t* path;      // [b, D]
  const int32_t* lengths;   // [b] 0 to D
  const int64_t* slots;     // [b, N]
  const KVBuffer* buffers;  // [num_buffers], on the device of the op
  const char* hidden;       // [b, N, hidden_bytes] or nullptr
  char* hidden_out;         // [b, D, hidden_bytes]

  int64_t max_row_bytes;  // most row_bytes of a buffer
  int64_t hidden_bytes;
  int32_t b, rows /* N */, max_length /* D */, num_buffers;
};

}  // namespace ddtree
