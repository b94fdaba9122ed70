// Tree-verify attention over one chunk of a request's fp8 KV, for one KV head and one M tile, with fp8 wgmma (sm_90a).
//
// Does the same work as gqa_sm90.cuh, but multiplies K and V as they are stored. Q and P are rounded to e4m3, Q with a
// power of two per row as its scale, P relative to 2^-8 of the row's largest. With SGLANG_DDTREE_FP8=exact (kSplit),
// each is the sum of two e4m3 numbers, which together hold every bit of bf16. That doubles the products, which then
// cost as much as in 16 bits. The products of a tile accumulate in registers of their own, and are added to O in fp32:
// the accumulators of fp8 products keep about 14 bits, which is enough for one tile, but not for thousands of tokens.
//
// fp8 products read both operands along the contracted dimension, so P V needs V transposed. Two warps do that for each
// tile. Within 16 tokens they place token 8 i + 2 c + e (i, e < 2, c < 4) at byte 4 c + 2 i + e. In that order, the
// probabilities that a thread holds after S are the operands that it needs for P V. Within 16 dimensions, dimension
// 2 r + e becomes row 8 e + r.
//
// Synchronization: a stage (gqa_loads.cuh) is free when each consumer warp has finished S, and each transposing lane
// has read V. `values_full` completes when V is transposed, and `values_empty` when each consumer warp has finished P
// V.
#pragma once

#include "common/cp_async.cuh"
#include "common/fp8.cuh"
#include "common/mbarrier.cuh"
#include "common/pdl.cuh"
#include "common/softmax.cuh"
#include "common/wgmma.cuh"
#include "tree_verify/epilogue.cuh"
#include "tree_verify/sm90/gqa_sm90.cuh"
#include "tree_verify/sm90/gqa_tasks.cuh"
#include "tree_verify/traits.h"
#include "tree_verify/tree_mask.cuh"

namespace ddtree {

// Shared-memory addresses of a block.
template <typename Traits>
struct GqaFp8Block : KvStages<Traits> {
  using Storage = typename Traits::Storage;
  __device__ __forceinline__ uint32_t raw_q() const { return this->base + offsetof(Storage, raw_q); }
  __device__ __forceinline__ uint32_t q(int part) const {
    return this->base + offsetof(Storage, q) + part * Traits::kQPartBytes;
  }
  __device__ __forceinline__ uint32_t values(int i) const {
    return this->base + offsetof(Storage, values) + i * Traits::kValuesBytes;
  }
  __device__ __forceinline__ uint32_t values_full(int i) const {
    return this->base + offsetof(Storage, values_full) + i * 8;
  }
  __device__ __forceinline__ uint32_t values_empty(int i) const {
    return this->base + offsetof(Storage, values_empty) + i * 8;
  }
};

// Stores what ldmatrix_x4_trans loaded of 32 tokens and 16 dimensions (register i: tokens 8 i + 2 c, + 1 and dimensions
// 2 g, + 1 of lane 4 g + c) in the order that the comment above describes.
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&r)[4]) {
  stmatrix_x4(to, __byte_perm(r[0], r[1], 0x6420), __byte_perm(r[0], r[1], 0x7531), __byte_perm(r[2], r[3], 0x6420),
              __byte_perm(r[2], r[3], 0x7531));
}

// A transposing warp takes half of the tokens of every tile.
template <typename Traits>
__device__ __forceinline__ void gqa_fp8_transpose(const GqaFp8Block<Traits>& block, const Task* tasks, int warp) {
  const int lane = threadIdx.x & 31, matrix = lane / 8, row = lane % 8;
  int tiles = 0;
  for (int n = 0; n < Traits::kMaxTasks; ++n) tiles += tasks[n].work.index < 0 ? 0 : task_tiles<Traits>(tasks[n]);
  RingPosition<Traits::kStages> at;
  RingPosition<2> to;
  for (int j = 0; j < tiles; ++j, at.advance(), to.advance()) {
    mbarrier_wait(block.full(at.stage), at.parity);
    mbarrier_wait(block.values_empty(to.stage), to.parity ^ 1);
    const uint32_t v = block.v(at.stage), values = block.values(to.stage);
    constexpr int kBatch = Traits::kD % 64 == 0 ? 4 : 3;  // loads in flight
#pragma unroll 1
    for (int group = warp * 2; group < warp * 2 + 2; ++group) {  // of 32 tokens
#pragma unroll
      for (int d0 = 0; d0 < Traits::kD / 16; d0 += kBatch) {
        uint32_t r[kBatch][4];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          ldmatrix_x4_trans(r[i], v + swizzled_columns(Traits::kTileN, group * 32 + lane, d0 + i));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int d = (d0 + i) * 16 + matrix % 2 * 8 + row;
          store_transposed(values + swizzled(d, group * 2 + matrix / 2), r[i]);
        }
      }
    }
    fence_async_proxy();
    mbarrier_arrive(block.values_full(to.stage));
    mbarrier_arrive(block.empty(at.stage));
  }
}

