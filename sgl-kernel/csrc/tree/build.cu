// ddtree_build: one block per request. Warp 0 runs a best-first search that adds one node per iteration. Afterwards all
// threads write the nodes out.
//
// The frontier holds one candidate per node: the first of its children that is not in the tree yet. It has at most N
// entries, and the entry of node i is key j = i / 32 of lane i % 32, in registers. An iteration takes the largest key
// of the warp with two reductions: first the score's bits, then the node's bits among equal scores. The key itself
// encodes the node, so every lane knows which node was added, and the lanes that hold its parent's and its own entry
// replace them. The cost depends on N alone, not on D, K or the shape of the tree.
//
// A single warp has nothing to hide latency behind. An iteration is therefore one branch-free chain of dependent
// instructions: the table of log-probabilities has a border of -inf (for a rank or a depth past the last), and only the
// keys of nodes that can exist are compared.
//
// Synchronization: lane 0 writes scores and nodes to shared memory, and the warp reads them after __syncwarp(). The
// rest of the block waits at __syncthreads().
#include "tree/launch.h"
#include "tree/order.h"

namespace ddtree {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 32;
constexpr unsigned kWarp = 0xffffffff;

struct BuildShared {
  float log_probs[(kMaxDepth + 1) * (kMaxCandidates + 1)];  // [D + 1, K + 1], the border is -inf
  float scores[kMaxNodes];
  uint32_t nodes[kMaxNodes];                     // packed; the root's is unused
  uint8_t children[kMaxNodes * kMaxCandidates];  // [parent, rank] index of the child; set only if it exists
  int16_t first_child[kMaxNodes], next_sibling[kMaxNodes];
  int size;
};

// The search, run by one warp. Returns the number of nodes. Requires kKeys * 32 >= N.
template <int kKeys>
__device__ int search(const BuildParams& p, BuildShared& shared) {
  const int lane = threadIdx.x;
  const int stride = p.num_candidates + 1;
  uint64_t keys[kKeys];
#pragma unroll
  for (int j = 0; j < kKeys; ++j) keys[j] = kNoKey;

  const auto key_of = [&](Node node, float parent_score) {
    const float score = parent_score + shared.log_probs[(node.depth - 1) * stride + node.rank];
    return is_possible(score) ? order_key(score, node) : kNoKey;
  };
  const auto add = [&](int index, uint32_t node, float score) {
    if (lane == 0) {
      shared.nodes[index] = node;
      shared.scores[index] = score;
    }
  };

  add(0, 0, 0.0f);
  int size = 1;
  float score = 0.0f;
  const auto set_key = [&](int index, uint64_t key) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) keys[j] = index == j * kLanes + lane ? key : keys[j];
  };
  if (p.keep_top1_path) {
    for (; size < p.num_nodes; ++size) {
      const Node node{size, size - 1, 0};
      const float next = score + shared.log_probs[(size - 1) * stride];
      if (!is_possible(next)) break;  // true past the last depth as well
      set_key(node.parent, key_of({node.depth, node.parent, 1}, score));
      add(size, node.pack(), next);
      score = next;
    }
  }
  set_key(size - 1, key_of({size, size - 1, 0}, score));
  __syncwarp();

#pragma unroll
  for (int last = 0; last < kKeys; ++last) {  // nodes below (last + 1) * 32: keys after `last` are still unused
    for (; size < p.num_nodes && size < (last + 1) * kLanes; ++size) {
      uint64_t best = keys[0];
#pragma unroll
      for (int j = 1; j <= last; ++j) best = keys[j] > best ? keys[j] : best;
      const auto high = static_cast<uint32_t>(best >> 32);
      const uint32_t score_bits = __reduce_max_sync(kWarp, high);
      if (score_bits == 0) return size;  // the frontier is empty
      const uint32_t node_bits = __reduce_max_sync(kWarp, high == score_bits ? static_cast<uint32_t>(best) : 0u);
      const Node node = Node::unpack(node_bits);
      score = ordered_value(score_bits);
      const uint64_t sibling = key_of({node.depth, node.parent, node.rank + 1}, shared.scores[node.parent]);
      const uint64_t child = key_of({node.depth + 1, size, 0}, score);
#pragma unroll
      for (int j = 0; j <= last; ++j) keys[j] = node.parent == j * kLanes + lane ? sibling : keys[j];
      keys[last] = size == last * kLanes + lane ? child : keys[last];
      add(size, node_bits, score);
      __syncwarp();
    }
  }
  return size;
}

