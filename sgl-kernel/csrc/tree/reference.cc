#include "tree/reference.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <vector>

#include "tree/order.h"

namespace ddtree {
namespace {

// The search for one request's tree. The frontier holds every possible child of the nodes that is not in the tree yet.
struct Search {
  const BuildParams& p;
  const int num_rows;            // per position; marginals are one row
  const int32_t* beam;           // [D, W], or nullptr
  std::vector<float> log_probs;  // [D, num_rows, K] clamped
  std::vector<Node> nodes;       // the root's is unused
  std::vector<float> scores;
  std::vector<int> rows;  // of each node's children, or -1 if it has none
  std::priority_queue<uint64_t> frontier;

  Search(const BuildParams& params, int request)
      : p(params),
        num_rows(std::max(p.num_paths, 1)),
        beam(p.beam ? p.beam + int64_t{request} * p.max_depth * num_rows : nullptr) {
    const int64_t count = int64_t{p.max_depth} * num_rows * p.num_candidates;
    for (int64_t i = 0; i < count; ++i) {
      const float value = p.log_probs[request * count + i];
      const float sum = p.log_sum ? p.log_sum[request * int64_t{p.max_depth} + i / p.num_candidates] : 0.0f;
      log_probs.push_back(clamped_log_prob(p.log_sum ? value - sum : value));
    }
  }

  int size() const { return static_cast<int>(nodes.size()); }

  // The row of a node's children.
  int row_of(Node node) const {
    if (p.num_paths == 0 || node.depth == 0) return 0;
    if (!beam) return node.rank;
    const int32_t* position = beam + int64_t{node.depth} * num_rows;
    const int32_t* found = std::find(position, position + num_rows, rows[node.parent] * p.num_candidates + node.rank);
    return found == position + num_rows ? -1 : static_cast<int>(found - position);
  }

  // Adds a node, and its children to the frontier. Returns the key of the best child, or kNoKey.
  uint64_t add(Node node, float score) {
    const int parent = size();
    nodes.push_back(node);
    scores.push_back(score);
    const int row = node.depth < p.max_depth ? row_of(node) : -1;
    rows.push_back(row);
    uint64_t best = kNoKey;
    for (int rank = 0; row >= 0 && rank < p.num_candidates; ++rank) {
      const float child = score + log_probs[(int64_t{node.depth} * num_rows + row) * p.num_candidates + rank];
      if (!is_possible(child)) continue;
      const uint64_t key = order_key(child, {node.depth + 1, parent, rank});
      frontier.push(key);
      best = std::max(best, key);
    }
    return best;
  }

  void run() {
    uint64_t key = add(Node{0, -1, 0}, 0.0f);
    std::vector<uint64_t> path;  // keys of the nodes on the top-1 path
    while (p.keep_top1_path && size() < p.num_nodes && key != kNoKey) {
      path.push_back(key);
      key = add(node_of(key), score_of(key));
    }
    while (size() < p.num_nodes && !frontier.empty()) {
      key = frontier.top();
      frontier.pop();
      if (std::find(path.begin(), path.end(), key) == path.end()) add(node_of(key), score_of(key));
    }
  }
};

template <typename T>
void fill(T* begin, int64_t count, T value) {
  std::fill(begin, begin + count, value);
}

}  // namespace

void reference_build(const BuildParams& p) {
  for (int r = 0; r < p.bs; ++r) {
    Search search(p, r);
    search.run();
    const int size = search.size();

    const int64_t first = int64_t{r} * p.num_nodes;
    const int64_t* candidates = p.candidates + int64_t{r} * p.max_depth * p.num_candidates;
    int64_t* tokens = p.tokens + first;
    int32_t *parents = p.parents + first, *depths = p.depths + first;
    int32_t *first_child = p.first_child + first, *next_sibling = p.next_sibling + first;
    uint64_t* ancestors = p.ancestors + first * p.words;
    fill(tokens, p.num_nodes, p.bonus[r]);
    fill(parents, p.num_nodes, -1);
    fill(depths, p.num_nodes, 0);
    fill(first_child, p.num_nodes, -1);
    fill(next_sibling, p.num_nodes, -1);
    fill(ancestors, int64_t{p.num_nodes} * p.words, uint64_t{0});
    p.sizes[r] = size;
    if (p.scores) {
      fill(p.scores + first, p.num_nodes, -__builtin_huge_valf());
      std::copy(search.scores.begin(), search.scores.end(), p.scores + first);
    }

    std::vector<int> last_child(size, -1);
    for (int i = 0; i < p.num_nodes; ++i) {
      uint64_t* words = ancestors + int64_t{i} * p.words;
      if (i > 0 && i < size) {
        const Node node = search.nodes[i];
        tokens[i] = candidates[(node.depth - 1) * p.num_candidates + node.rank];
        parents[i] = node.parent;
        depths[i] = node.depth;
        std::copy_n(ancestors + int64_t{node.parent} * p.words, p.words, words);
        int& previous = last_child[node.parent];
        (previous < 0 ? first_child[node.parent] : next_sibling[previous]) = i;
        previous = i;
      }
      words[i / kAncestorWordBits] |= ancestor_bit(i);
    }
  }
}

void reference_accept(const AcceptParams& p) {
  for (int r = 0; r < p.bs; ++r) {
    const int64_t *tokens = p.tokens + int64_t{r} * p.num_nodes, *target = p.target + int64_t{r} * p.num_nodes;
    const int32_t* parents = p.parents + int64_t{r} * p.num_nodes;
    int64_t *path = p.path + int64_t{r} * p.block_size, *output = p.output + int64_t{r} * p.block_size;
    fill(path, p.block_size, int64_t{0});
    fill(output, p.block_size, int64_t{0});
    int length = 0;
    for (int node = 0; node < p.num_nodes && length < p.block_size;) {
      const int at = node;
      path[length] = at;
      output[length++] = target[at];
      for (node = at + 1; node < p.num_nodes && !(parents[node] == at && tokens[node] == target[at]);) ++node;
    }
    p.lengths[r] = length;
    p.bonus[r] = output[length - 1];
  }
}

void reference_commit(const CommitParams& p) {
  for (int r = 0; r < p.bs; ++r) {
    const int64_t *path = p.path + int64_t{r} * p.block_size, *slots = p.slots + int64_t{r} * p.num_nodes;
    for (int n = 0; n < p.num_buffers; ++n) {
      const KVBuffer& buffer = p.buffers[n];
      for (int i = 0; i < p.lengths[r]; ++i) {
        if (path[i] == i) continue;
        std::memmove(buffer.base + slots[i] * buffer.row_stride, buffer.base + slots[path[i]] * buffer.row_stride,
                     buffer.row_bytes);
      }
    }
    for (int i = 0; p.hidden && i < p.block_size; ++i) {
      std::memcpy(p.hidden_out + (int64_t{r} * p.block_size + i) * p.hidden_bytes,
                  p.hidden + (int64_t{r} * p.num_nodes + path[i]) * p.hidden_bytes, p.hidden_bytes);
    }
  }
}

}  // namespace ddtree
