// ddtree_build: one block per request. Warp 0 runs a best-first search that adds one node per iteration. Afterwards all
// threads write the nodes out.
//
// The frontier holds one candidate per node: the first of its children that is not in the tree yet. It has at most N
// entries, and the entry of node i is key j = i / 32 of lane i % 32, in registers. An iteration takes the largest key
// of the warp with two reductions: first the score's bits, then the node's bits among equal scores. The key itself
// encodes the node, so every lane knows which node was added, and the lanes that hold its parent's and its own entry
// replace them. The cost depends on N alone, not on D, K or the shape of the tree.
//
// The next child of a node is the next rank if the candidates of a position are sorted (marginals). If they are scored
// after each of several paths, lane k holds the key of candidate k, and the next child is the warp's largest key below
// the last one. That takes two more reductions, and the scores need no sorting.
//
// A single warp has nothing to hide latency behind. An iteration is therefore one branch-free chain of dependent
// instructions: the table of marginals has a border of -inf (for a rank or a depth past the last), and only the keys of
// nodes that can exist are compared.
//
// Synchronization: lane 0 writes scores, nodes and rows to shared memory, and the warp reads them after __syncwarp().
// The rest of the block waits at __syncthreads().
#include "tree/launch.h"
#include "tree/order.h"

namespace ddtree {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 32;
constexpr unsigned kWarp = 0xffffffff;
constexpr int kSharedMemory = 48 << 10;  // what every architecture gives a block without asking
static_assert(kMaxCandidates <= kLanes && kMaxPaths <= kLanes, "a lane for each candidate, and for each row");

template <bool kRows>
struct BuildShared {
  float log_probs[kRows ? 1 : (kMaxDepth + 1) * (kMaxCandidates + 1)];  // [D + 1, K + 1], the border is -inf
  float scores[kMaxNodes];
  uint32_t nodes[kMaxNodes];                     // packed; the root's is unused
  int8_t rows[kRows ? kMaxNodes : 1];            // of each node's children, or -1 if it has none
  uint8_t children[kMaxNodes * kMaxCandidates];  // [parent, rank] index of the child, or undefined; with rows: or 0
  int16_t first_child[kMaxNodes], next_sibling[kMaxNodes];
  int size;
};

// What is scored after each of several paths, for one request. In shared memory if it fits.
struct RowTable {
  const float* log_probs;  // [D, W, K]
  const int32_t* beam;     // [D, W], or nullptr
};

__device__ uint64_t warp_max(uint64_t key) {
  const auto high = static_cast<uint32_t>(key >> 32);
  const uint32_t best = __reduce_max_sync(kWarp, high);
  return uint64_t{best} << 32 | __reduce_max_sync(kWarp, high == best ? static_cast<uint32_t>(key) : 0u);
}

// Finds the children of nodes, best first. All lanes of a warp call it and get the same keys.
template <bool kRows>
struct Children {
  const BuildParams& p;
  BuildShared<kRows>& shared;
  const RowTable table;

  // The key of the best child of the node `index`, or kNoKey.
  __device__ uint64_t first(int index, Node node, float score) {
    if constexpr (!kRows) {
      return marginal({node.depth + 1, index, 0}, score);
    } else {
      const int row = row_of(node);
      if (threadIdx.x == 0) shared.rows[index] = static_cast<int8_t>(row);
      return best_below(~uint64_t{0}, index, node.depth, row, score);
    }
  }

  // The key of the best sibling of a node that comes after it, or kNoKey.
  __device__ uint64_t next(uint64_t key, Node node) const {
    const float score = shared.scores[node.parent];
    if constexpr (!kRows) {
      return marginal({node.depth, node.parent, node.rank + 1}, score);
    } else {
      return best_below(key, node.parent, node.depth - 1, shared.rows[node.parent], score);
    }
  }

 private:
  __device__ uint64_t marginal(Node child, float parent_score) const {
    const float score = parent_score + shared.log_probs[(child.depth - 1) * (p.num_candidates + 1) + child.rank];
    return is_possible(score) ? order_key(score, child) : kNoKey;
  }

