// Tree-verify attention over one chunk of a request's KV, for one KV head and one M tile, with wgmma (sm_90a).
//
// Does the same work as gqa_partial.cuh, which defines packed rows and work items, for KV of Q's type. A warpgroup of
// consumers owns 64 rows. The block's one or two warpgroups share the K and V tiles, which producer warps load into a
// ring of stages (gqa_loads.cuh). Producers and consumers each have a main loop over tiles j. The tensor cores read
// every operand except P from shared memory. Blocks that share a multiprocessor overlap one's softmax with another's
// products. Two warpgroups take turns for that, and start S of a tile and P V of the tile before together, so that P V
// runs during the softmax. In the kernel for several tasks (gqa_tasks.cuh), the tile before may be the last of another
// task. A consumer warp frees a stage once it has finished its products.
#pragma once

#include "common/pdl.cuh"
#include "tree_verify/epilogue.cuh"
#include "tree_verify/sm90/gqa_tasks.cuh"
#include "tree_verify/sm90/online_softmax.cuh"
#include "tree_verify/traits.h"

namespace ddtree {

// Lets two warpgroups take turns at the tensor cores: while one's products run, the other computes its softmax. Without
// turns both start each tile together, and then compete for the same units. Each calls take() and give() equally often.
template <int kWarpgroups>
struct Turn {
  static constexpr int kFirstBarrier = 4, kThreads = 256;
  int mine;
  __device__ __forceinline__ explicit Turn(int warpgroup) : mine(warpgroup) {
    if (kWarpgroups == 2 && mine == 1) give();  // warpgroup 0 has the first turn
  }
  __device__ __forceinline__ void take() const {
    if constexpr (kWarpgroups == 2)
      asm volatile("bar.sync %0, %1;" ::"r"(kFirstBarrier + mine), "n"(kThreads) : "memory");
  }
  // `last`: nobody waits for the turn after it.
  __device__ __forceinline__ void give(bool last = false) const {
    if (kWarpgroups == 2 && !(last && mine == 1))
      asm volatile("bar.arrive %0, %1;" ::"r"(kFirstBarrier + (mine ^ 1)), "n"(kThreads) : "memory");
  }
};

// Shared-memory addresses of a block.
template <typename Traits>
struct GqaSm90Block : KvStages<Traits> {
  __device__ __forceinline__ uint32_t q() const { return this->base + offsetof(typename Traits::Storage, q); }
};

// A warpgroup loads its 64 rows of Q, with zeros for rows that do not exist and four threads per row.
template <typename Traits>
__device__ __forceinline__ void gqa_sm90_load_q(const TreeVerifyParams& p, const WorkItem& work,
                                                const GqaSm90Block<Traits>& block, int kv_head, int m0) {
  using T = typename Traits::Element;
  constexpr int kEach = Traits::kD / 32;  // 16-byte vectors per thread
  const int heads = p.h_q / p.h_kv, m_end = work.request.num_nodes * heads;
  const int warpgroup = threadIdx.x / 128, part = threadIdx.x % 4;
#pragma unroll 1
  for (int m = warpgroup * 64 + threadIdx.x % 128 / 4; m < warpgroup * 64 + 64; m += 32) {
    const bool exists = m0 + m < m_end;
    const int node = exists ? (m0 + m) / heads : 0, head = exists ? (m0 + m) % heads : 0;
    const T* q = static_cast<const T*>(p.q) + (work.request.row0 + int64_t(node)) * p.q_stride_t +
                 (kv_head * heads + head) * p.q_stride_h;
    uint4 value[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      value[i] = exists ? *reinterpret_cast<const uint4*>(q + (part + i * 4) * 8) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t to = block.q() + swizzled_columns(Traits::kTileM, m, part + i * 4);
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(value[i].x), "r"(value[i].y), "r"(value[i].z),
                   "r"(value[i].w)
                   : "memory");
    }
  }
}

