// ddtree_build: one block a request. Warp 0 searches best first, a node an iteration; then all threads write the rows.
//
// The frontier holds one candidate for each row: the first of its children that is not a row yet. So it has at most N
// entries and each has a home: row i's is key j = i / 32 of lane i % 32, in registers. An iteration takes the largest
// key of the warp (two reductions: the score's bits, then the node's among equal scores). The key itself names the
// node, so every lane knows the new row; the lanes at home for its parent and for itself replace their keys. Its cost
// depends on N alone, not on L, K or the shape of the tree.
//
// One warp has nothing to hide latency behind, so an iteration is one chain of dependent instructions without a branch:
// the table of log-probabilities has a border of -inf (a candidate after the last, a position after the last), and only
// the keys that rows have reached are compared.
//
// Synchronization: scores and nodes in shared memory are written by lane 0 and read by the warp after __syncwarp();
// the rest of the block waits at __syncthreads().
#include "tree/launch.h"
#include "tree/order.h"

namespace ddtree {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 32;
constexpr unsigned kWarp = 0xffffffff;

struct BuildShared {
  float log_probs[(kMaxDepth + 1) * (kMaxCandidates + 1)];  // [L + 1, K + 1], the border -inf
  float scores[kMaxRows];
  uint32_t nodes[kMaxRows];                     // packed; the root's is unused
  uint8_t children[kMaxRows * kMaxCandidates];  // row of the child of a row by rank; set where the child exists
  int16_t first_child[kMaxRows], next_sibling[kMaxRows];
  int num_rows;
};

// The search, by one warp. Returns the number of rows. kKeys * 32 >= N.
template <int kKeys>
__device__ int search(const BuildParams& p, int budget, BuildShared& shared) {
  const int lane = threadIdx.x;
  const int stride = p.candidates_per_position + 1;
  uint64_t keys[kKeys];
#pragma unroll
  for (int j = 0; j < kKeys; ++j) keys[j] = kNoKey;

  const auto key_of = [&](Node node, float parent_score) {
    const float score = parent_score + shared.log_probs[(node.depth - 1) * stride + node.rank];
    return is_possible(score) ? order_key(score, node) : kNoKey;
  };
  const auto add = [&](int row, uint32_t node, float score) {
    if (lane == 0) {
      shared.nodes[row] = node;
      shared.scores[row] = score;
    }
  };

  add(0, 0, 0.0f);
  int num_rows = 1;
  float score = 0.0f;
  const auto set_key = [&](int row, uint64_t key) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) keys[j] = row == j * kLanes + lane ? key : keys[j];
  };
  if (p.keep_spine) {
    for (; num_rows <= budget; ++num_rows) {
      const Node node{num_rows, num_rows - 1, 0};
      const float next = score + shared.log_probs[(num_rows - 1) * stride];
      if (!is_possible(next)) break;  // also past the last position
      set_key(node.parent, key_of({node.depth, node.parent, 1}, score));
      add(num_rows, node.pack(), next);
      score = next;
    }
  }
  set_key(num_rows - 1, key_of({num_rows, num_rows - 1, 0}, score));
  __syncwarp();

#pragma unroll
  for (int last = 0; last < kKeys; ++last) {  // rows below (last + 1) * 32: keys after `last` are not in use yet
    for (; num_rows <= budget && num_rows < (last + 1) * kLanes; ++num_rows) {
      uint64_t best = keys[0];
#pragma unroll
      for (int j = 1; j <= last; ++j) best = keys[j] > best ? keys[j] : best;
      const auto high = static_cast<uint32_t>(best >> 32);
      const uint32_t score_bits = __reduce_max_sync(kWarp, high);
      if (score_bits == 0) return num_rows;  // no key is left
      const uint32_t node_bits = __reduce_max_sync(kWarp, high == score_bits ? static_cast<uint32_t>(best) : 0u);
      const Node node = Node::unpack(node_bits);
      score = ordered_value(score_bits);
      const uint64_t sibling = key_of({node.depth, node.parent, node.rank + 1}, shared.scores[node.parent]);
      const uint64_t child = key_of({node.depth + 1, num_rows, 0}, score);
#pragma unroll
      for (int j = 0; j <= last; ++j) keys[j] = node.parent == j * kLanes + lane ? sibling : keys[j];
      keys[last] = num_rows == last * kLanes + lane ? child : keys[last];
      add(num_rows, node_bits, score);
      __syncwarp();
    }
  }
  return num_rows;
}