template <int kKeys>
__global__ void __launch_bounds__(kThreads) build_kernel(const __grid_constant__ BuildParams p) {
  __shared__ BuildShared shared;
  const int request = blockIdx.x, D = p.max_depth, K = p.num_candidates, N = p.num_nodes;
  const float* log_probs = p.log_probs + int64_t{request} * (D * K);
  const float* log_sum = p.log_sum ? p.log_sum + int64_t{request} * D : nullptr;
  for (int i = threadIdx.x; i < (D + 1) * (K + 1); i += kThreads) {
    const int d = i / (K + 1), k = i % (K + 1);
    float value = -INFINITY;
    if (d < D && k < K) value = log_probs[d * K + k] - (log_sum ? log_sum[d] : 0.0f);
    shared.log_probs[i] = clamped_log_prob(value);
  }
  for (int i = threadIdx.x; i < N; i += kThreads) shared.first_child[i] = shared.next_sibling[i] = -1;
  __syncthreads();

  if (threadIdx.x < kLanes) {
    const int size = search<kKeys>(p, shared);
    if (threadIdx.x == 0) shared.size = size;
  }
  __syncthreads();

  const int size = shared.size;
  for (int i = 1 + threadIdx.x; i < size; i += kThreads) {
    const Node node = Node::unpack(shared.nodes[i]);
    shared.children[node.parent * kMaxCandidates + node.rank] = static_cast<uint8_t>(i);
  }
  __syncthreads();
  for (int i = 1 + threadIdx.x; i < size; i += kThreads) {
    const Node node = Node::unpack(shared.nodes[i]);
    if (node.rank == 0) {
      shared.first_child[node.parent] = static_cast<int16_t>(i);
    } else {
      // Siblings enter the tree in the order of their ranks, so the previous one is present.
      shared.next_sibling[shared.children[node.parent * kMaxCandidates + node.rank - 1]] = static_cast<int16_t>(i);
    }
  }
  __syncthreads();

  const int64_t first = int64_t{request} * N;
  for (int i = threadIdx.x; i < N; i += kThreads) {
    const bool is_candidate = i > 0 && i < size;  // not the root, not padding
    const Node node = is_candidate ? Node::unpack(shared.nodes[i]) : Node{0, -1, 0};
    const int64_t out = first + i;
    p.tokens[out] =
        is_candidate ? p.candidates[int64_t{request} * (D * K) + (node.depth - 1) * K + node.rank] : p.bonus[request];
    p.parents[out] = node.parent;
    p.depths[out] = node.depth;
    p.first_child[out] = shared.first_child[i];
    p.next_sibling[out] = shared.next_sibling[i];

    uint64_t words[kMaxAncestorWords] = {};
    const auto mark = [&](int ancestor) {
#pragma unroll
      for (int w = 0; w < kMaxAncestorWords; ++w) {
        words[w] |= ancestor / kAncestorWordBits == w ? ancestor_bit(ancestor) : 0;
      }
    };
    mark(i);
    for (int at = node.parent; at >= 0; at = at > 0 ? Node::unpack(shared.nodes[at]).parent : -1) mark(at);
#pragma unroll
    for (int w = 0; w < kMaxAncestorWords; ++w) {
      if (w < p.words) p.ancestors[out * p.words + w] = words[w];
    }
    for (int w = kMaxAncestorWords; w < p.words; ++w) p.ancestors[out * p.words + w] = 0;
  }
  if (threadIdx.x == 0) p.sizes[request] = size;
}

}  // namespace

void launch_build(const BuildParams& p, cudaStream_t stream) {
  if (p.bs == 0) return;  // an empty grid is a launch error
  const auto kernel = p.num_nodes <= 32    ? build_kernel<1>
                      : p.num_nodes <= 64  ? build_kernel<2>
                      : p.num_nodes <= 128 ? build_kernel<4>
                                           : build_kernel<8>;
  kernel<<<p.bs, kThreads, 0, stream>>>(p);
}

}  // namespace ddtree