// `work`, `kv_head`, `m0` and `tiles` are those of the block's first task. `tasks`: all of them, in the kernel for
// several.
template <typename Traits>
__device__ __forceinline__ void gqa_sm90_consume(const TreeVerifyParams& p, const WorkItem& work, const Pages& pages,
                                                 const GqaSm90Block<Traits>& block, int kv_head, int m0, int tiles,
                                                 const Task* tasks) {
  using T = typename Traits::Element;
  constexpr int kD = Traits::kD, kTileM = Traits::kTileM, kTileN = Traits::kTileN;
  constexpr bool kSeveral = Traits::kMaxTasks > 1;
  int n = kSeveral ? next_task<Traits>(tasks, 0) : 0, paged = pages.tiles<Traits>(work);
  const int heads = p.h_q / p.h_kv, lane = threadIdx.x & 31, warp = threadIdx.x / 32, warpgroup = warp / 4;
  gqa_sm90_load_q<Traits>(p, work, block, kv_head, m0);
  fence_async_proxy();
  named_barrier(1 + warpgroup, 128);

  const int warp_row0 = m0 + warp * 16;
  TokenRange unmasked = shared_tokens(p, work);
  const LogitScale logit_scale = make_logit_scale(p.sm_scale, load_scale(p.k_scale), p.logit_cap);
  float o[kD / 2], row_max[2] = {neg_inf(), neg_inf()}, row_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) o[i] = 0.f;
  const uint64_t q_desc = wgmma_descriptor(block.q() + warpgroup * 64 * kSwizzleRowBytes, 0, kSwizzleAtomBytes);

  float s[kTileN / 2];
  uint32_t prob[kTileN / 16][4];
  auto wait_for = [&](const RingPosition<Traits::kStages>& at, int j) {
    mbarrier_wait(block.full(at.stage), at.parity);
    if (!Traits::kPaged || j >= paged) fence_async_proxy();
  };
  auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(block.empty(stage));
  };
  auto start_scores = [&](int stage) {  // S = Q K^T
    const uint64_t k_desc = wgmma_descriptor(block.k(stage), 0, kSwizzleAtomBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      // Four steps of 32 bytes cross a block of columns.
      const int q_at = k / 4 * kTileM * kSwizzleRowBytes + k % 4 * 32;
      const int k_at = k / 4 * kTileN * kSwizzleRowBytes + k % 4 * 32;
      wgmma_ss<T>(s, advanced(q_desc, q_at), advanced(k_desc, k_at), k > 0);
    }
    wgmma_commit();
  };
  auto start_values = [&](int stage) {  // O += P V
    const uint64_t v_desc = wgmma_descriptor(block.v(stage), kTileN * kSwizzleRowBytes, kSwizzleAtomBytes);
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileN / 16; ++k) wgmma_rs<T>(o, prob[k], advanced(v_desc, k * 2 * kSwizzleAtomBytes));
    wgmma_commit();
  };
  auto softmax = [&](int j) {  // turns the scores of tile j into probabilities
    const WorkItem& current = kSeveral ? tasks[n].work : work;
    const int token0 = current.begin + j * kTileN, row0 = kSeveral ? tasks[n].m0 + warp * 16 : warp_row0;
    if (p.logit_cap > 0.f) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) s[i] = logit_scale.capped(s[i]);
    }
    if (!unmasked.contains(token0, kTileN)) mask_scores<kTileN>(p, current, (row0 + lane % 16) / heads, token0, s);
    return online_softmax<kTileN>(s, {logit_scale.factor, logit_scale.factor}, 0.f, kRescaleThreshold, row_max,
                                  row_sum);
  };
  auto rescale = [&](float2 shrink) {
    if (!__any_sync(0xffffffff, shrink.x != 1.f || shrink.y != 1.f)) return;
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] *= i % 4 / 2 == 0 ? shrink.x : shrink.y;
  };
  auto pack = [&] {
#pragma unroll
    for (int k = 0; k < kTileN / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) prob[k][i] = pack2<T>(s[k * 8 + i * 2], s[k * 8 + i * 2 + 1]);
    }
  };

  auto write_rows = [&](const Task& done, const float (&top)[2], const float (&sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = done.m0 + warp * 16 + half * 8 + lane / 4;
      const RowWriter<T> writer(p, done.work, done.item, done.kv_head, m, top[half], quad_sum(sum[half]),
                                lane % 4 == 0);
      writer.template store_row<kD / 8>(o, half * 2);
    }
  };

  RingPosition<Traits::kStages> at;
  if constexpr (Traits::kWarpgroups == 1) {
    for (int j = 0; j < tiles; ++j, at.advance()) {
      wait_for(at, j);
      start_scores(at.stage);
      wgmma_wait<0>();
      wgmma_pin(s);
      rescale(softmax(j));
      pack();
      start_values(at.stage);
      wgmma_wait<0>();
      wgmma_pin(o);
      release(at.stage);
    }
  } else {
    const Turn<Traits::kWarpgroups> turn(warpgroup);
    const QueryBarriers<Traits> q_barriers{block.base};
    int q_parity = 0;
    auto release_q = [&] { mbarrier_arrive(q_barriers.empty(warpgroup)); };
    wait_for(at, 0);
    turn.take();
    start_scores(at.stage);
    turn.give();
    wgmma_wait<0>();
    wgmma_pin(s);
    if (kSeveral && tiles == 1) release_q();
    softmax(0);
    pack();
    for (int j = 1; kSeveral || j < tiles; ++j) {
      const int n_before = n;
      const bool starts = kSeveral && j == tiles;
      if (starts) {
        const int next = next_task<Traits>(tasks, n + 1);
        if (next == Traits::kMaxTasks) break;
        n = next;
        j = 0;
        tiles = task_tiles<Traits>(tasks[n]), paged = pages.tiles<Traits>(tasks[n].work);
        unmasked = shared_tokens(p, tasks[n].work);
        mbarrier_wait(q_barriers.full(warpgroup), q_parity);
        q_parity ^= 1;
        if (Traits::kPaged) fence_async_proxy();  // otherwise that of the first tile is enough
      }
      const int before = at.stage;
      at.advance();
      wait_for(at, j);
      turn.take();
      start_scores(at.stage);
      start_values(before);  // of the tile before; runs during the softmax
      turn.give();
      wgmma_wait<1>();
      wgmma_pin(s);
      if (kSeveral && j == tiles - 1) release_q();
      float top[2], sum[2];
      if (starts) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          top[half] = row_max[half], sum[half] = row_sum[half];
          row_max[half] = neg_inf(), row_sum[half] = 0.f;
        }
      }
      const float2 shrink = softmax(j);
      wgmma_wait<0>();
      wgmma_pin(o);
      release(before);
      if (starts) {
        write_rows(tasks[n_before], top, sum);
#pragma unroll
        for (int i = 0; i < kD / 2; ++i) o[i] = 0.f;
      } else {
        rescale(shrink);
      }
      pack();
    }
    turn.take();
    start_values(at.stage);
    turn.give(true);
    wgmma_wait<0>();
    wgmma_pin(o);
  }

  if constexpr (kSeveral) return write_rows(tasks[n], row_max, row_sum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = warp_row0 + half * 8 + lane / 4;
    const RowWriter<T> writer(p, work, blockIdx.y, kv_head, m, row_max[half], quad_sum(row_sum[half]), lane % 4 == 0);
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) writer.store2(n * 8 + lane % 4 * 2, o[n * 4 + half * 2], o[n * 4 + half * 2 + 1]);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    gqa_sm90_partial_kernel(const __grid_constant__ TreeVerifyParams p, const __grid_constant__ Pages pages) {
  using Storage = typename Traits::Storage;
  extern __shared__ __align__(1024) char swizzled_smem[];
  Storage& storage = *reinterpret_cast<Storage*>(swizzled_smem);
  const GqaSm90Block<Traits> block{{smem_address(swizzled_smem)}};
  const int heads = p.h_q / p.h_kv, m_tiles = gridDim.x / p.h_kv;
  const int kv_head = blockIdx.x / m_tiles, m0 = blockIdx.x % m_tiles * Traits::kTileM;
  if (Traits::kPaged && threadIdx.x == 0) pages.prefetch();
  const int producer = threadIdx.x / 32 - Traits::kConsumers / 32;
  WorkItem& work = storage.work[0];
  if (producer == 0) {
    WorkItem found = find_work(p, blockIdx.y, m0, heads);
    drop_unseen_nodes(p, found, m0, Traits::kTileM, heads, Traits::kTileN);
    if (threadIdx.x % 32 == 0) {
      work = found;
      for (int s = 0; s < Traits::kStages; ++s) {
        mbarrier_init(block.full(s), 32 * Traits::kProducers);
        mbarrier_init(block.empty(s), Traits::kConsumers / 32);
      }
      fence_mbarrier_init();
    }
  }
  allow_dependents();
  __syncthreads();
  if (work.index < 0) return;
  const int tiles = ceil_div(work.end - work.begin, Traits::kTileN);

  if (producer >= 0) {
    if constexpr (Traits::kWarpgroups == 2) shrink_registers<Traits::kProducerRegisters>();
    produce<Traits>(p, work, pages, block, kv_head, producer, tiles);
  } else {
    if constexpr (Traits::kWarpgroups == 2) grow_registers<Traits::kConsumerRegisters>();
    gqa_sm90_consume<Traits>(p, work, pages, block, kv_head, m0, tiles, nullptr);
  }
}