  __device__ int row_of(Node node) const {
    if (node.depth == 0) return 0;
    if (node.depth == p.max_depth) return -1;
    if (!table.beam) return node.rank;
    const int lane = threadIdx.x, wanted = shared.rows[node.parent] * p.num_candidates + node.rank;
    const bool found = lane < p.num_paths && table.beam[node.depth * p.num_paths + lane] == wanted;
    return __ffs(static_cast<int>(__ballot_sync(kWarp, found))) - 1;
  }

  // The largest key below `limit` of the children of `parent`, whose depth is `depth`.
  __device__ uint64_t best_below(uint64_t limit, int parent, int depth, int row, float parent_score) const {
    const int rank = threadIdx.x;
    float log_prob = -INFINITY;
    if (row >= 0 && rank < p.num_candidates) {
      log_prob = clamped_log_prob(table.log_probs[(depth * p.num_paths + row) * p.num_candidates + rank]);
    }
    const float score = parent_score + log_prob;
    const uint64_t key = is_possible(score) ? order_key(score, {depth + 1, parent, rank}) : kNoKey;
    return warp_max(key < limit ? key : kNoKey);
  }
};

// The search, run by one warp. Returns the number of nodes. Requires kKeys * 32 >= N.
template <int kKeys, bool kRows>
__device__ int search(const BuildParams& p, BuildShared<kRows>& shared, Children<kRows> children) {
  const int lane = threadIdx.x;
  uint64_t keys[kKeys];
#pragma unroll
  for (int j = 0; j < kKeys; ++j) keys[j] = kNoKey;

  const auto add = [&](int index, uint64_t key) {
    if (lane == 0) {
      shared.nodes[index] = static_cast<uint32_t>(key);
      shared.scores[index] = score_of(key);
    }
  };
  const auto set_key = [&](int index, uint64_t key) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) keys[j] = index == j * kLanes + lane ? key : keys[j];
  };

  int size = 1;
  uint64_t key = children.first(0, Node{0, -1, 0}, 0.0f);
  if (lane == 0) shared.scores[0] = 0.0f;
  __syncwarp();
  if (p.keep_top1_path) {
    for (; size < p.num_nodes && key != kNoKey; ++size) {
      const Node node = node_of(key);
      set_key(node.parent, children.next(key, node));
      add(size, key);
      key = children.first(size, node, score_of(key));
      __syncwarp();
    }
  }
  set_key(size - 1, key);

#pragma unroll
  for (int last = 0; last < kKeys; ++last) {  // nodes below (last + 1) * 32: keys after `last` are still unused
    for (; size < p.num_nodes && size < (last + 1) * kLanes; ++size) {
      uint64_t best = keys[0];
#pragma unroll
      for (int j = 1; j <= last; ++j) best = keys[j] > best ? keys[j] : best;
      best = warp_max(best);
      if (best == kNoKey) return size;  // the frontier is empty
      const Node node = node_of(best);
      const uint64_t sibling = children.next(best, node);
      const uint64_t child = children.first(size, node, score_of(best));
#pragma unroll
      for (int j = 0; j <= last; ++j) keys[j] = node.parent == j * kLanes + lane ? sibling : keys[j];
      keys[last] = size == last * kLanes + lane ? child : keys[last];
      add(size, best);
      __syncwarp();
    }
  }
  return size;
}

