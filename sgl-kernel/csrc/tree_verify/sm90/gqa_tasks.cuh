// Blocks of two warpgroups take a multiprocessor each and work on up to kThreads / 32 tasks, one after the other, so
// that the producers load Q, K and V of a task while the consumers finish the one before. Each warp of a block finds
// one of its tasks at the start. Round i of a grid takes the next gridDim.x tasks, in reverse order if i is odd.
// Without splits, tasks are sorted by the length of their request, so that every block gets about the same number of
// tokens.
#pragma once

#include "tree_verify/sm90/gqa_loads.cuh"

namespace ddtree {

constexpr int kMaxSortedRequests = 32;  // find_longest()

template <typename Traits>
int num_tasks(const TreeVerifyParams& p) {
  const int m_tiles = (packed_rows(p.num_nodes, p.h_q, p.h_kv) + Traits::kTileM - 1) / Traits::kTileM;
  return p.h_kv * m_tiles * p.bs * p.num_splits;
}

// The blocks of a launch: one per task, or fewer. More requests of different lengths than can be sorted are left to the
// hardware, which starts a block when another has finished.
template <typename Traits>
cudaError_t task_blocks(const TreeVerifyParams& p, int* blocks) {
  const int tasks = num_tasks<Traits>(p);
  *blocks = tasks;
  if (Traits::kMaxTasks == 1 || (p.num_splits == 1 && p.bs > kMaxSortedRequests)) return cudaSuccess;
  int device = 0, multiprocessors = 0;
  DDTREE_RETURN_IF_FAILED(cudaGetDevice(&device));
  DDTREE_RETURN_IF_FAILED(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  *blocks = std::max(std::min(tasks, multiprocessors), (tasks + Traits::kMaxTasks - 1) / Traits::kMaxTasks);
  return cudaSuccess;
}

// The barriers of Q from the second task on; the consumers load that of the first. Each warpgroup has its own part,
// which is there when `full` completes and may be replaced when `empty` completes.
template <typename Traits>
struct QueryBarriers {
  using Storage = typename Traits::Storage;
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int group) const { return base + offsetof(Storage, q_full) + group * 8; }
  __device__ __forceinline__ uint32_t empty(int group) const { return base + offsetof(Storage, q_empty) + group * 8; }
  __device__ __forceinline__ void init() const {
    for (int group = 0; group < 2; ++group) {
      mbarrier_init(full(group), 32 * Traits::kProducers);
      mbarrier_init(empty(group), 128);
    }
  }
};

// Task `t` of a launch. `work.index` is -1 if there is nothing to do. Warp-collective.
template <typename Traits>
__device__ inline Task find_task(const TreeVerifyParams& p, int t) {
  const int heads = p.h_q / p.h_kv, m_tiles = ceil_div(p.num_nodes * heads, Traits::kTileM);
  const int x = t % (p.h_kv * m_tiles);
  Task task;
  task.item = t / (p.h_kv * m_tiles), task.kv_head = x / m_tiles, task.m0 = x % m_tiles * Traits::kTileM;
  const bool sorted = Traits::kMaxTasks > 1 && p.num_splits == 1 && p.bs <= kMaxSortedRequests;
  task.work = sorted ? find_longest(p, task.item) : find_work(p, task.item);
  if (task.m0 >= task.work.request.num_nodes * heads) task.work.index = -1;
  drop_unseen_nodes(p, task.work, task.m0, Traits::kTileM, heads, Traits::kTileN);
  return task;
}

// A warp finds its share of the block's tasks.
template <typename Traits>
__device__ __forceinline__ void find_tasks(const TreeVerifyParams& p, Task* tasks) {
  const int round = threadIdx.x / 32, blocks = gridDim.x;
  if (round >= Traits::kMaxTasks) return;
  const int t = round * blocks + (round % 2 == 0 ? blockIdx.x : blocks - 1 - blockIdx.x);
  Task found;
  found.work.index = -1;
  if (t < p.h_kv * ceil_div(p.num_nodes * (p.h_q / p.h_kv), Traits::kTileM) * p.bs * p.num_splits)
    found = find_task<Traits>(p, t);
  if (threadIdx.x % 32 == 0) tasks[round] = found;
}

template <typename Traits>
__device__ __forceinline__ int task_tiles(const Task& task) {
  return ceil_div(task.work.end - task.work.begin, Traits::kTileN);
}

// The first task from entry n on that has something to do; kMaxTasks if there is none.
template <typename Traits>
__device__ __forceinline__ int next_task(const Task* tasks, int n) {
  while (n < Traits::kMaxTasks && tasks[n].work.index < 0) ++n;
  return n;
}

// A producer warp copies its share of the Q of a task but the first, zeros for rows that do not exist, to where `q` is.
// A warpgroup's 64 rows may be replaced when it has released those of the task before.
template <typename Traits>
__device__ __forceinline__ void copy_q(const TreeVerifyParams& p, const Task& task,
                                       const QueryBarriers<Traits>& barriers, uint32_t q, int warp, int parity) {
  using T = typename Traits::Element;
  constexpr int kVectors = Traits::kD / 8, kPower = kVectors & -kVectors, kGroup = kPower < 16 ? kPower : 16;
  constexpr int kRows = 64 / Traits::kProducers, kPassRows = 32 / kGroup;  // of a warpgroup
  const int heads = p.h_q / p.h_kv, lane = threadIdx.x & 31, part = lane % kGroup;
#pragma unroll 1
  for (int g = 0; g < Traits::kWarpgroups; ++g) {
    const int first = g * 64 + warp * kRows + lane / kGroup;
    int node = (task.m0 + first) / heads, head = (task.m0 + first) % heads;
    mbarrier_wait(barriers.empty(g), parity);
#pragma unroll 1
    for (int pass = 0; pass < kRows / kPassRows; ++pass) {
      const bool exists = node < task.work.request.num_nodes;
      const T* from = static_cast<const T*>(p.q) +
                      (task.work.request.row0 + int64_t(exists ? node : 0)) * p.q_stride_t +
                      (task.kv_head * heads + head) * p.q_stride_h;
#pragma unroll
      for (int i = 0; i < kVectors / kGroup; ++i) {
        const uint32_t to = q + swizzled_columns(Traits::kTileM, first + pass * kPassRows, part + i * kGroup);
        cp_async_16(to, from + (part + i * kGroup) * 8, exists);
      }
      for (head += kPassRows; head >= heads; head -= heads) ++node;
    }
    mbarrier_arrive_after_copies(barriers.full(g));
  }
}

// A producer warp. Q goes to where `q` is, before tile kQueryAt of each task but the first.
template <typename Traits>
__device__ __forceinline__ void produce_tasks(const TreeVerifyParams& p, const Task* tasks, const Pages& pages,
                                              const KvStages<Traits>& stages, uint32_t q, int warp) {
  const QueryBarriers<Traits> barriers{stages.base};
  RingPosition<Traits::kStages> at;
  const int first = next_task<Traits>(tasks, 0);
  int parity = 1;
  for (int n = first; n < Traits::kMaxTasks; n = next_task<Traits>(tasks, n + 1), parity ^= 1) {
    const Task& task = tasks[n];
    const int query_at = n == first ? -1 : min(Traits::kQueryAt, task_tiles<Traits>(task) - 1);
    produce<Traits>(p, task.work, pages, stages, task.kv_head, warp, task_tiles<Traits>(task), at, [&](int j) {
      if (j == query_at) copy_q<Traits>(p, task, barriers, q, warp, parity);
    });
  }
  cp_async_wait_all();  // no thread may exit with copies in flight
}

}  // namespace ddtree
