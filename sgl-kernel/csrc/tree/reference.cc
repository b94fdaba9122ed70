#include "tree/reference.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <vector>

#include "tree/order.h"

namespace ddtree {
namespace {

// One request's search. The frontier holds, for each row, the first of its children that is not a row yet.
struct Search {
  const BuildParams& p;
  std::vector<float> log_probs;  // [L, K] clamped
  std::vector<Node> nodes;       // of the rows; the root's is unused
  std::vector<float> scores;
  std::priority_queue<uint64_t> frontier;

  Search(const BuildParams& params, int request) : p(params), nodes{Node{}}, scores{0.0f} {
    const int64_t count = int64_t{p.depth} * p.candidates_per_position;
    for (int64_t i = 0; i < count; ++i) {
      const float value = p.log_probs[request * count + i];
      const float sum = p.log_sum ? p.log_sum[request * int64_t{p.depth} + i / p.candidates_per_position] : 0.0f;
      log_probs.push_back(clamped_log_prob(p.log_sum ? value - sum : value));
    }
  }

  float score(Node node) const {
    return scores[node.parent] + log_probs[(node.depth - 1) * p.candidates_per_position + node.rank];
  }

  bool exists(Node node) const {
    return node.depth <= p.depth && node.rank < p.candidates_per_position && is_possible(score(node));
  }

  void consider(Node node) {
    if (exists(node)) frontier.push(order_key(score(node), node));
  }

  void add(Node node) {
    scores.push_back(score(node));
    nodes.push_back(node);
  }

  void run(int budget) {
    if (p.keep_spine) {
      for (int depth = 1; depth <= budget && exists({depth, depth - 1, 0}); ++depth) {
        add({depth, depth - 1, 0});
        consider({depth, depth - 1, 1});
      }
    }
    const int last = static_cast<int>(nodes.size()) - 1;
    consider({last + 1, last, 0});
    while (static_cast<int>(nodes.size()) <= budget && !frontier.empty()) {
      const Node node = Node::unpack(static_cast<uint32_t>(frontier.top()));
      frontier.pop();
      add(node);
      consider({node.depth, node.parent, node.rank + 1});
      consider({node.depth + 1, static_cast<int>(nodes.size()) - 1, 0});
    }
  }
};

template <typename T>
void fill(T* begin, int64_t count, T value) {
  std::fill(begin, begin + count, value);
}

}  // namespace

void reference_build(const BuildParams& p) {
  for (int r = 0; r < p.b; ++r) {
    const int budget = p.budget ? std::clamp(p.budget[r], 0, p.rows - 1) : p.rows - 1;
    Search search(p, r);
    search.run(budget);
    const int num_rows = static_cast<int>(search.nodes.size());

    const int64_t first = int64_t{r} * p.rows;
    const int64_t* candidates = p.candidates + int64_t{r} * p.depth * p.candidates_per_position;
    int64_t* tokens = p.tokens + first;
    int32_t *parents = p.parents + first, *depths = p.depths + first;
    int32_t *first_child = p.first_child + first, *next_sibling = p.next_sibling + first;
    uint64_t* ancestors = p.ancestors + first * p.words;
    fill(tokens, p.rows, p.bonus[r]);
    fill(parents, p.rows, -1);
    fill(depths, p.rows, 0);
    fill(first_child, p.rows, -1);
    fill(next_sibling, p.rows, -1);
    fill(ancestors, int64_t{p.rows} * p.words, uint64_t{0});
    p.num_rows[r] = num_rows;

    std::vector<int> last_child(num_rows, -1);
    for (int row = 0; row < p.rows; ++row) {
      uint64_t* words = ancestors + int64_t{row} * p.words;
      if (row > 0 && row < num_rows) {
        const Node node = search.nodes[row];
        tokens[row] = candidates[(node.depth - 1) * p.candidates_per_position + node.rank];
        parents[row] = node.parent;
        depths[row] = node.depth;
        std::copy_n(ancestors + int64_t{node.parent} * p.words, p.words, words);
        int& before = last_child[node.parent];
        (before < 0 ? first_child[node.parent] : next_sibling[before]) = row;
        before = row;
      }
      words[row / kWordBits] |= uint64_t{1} << (row % kWordBits);
      if (p.positions) p.positions[first + row] = p.prefix_lens[r] + depths[row];
    }
  }
}

void reference_accept(const AcceptParams& p) {
  for (int r = 0; r < p.b; ++r) {
    const int64_t *tokens = p.tokens + int64_t{r} * p.rows, *target = p.target + int64_t{r} * p.rows;
    const int32_t* parents = p.parents + int64_t{r} * p.rows;
    int64_t *path = p.path + int64_t{r} * p.max_length, *output = p.output + int64_t{r} * p.max_length;
    fill(path, p.max_length, int64_t{0});
    fill(output, p.max_length, int64_t{0});
    int length = 0;
    for (int row = 0; row < p.rows && length < p.max_length;) {
      const int at = row;
      path[length] = at;
      output[length++] = target[at];
      for (row = at + 1; row < p.rows && !(parents[row] == at && tokens[row] == target[at]);) ++row;
    }
    p.lengths[r] = length;
    p.bonus[r] = output[length - 1];
  }
}

void reference_commit(const CommitParams& p) {
  for (int r = 0; r < p.b; ++r) {
    const int64_t *path = p.path + int64_t{r} * p.max_length, *slots = p.slots + int64_t{r} * p.rows;
    for (int n = 0; n < p.num_buffers; ++n) {
      const KVBuffer& buffer = p.buffers[n];
      for (int i = 0; i < p.lengths[r]; ++i) {
        if (path[i] == i) continue;
        std::memmove(buffer.base + slots[i] * buffer.row_stride, buffer.base + slots[path[i]] * buffer.row_stride,
                     buffer.row_bytes);
      }
    }
    for (int i = 0; p.hidden && i < p.max_length; ++i) {
      std::memcpy(p.hidden_out + (int64_t{r} * p.max_length + i) * p.hidden_bytes,
                  p.hidden + (int64_t{r} * p.rows + path[i]) * p.hidden_bytes, p.hidden_bytes);
    }
  }
}

}  // namespace ddtree