// Copies what the search reads to shared memory.
template <bool kRows>
__device__ RowTable load(const BuildParams& p, BuildShared<kRows>& shared, float* row_memory, bool rows_fit) {
  const int request = blockIdx.x, D = p.max_depth, K = p.num_candidates, W = p.num_paths;
  if constexpr (!kRows) {
    const float* log_probs = p.log_probs + int64_t{request} * (D * K);
    const float* log_sum = p.log_sum ? p.log_sum + int64_t{request} * D : nullptr;
    for (int i = threadIdx.x; i < (D + 1) * (K + 1); i += kThreads) {
      const int d = i / (K + 1), k = i % (K + 1);
      float value = -INFINITY;
      if (d < D && k < K) value = log_probs[d * K + k] - (log_sum ? log_sum[d] : 0.0f);
      shared.log_probs[i] = clamped_log_prob(value);
    }
    return {};
  } else {
    for (int i = threadIdx.x; i < p.num_nodes * kMaxCandidates; i += kThreads) shared.children[i] = 0;
    RowTable table{p.log_probs + int64_t{request} * (D * W * K),
                   p.beam ? p.beam + int64_t{request} * (D * W) : nullptr};
    if (!rows_fit) return table;
    for (int i = threadIdx.x; i < D * W * K; i += kThreads) row_memory[i] = table.log_probs[i];
    table.log_probs = row_memory;
    if (table.beam) {
      const auto beam = reinterpret_cast<int32_t*>(row_memory + D * W * K);
      for (int i = threadIdx.x; i < D * W; i += kThreads) beam[i] = table.beam[i];
      table.beam = beam;
    }
    return table;
  }
}

// Index of the sibling before node i, or 0.
template <bool kRows>
__device__ int previous_sibling(const BuildParams& p, const BuildShared<kRows>& shared, int i, Node node) {
  const uint8_t* siblings = shared.children + node.parent * kMaxCandidates;
  if constexpr (!kRows) {
    // Siblings enter the tree in the order of their ranks, so the previous one is present.
    return node.rank == 0 ? 0 : siblings[node.rank - 1];
  } else {
    int previous = 0;
    for (int rank = 0; rank < p.num_candidates; ++rank) {
      const int at = siblings[rank];
      previous = at < i && at > previous ? at : previous;
    }
    return previous;
  }
}

template <int kKeys, bool kRows>
__global__ void __launch_bounds__(kThreads) build_kernel(const __grid_constant__ BuildParams p, bool rows_fit) {
  __shared__ BuildShared<kRows> shared;
  extern __shared__ float row_memory[];
  const int request = blockIdx.x, D = p.max_depth, K = p.num_candidates, N = p.num_nodes;
  const RowTable table = load<kRows>(p, shared, row_memory, rows_fit);
  for (int i = threadIdx.x; i < N; i += kThreads) shared.first_child[i] = shared.next_sibling[i] = -1;
  __syncthreads();

  if (threadIdx.x < kLanes) {
    const int size = search<kKeys, kRows>(p, shared, Children<kRows>{p, shared, table});
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
    const int previous = previous_sibling<kRows>(p, shared, i, node);
    (previous == 0 ? shared.first_child[node.parent] : shared.next_sibling[previous]) = static_cast<int16_t>(i);
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
    if (p.scores) p.scores[out] = i < size ? shared.scores[i] : -INFINITY;

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

template <bool kRows>
void launch_kind(const BuildParams& p, cudaStream_t stream) {
  const size_t floats = size_t(p.max_depth) * p.num_paths * (p.num_candidates + (p.beam ? 1 : 0));
  const size_t bytes = kRows ? floats * sizeof(float) : 0;
  const bool rows_fit = sizeof(BuildShared<kRows>) + bytes <= kSharedMemory;
  const auto kernel = p.num_nodes <= 32    ? build_kernel<1, kRows>
                      : p.num_nodes <= 64  ? build_kernel<2, kRows>
                      : p.num_nodes <= 128 ? build_kernel<4, kRows>
                                           : build_kernel<8, kRows>;
  kernel<<<p.bs, kThreads, rows_fit ? bytes : 0, stream>>>(p, rows_fit);
}

}  // namespace

void launch_build(const BuildParams& p, cudaStream_t stream) {
  if (p.bs == 0) return;  // an empty grid is a launch error
  p.num_paths ? launch_kind<true>(p, stream) : launch_kind<false>(p, stream);
}

}  // namespace ddtree