template <int kKeys>
__global__ void __launch_bounds__(kThreads) build_kernel(const __grid_constant__ BuildParams p) {
  __shared__ BuildShared shared;
  const int request = blockIdx.x, K = p.candidates_per_position, N = p.rows;
  const int count = p.depth * K;
  const float* log_probs = p.log_probs + int64_t{request} * count;
  const float* log_sum = p.log_sum ? p.log_sum + int64_t{request} * p.depth : nullptr;
  for (int i = threadIdx.x; i < (p.depth + 1) * (K + 1); i += kThreads) {
    const int l = i / (K + 1), k = i % (K + 1);
    float value = -INFINITY;
    if (l < p.depth && k < K) value = log_probs[l * K + k] - (log_sum ? log_sum[l] : 0.0f);
    shared.log_probs[i] = clamped_log_prob(value);
  }
  for (int i = threadIdx.x; i < N; i += kThreads) shared.first_child[i] = shared.next_sibling[i] = -1;
  __syncthreads();

  if (threadIdx.x < kLanes) {
    const int budget = p.budget ? min(max(p.budget[request], 0), N - 1) : N - 1;
    const int num_rows = search<kKeys>(p, budget, shared);
    if (threadIdx.x == 0) shared.num_rows = num_rows;
  }
  __syncthreads();

  const int num_rows = shared.num_rows;
  for (int row = 1 + threadIdx.x; row < num_rows; row += kThreads) {
    const Node node = Node::unpack(shared.nodes[row]);
    shared.children[node.parent * kMaxCandidates + node.rank] = static_cast<uint8_t>(row);
  }
  __syncthreads();
  for (int row = 1 + threadIdx.x; row < num_rows; row += kThreads) {
    const Node node = Node::unpack(shared.nodes[row]);
    if (node.rank == 0) {
      shared.first_child[node.parent] = static_cast<int16_t>(row);
    } else {
      // Siblings become rows in the order of their ranks, so the one before is there.
      shared.next_sibling[shared.children[node.parent * kMaxCandidates + node.rank - 1]] = static_cast<int16_t>(row);
    }
  }
  __syncthreads();

  const int64_t first = int64_t{request} * N;
  for (int row = threadIdx.x; row < N; row += kThreads) {
    const bool is_node = row > 0 && row < num_rows;
    const Node node = is_node ? Node::unpack(shared.nodes[row]) : Node{0, -1, 0};
    const int64_t out = first + row;
    p.tokens[out] =
        is_node ? p.candidates[int64_t{request} * count + (node.depth - 1) * K + node.rank] : p.bonus[request];
    p.parents[out] = node.parent;
    p.depths[out] = node.depth;
    p.first_child[out] = shared.first_child[row];
    p.next_sibling[out] = shared.next_sibling[row];
    if (p.positions) p.positions[out] = p.prefix_lens[request] + node.depth;

    uint64_t words[kMaxRows / kWordBits] = {};
    const auto mark = [&](int ancestor) {
#pragma unroll
      for (int w = 0; w < kMaxRows / kWordBits; ++w) {
        words[w] |= ancestor / kWordBits == w ? uint64_t{1} << (ancestor % kWordBits) : 0;
      }
    };
    mark(row);
    for (int at = node.parent; at >= 0; at = at > 0 ? Node::unpack(shared.nodes[at]).parent : -1) mark(at);
#pragma unroll
    for (int w = 0; w < kMaxRows / kWordBits; ++w) {
      if (w < p.words) p.ancestors[out * p.words + w] = words[w];
    }
    for (int w = kMaxRows / kWordBits; w < p.words; ++w) p.ancestors[out * p.words + w] = 0;
  }
  if (threadIdx.x == 0) p.num_rows[request] = num_rows;
}

}  // namespace

void launch_build(const BuildParams& p, cudaStream_t stream) {
  if (p.b == 0) return;  // an empty grid is a launch error
  const auto kernel = p.rows <= 32    ? build_kernel<1>
                      : p.rows <= 64  ? build_kernel<2>
                      : p.rows <= 128 ? build_kernel<4>
                                      : build_kernel<8>;
  kernel<<<p.b, kThreads, 0, stream>>>(p);
}

}  // namespace ddtree