// For blocks that take several tasks.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    gqa_sm90_tasks_kernel(const __grid_constant__ TreeVerifyParams p, const __grid_constant__ Pages pages) {
  using Storage = typename Traits::Storage;
  extern __shared__ __align__(1024) char swizzled_smem[];
  Storage& storage = *reinterpret_cast<Storage*>(swizzled_smem);
  const GqaSm90Block<Traits> block{{smem_address(swizzled_smem)}};
  if (Traits::kPaged && threadIdx.x == 0) pages.prefetch();
  const int producer = threadIdx.x / 32 - Traits::kConsumers / 32;
  find_tasks<Traits>(p, storage.tasks);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Traits::kStages; ++s) {
      mbarrier_init(block.full(s), 32 * Traits::kProducers);
      mbarrier_init(block.empty(s), Traits::kConsumers / 32);
    }
    QueryBarriers<Traits>{block.base}.init();
    fence_mbarrier_init();
  }
  allow_dependents();
  __syncthreads();
  const int first = next_task<Traits>(storage.tasks, 0);
  if (first == Traits::kMaxTasks) return;

  if (producer >= 0) {
    shrink_registers<Traits::kProducerRegisters>();
    produce_tasks<Traits>(p, storage.tasks, pages, block, block.q(), producer);
  } else {
    grow_registers<Traits::kConsumerRegisters>();
    const Task& task = storage.tasks[first];
    gqa_sm90_consume<Traits>(p, task.work, pages, block, task.kv_head, task.m0, task_tiles<Traits>(task),
                             storage.tasks);
  }
}

}  // namespace ddtree