// A warpgroup rounds its 64 rows of Q, with zeros for rows that do not exist and four threads per row. kCopied: they
// are in `raw_q`.
template <typename Traits, bool kCopied>
__device__ __forceinline__ void gqa_fp8_round_q(const TreeVerifyParams& p, const WorkItem& work,
                                                const GqaFp8Block<Traits>& block, float* q_unscale, int kv_head,
                                                int m0) {
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
    float2 value[kEach * 4];
    float top = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      uint4 raw = make_uint4(0, 0, 0, 0);
      if constexpr (kCopied) {
        const uint32_t from = block.raw_q() + swizzled_columns(Traits::kTileM, m, part + i * 4);
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                     : "r"(from)
                     : "memory");
      } else if (exists) {
        raw = *reinterpret_cast<const uint4*>(q + (part + i * 4) * 8);
      }
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 v = value[i * 4 + w] = unpack2<T>(words[w]);
        top = fmaxf(top, fmaxf(fabsf(v.x), fabsf(v.y)));
      }
    }
    const float scale = e4m3_scale(quad_max(top));
    if (part == 0) q_unscale[m] = 1.f / scale;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      uint32_t hi[4], lo[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 v = value[i * 4 + w];
        split_e4m3x2(make_float2(v.x * scale, v.y * scale), hi[w], lo[w]);
      }
      const int chunk = part + i * 4;  // of eight dimensions
      const uint32_t offset = swizzled_columns(Traits::kTileM, m, chunk / 2) + chunk % 2 * 8;
      asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(block.q(0) + offset), "r"(hi[0] | hi[1] << 16),
                   "r"(hi[2] | hi[3] << 16)
                   : "memory");
      if constexpr (Traits::kSplit)
        asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(block.q(1) + offset), "r"(lo[0] | lo[1] << 16),
                     "r"(lo[2] | lo[3] << 16)
                     : "memory");
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void gqa_fp8_consume(const TreeVerifyParams& p, const Task* tasks, const Pages& pages,
                                                const GqaFp8Block<Traits>& block, float* q_unscale) {
  using T = typename Traits::Element;
  constexpr int kD = Traits::kD, kTileN = Traits::kTileN;
  const int heads = p.h_q / p.h_kv, lane = threadIdx.x & 31, warp = threadIdx.x / 32, warpgroup = warp / 4;
  const QueryBarriers<Traits> q_barriers{block.base};
  int n = next_task<Traits>(tasks, 0);
  int tiles, paged, q_parity = 0;
  TokenRange unmasked;
  const LogitScale logit_scale = make_logit_scale(p.sm_scale, load_scale(p.k_scale), p.logit_cap);
  float factor[2];  // from q.k to a base-2 logit, or with a cap to the argument of tanh
  auto release = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  auto begin_task = [&](auto first) {
    constexpr bool kFirst = decltype(first)::value;
    tiles = task_tiles<Traits>(tasks[n]), paged = pages.tiles<Traits>(tasks[n].work);
    unmasked = shared_tokens(p, tasks[n].work);
    if constexpr (!kFirst) {
      mbarrier_wait(q_barriers.full(warpgroup), q_parity);
      q_parity ^= 1;
      named_barrier(1 + warpgroup, 128);  // the products of all warps with the Q before are done
    }
    gqa_fp8_round_q<Traits, !kFirst>(p, tasks[n].work, block, q_unscale, tasks[n].kv_head, tasks[n].m0);
    if (Traits::kMaxTasks > 1) mbarrier_arrive(q_barriers.empty(warpgroup));
    fence_async_proxy();
    named_barrier(1 + warpgroup, 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = logit_scale.factor * q_unscale[warp * 16 + half * 8 + lane / 4];
  };
  // Probabilities are relative to 2^row_max, which is 2^kE4m3Headroom below the row's largest.
  float o[kD / 2], row_max[2] = {neg_inf(), neg_inf()}, row_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) o[i] = 0.f;
  Turn<Traits::kWarpgroups> turn(warpgroup);
  const uint64_t q_desc = wgmma_descriptor(block.q(0) + warpgroup * 64 * kSwizzleRowBytes, 0, kSwizzleAtomBytes);

  RingPosition<Traits::kStages> keys;  // of the next tile to multiply by
  RingPosition<2> values;
  using Scores = float[kTileN / 2];
  using Product = float[Traits::kPartD / 2];
  uint32_t prob[kTileN / 32][4], rest[Traits::kSplit ? kTileN / 32 : 1][4];
  float2 shrink;  // what to multiply O by before P V is added
  auto wait_for_keys = [&](int j) {
    mbarrier_wait(block.full(keys.stage), keys.parity);
    if (!Traits::kPaged || j >= paged) fence_async_proxy();
  };
  auto start_scores = [&](Scores& s) {  // S = Q K^T
    const uint64_t k_desc = wgmma_descriptor(block.k(keys.stage), 0, kSwizzleAtomBytes);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < Traits::kQParts; ++part) {
#pragma unroll
      for (int k = 0; k < kD / 32; ++k) {
        // Four steps of 32 bytes cross a block of columns.
        const int q_at = part * Traits::kQPartBytes + k / 4 * Traits::kTileM * kSwizzleRowBytes + k % 4 * 32;
        const int k_at = k / 4 * kTileN * kSwizzleRowBytes + k % 4 * 32;
        wgmma_e4m3(s, advanced(q_desc, q_at), advanced(k_desc, k_at), part + k > 0);
      }
    }
    wgmma_commit();
  };
  auto release_keys = [&] {
    release(block.empty(keys.stage));
    keys.advance();
  };
  auto start_product = [&](int part, Product& product) {  // P V
    const uint64_t v_desc = wgmma_descriptor(block.values(values.stage), 0, kSwizzleAtomBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileN / 32; ++k) {
      const uint64_t v = advanced(v_desc, part * Traits::kPartD * kSwizzleRowBytes + k * 32);
      wgmma_e4m3(product, prob[k], v, k > 0);
      if constexpr (Traits::kSplit) wgmma_e4m3(product, rest[k], v, true);
    }
    wgmma_commit();
  };
  auto finish_product = [&](int part, Product& product) {  // O = O shrink + P V
    wgmma_wait<0>();
    wgmma_pin(product);
#pragma unroll
    for (int i = 0; i < Traits::kPartD / 2; ++i) {
      float& sum = o[part * Traits::kPartD / 2 + i];
      sum = fmaf(sum, i % 4 / 2 == 0 ? shrink.x : shrink.y, product[i]);
    }
  };
  auto add_product = [&](int part, Product& product) {
    start_product(part, product);
    finish_product(part, product);
  };
  auto add_values = [&](Scores& s) {
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part) {
      // Where P V is as large as S, they share registers. ptxas does not find that by itself.
      if constexpr (sizeof(Product) == sizeof(Scores)) {
        add_product(part, s);
      } else {
        Product product;
        add_product(part, product);
      }
    }
  };
  auto release_values = [&] {
    release(block.values_empty(values.stage));
    values.advance();
  };
  auto softmax = [&](int j, Scores& s) {  // turns the scores of tile j into P
    const WorkItem& work = tasks[n].work;
    const int token0 = work.begin + j * kTileN;
    if (p.logit_cap > 0.f) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) s[i] = logit_scale.capped(s[i] * factor[i % 4 / 2]);
    }
    if (!(kD == 256 ? shared_tokens(p, work) : unmasked).contains(token0, kTileN))  // kD 256: no registers left
      mask_scores<kTileN>(p, work, (tasks[n].m0 + warp * 16 + lane % 16) / heads, token0, s);
    const float scale[2] = {p.logit_cap > 0.f ? 1.f : factor[0], p.logit_cap > 0.f ? 1.f : factor[1]};
    return online_softmax<kTileN>(s, scale, kE4m3Headroom, 0.f, row_max, row_sum);
  };
  auto pack = [&](const Scores& s) {
#pragma unroll
    for (int k = 0; k < kTileN / 32; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = s + (k * 4 + i / 2 * 2) * 4 + i % 2 * 2;
        if constexpr (Traits::kSplit) {
          split_e4m3x4(pair[0], pair[1], pair[4], pair[5], prob[k][i], rest[k][i]);
        } else {
          prob[k][i] = to_e4m3x4(pair[0], pair[1], pair[4], pair[5]);
        }
      }
    }
  };

  auto write_rows = [&](const Task& done, const float (&top)[2], const float (&sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = done.m0 + warp * 16 + half * 8 + lane / 4;
      const RowWriter<T> writer(p, done.work, done.item, done.kv_head, m, top[half], quad_sum(sum[half]),
                                lane % 4 == 0);
      writer.template store_even_odd<kD / 16>(lane % 4 * 4, o, half * 2);
    }
  };

  begin_task(std::true_type());
  Scores s;
  wait_for_keys(0);
  turn.take();
  start_scores(s);
  turn.give();
  wgmma_wait<0>();
  wgmma_pin(s);
  release_keys();
  shrink = softmax(0, s);
  pack(s);
  for (int j = 1;; ++j) {
    const int n_before = n;
    const bool starts = j == tiles;
    if (starts) {
      const int next = next_task<Traits>(tasks, n + 1);
      if (Traits::kMaxTasks == 1 || next == Traits::kMaxTasks) break;
      n = next;
      begin_task(std::bool_constant<Traits::kMaxTasks == 1>());  // kMaxTasks 1: never reached
      j = 0;
    }
    float top[2], sum[2];
    auto begin_rows = [&] {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[half] = row_max[half], sum[half] = row_sum[half];
        row_max[half] = neg_inf(), row_sum[half] = 0.f;
      }
    };
    auto finish_rows = [&] {
      write_rows(tasks[n_before], top, sum);
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) o[i] = 0.f;
    };
    mbarrier_wait(block.values_full(values.stage), values.parity);
    wait_for_keys(j);
    if constexpr (Traits::kOverlap) {
      Scores s;
      Product product;
      turn.take();
      start_scores(s);
      start_product(0, product);  // of the tile before; runs during the softmax
      turn.give();
      wgmma_wait<1>();
      wgmma_pin(s);
      release_keys();
      if (starts) begin_rows();
      const float2 next_shrink = softmax(j, s);
      finish_product(0, product);
      release_values();
      if (starts) finish_rows();
      shrink = next_shrink;
      pack(s);
    } else {
      turn.take();
      add_values(s);
      start_scores(s);
      turn.give();
      release_values();
      if (starts) begin_rows(), finish_rows();
      wgmma_wait<0>();
      wgmma_pin(s);
      release_keys();
      shrink = softmax(j, s);
      pack(s);
    }
  }
  mbarrier_wait(block.values_full(values.stage), values.parity);
  turn.take();
  add_values(s);
  turn.give(true);
  write_rows(tasks[n], row_max, row_sum);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    gqa_fp8_sm90_partial_kernel(const __grid_constant__ TreeVerifyParams p, const __grid_constant__ Pages pages) {
  using Storage = typename Traits::Storage;
  extern __shared__ __align__(1024) char swizzled_smem[];
  Storage& storage = *reinterpret_cast<Storage*>(swizzled_smem);
  const GqaFp8Block<Traits> block{{smem_address(swizzled_smem)}};
  if (Traits::kPaged && threadIdx.x == 0) pages.prefetch();
  const int warp = threadIdx.x / 32, helper = warp - Traits::kConsumers / 32;
  find_tasks<Traits>(p, storage.tasks);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Traits::kStages; ++s) {
      mbarrier_init(block.full(s), 32 * Traits::kProducers);
      mbarrier_init(block.empty(s), Traits::kConsumers / 32 + 64);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(block.values_full(i), 64);
      mbarrier_init(block.values_empty(i), Traits::kConsumers / 32);
    }
    if (Traits::kMaxTasks > 1) QueryBarriers<Traits>{block.base}.init();
    fence_mbarrier_init();
  }
  allow_dependents();
  __syncthreads();
  if (next_task<Traits>(storage.tasks, 0) == Traits::kMaxTasks) return;

  if (helper >= 0) {
    if constexpr (Traits::kConsumerRegisters < 256) shrink_registers<Traits::kHelperRegisters>();
    if (helper >= Traits::kProducers) {
      gqa_fp8_transpose<Traits>(block, storage.tasks, helper - Traits::kProducers);
    } else if constexpr (Traits::kMaxTasks > 1) {
      produce_tasks<Traits>(p, storage.tasks, pages, block, block.raw_q(), helper);
    } else {
      const Task& task = storage.tasks[0];
      produce<Traits>(p, task.work, pages, block, task.kv_head, helper, task_tiles<Traits>(task));
    }
  } else {
    if constexpr (Traits::kConsumerRegisters < 256) grow_registers<Traits::kConsumerRegisters>();
    gqa_fp8_consume<Traits>(p, storage.tasks, pages, block, storage.q_unscale);
  }
}

}  // namespace ddtree
