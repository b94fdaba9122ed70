// Tree-verify attention over fp8 MLA latents with fp8 wgmma (sm_90a). Computes what mla_sm90.cuh computes; Q, P and V
// are treated as in gqa_fp8_sm90.cuh: Q and P are rounded to e4m3 or the sum of two e4m3 numbers, V is transposed.
//
// The block is as in mla_sm90.cuh, with a ring of stages. Each of the two consumer groups owns half of the 512 value
// dimensions of O, and computes S and P of every other tile for both groups: group t % 2 those of tile t. Thread i of
// one group passes P and the running maximum to thread i of the other. They use a mailbox that no other thread touches,
// and because they take turns, one mailbox per pair is enough. A group computes S of its tile, receives P of the tile
// before, computes P, and then adds both tiles to O. The helper warps load, by page (pages.cuh) or by slot, and
// transpose.
//
// Barriers and who arrives at them:
//   full[stage]          the copies of the producers' lanes, or the lane that copies pages for all of them
//   empty[stage]         the warps of the group that computes S of the stage, and the transposing lanes
//   values_full[stage]   the transposing lanes
//   values_empty[stage]  all consumer warps
//   posted[group]        the group's threads, once P is in the mailbox
//   meeting              all consumers, before the first tile and after the last
#pragma once

#include "tree_verify/sm90/gqa_fp8_sm90.cuh"
#include "tree_verify/sm90/mla_sm90.cuh"

namespace ddtree {

// What every thread of a block knows.
template <typename Traits>
struct MlaFp8Block {
  using Storage = typename Traits::Storage;
  const WorkItem& work;
  uint32_t base;
  // Not kept in registers: there is none left.
  __device__ __forceinline__ int tiles() const { return ceil_div(work.end - work.begin, Traits::kTileN); }
  __device__ __forceinline__ int m0() const { return int(blockIdx.x) * Traits::kTileM; }
  __device__ __forceinline__ uint32_t at(size_t offset, int index = 0) const {
    return base + uint32_t(offset) + index * 8;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return at(offsetof(Storage, full), stage); }
  __device__ __forceinline__ uint32_t empty(int stage) const { return at(offsetof(Storage, empty), stage); }
  __device__ __forceinline__ uint32_t values_full(int stage) const { return at(offsetof(Storage, values_full), stage); }
  __device__ __forceinline__ uint32_t values_empty(int stage) const {
    return at(offsetof(Storage, values_empty), stage);
  }
  __device__ __forceinline__ uint32_t posted(int group) const { return at(offsetof(Storage, posted), group); }
  __device__ __forceinline__ uint32_t values() const { return base + offsetof(Storage, values); }
  // An operand of S is a part of Q or, from kParts on, a stage. Its last 64 dimensions are apart: two operands share a
  // block of 128-byte rows, which is faster, but TMA needs a block of [64][64 bytes].
  __device__ __forceinline__ uint32_t operand(int which) const {
    return base + offsetof(Storage, operands) + which * 4 * Traits::kBlockBytes;
  }
  __device__ __forceinline__ uint32_t operand_end(int which) const {
    const uint32_t ends = base + offsetof(Storage, operands) + 16 * Traits::kBlockBytes;
    if (Traits::kPaged) return ends + which * (Traits::kBlockBytes / 2);
    return ends + which / 2 * Traits::kBlockBytes + which % 2 * 64;
  }
  // Address of 16-byte chunk `chunk` (0 to 35) of a row of an operand.
  __device__ __forceinline__ uint32_t chunk_at(int which, int row, int chunk) const {
    if (chunk < 32) return operand(which) + chunk / 8 * Traits::kBlockBytes + swizzled(row, chunk % 8);
    if (Traits::kPaged) return operand_end(which) + half_swizzled(row, chunk - 32);
    return operand_end(which) - which % 2 * 64 + swizzled(row, which % 2 * 4 + chunk - 32);
  }
  // Barrier of the two consumer groups; `time` counts its uses in the block.
  __device__ __forceinline__ void meet(int time) const {
    mbarrier_arrive(at(offsetof(Storage, meeting)));
    mbarrier_wait(at(offsetof(Storage, meeting)), time & 1);
  }
};

// A warp copies the first `tiles` tiles by page.
template <typename Traits>
__device__ __forceinline__ void mla_fp8_copy_pages(const TreeVerifyParams& p, const WorkItem& work, const Pages& pages,
                                                   const MlaFp8Block<Traits>& block, int tiles) {
  static_assert(Traits::kTileN == kBoxTokens);
  auto load_slot = [&](int tile) { return work_slot(p, work, work.begin + tile * Traits::kTileN); };
  int next = load_slot(0);
  RingPosition<Traits::kStages> at;
  for (int t = 0; t < tiles; ++t, at.advance()) {
    const int operand = Traits::kParts + at.stage, slot = next;
    next = load_slot(t + 1);
    const uint32_t full = block.full(at.stage);
    mbarrier_wait(block.empty(at.stage), at.parity ^ 1);
    if (threadIdx.x % 32 != 0) continue;
    mbarrier_expect(full, Traits::kTileN * kMlaQkDim);
    mbarrier_arrive(full, 64);
#pragma unroll
    for (int b = 0; b < 4; ++b)
      copy_box(block.operand(operand) + b * Traits::kBlockBytes, pages.k, b * kSwizzleRowBytes, 0, slot, full);
    copy_box(block.operand_end(operand), pages.rest, kMlaVDim, 0, slot, full);
  }
  __syncwarp();
}

// A producer warp copies 32 tokens of every tile. Lane i looks up the slot of token i.
template <typename Traits>
__device__ __forceinline__ void mla_fp8_produce(const TreeVerifyParams& p, const WorkItem& work, const Pages& pages,
                                                const MlaFp8Block<Traits>& block, int warp) {
  const int lane = threadIdx.x % 32, token0 = warp * 32;
  const char* const cache = static_cast<const char*>(p.k_cache);
  auto load_slot = [&](int tile) { return work_slot(p, work, work.begin + tile * Traits::kTileN + token0 + lane); };
  const int paged = pages.tiles<Traits>(work);
  if (Traits::kPaged && paged > 0) {
    if (warp == 0) mla_fp8_copy_pages<Traits>(p, work, pages, block, paged);
    meet_producers(64);
  }
  int next = load_slot(paged);
  RingPosition<Traits::kStages> at{paged % Traits::kStages, paged / Traits::kStages & 1};
  for (int t = paged; t < block.tiles(); ++t, at.advance()) {
    const int operand = Traits::kParts + at.stage, slot = next;
    next = load_slot(t + 1);
    mbarrier_wait(block.empty(at.stage), at.parity ^ 1);
#pragma unroll 4
    for (int i = 0; i < 8; ++i) {  // eight lanes copy 128 bytes of one token
      const int token = i * 4 + lane / 8, s = __shfl_sync(0xffffffff, slot, token);
      const char* const from = cache + uint64_t(max(s, 0)) * p.k_stride_slot + lane % 8 * 16;
      const uint32_t to = block.chunk_at(operand, token0 + token, lane % 8);
#pragma unroll
      for (int b = 0; b < 4; ++b) cp_async_16(to + b * Traits::kBlockBytes, from + b * 128, s >= 0);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // four lanes copy the last 64 bytes
      const int token = i * 8 + lane / 4, s = __shfl_sync(0xffffffff, slot, token);
      cp_async_16(block.chunk_at(operand, token0 + token, 32 + lane % 4),
                  cache + uint64_t(max(s, 0)) * p.k_stride_slot + 512 + lane % 4 * 16, s >= 0);
    }
    mbarrier_arrive_after_copies(block.full(at.stage));
  }
  cp_async_wait_all();  // no thread may exit with copies in flight
}

// A transposing warp takes 32 tokens of every tile.
template <typename Traits>
__device__ __forceinline__ void mla_fp8_transpose(const MlaFp8Block<Traits>& block, int warp) {
  const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
  RingPosition<Traits::kStages> from;
  RingPosition<2> to;
  for (int t = 0; t < block.tiles(); ++t, from.advance(), to.advance()) {
    mbarrier_wait(block.full(from.stage), from.parity);
    mbarrier_wait(block.values_empty(to.stage), to.parity ^ 1);
    constexpr int kBatch = 4;  // loads in flight
#pragma unroll 2
    for (int d0 = 0; d0 < kMlaVDim / 16; d0 += kBatch) {
      uint32_t r[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        ldmatrix_x4_trans(r[i], block.chunk_at(Traits::kParts + from.stage, warp * 32 + lane, d0 + i));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int d = (d0 + i) * 16 + matrix % 2 * 8 + row;
        store_transposed(block.values() + swizzled(d, to.stage * 4 + warp * 2 + matrix / 2), r[i]);
      }
    }
    fence_async_proxy();
    mbarrier_arrive(block.values_full(to.stage));
    mbarrier_arrive(block.empty(from.stage));
  }
}

// The consumers load the 64 packed rows of Q, with zeros for rows that do not exist. Eight threads share a row, and
// each thread takes two rows. They are loaded together, but converted by a loop: the first time, code comes from DRAM.
template <typename Traits>
__device__ __forceinline__ void mla_fp8_load_q(const TreeVerifyParams& p, const WorkItem& work,
                                               const MlaFp8Block<Traits>& block, float* q_unscale) {
  using T = typename Traits::Element;
  constexpr int kEach = kMlaQkDim / 64, kStep = 32;
  static_assert(Traits::kTileM == 2 * kStep);
  using Row = uint4[kEach];
  const int part = threadIdx.x % 8;
  auto load = [&](int row, Row& to) {
    const int m = block.m0() + row, node = m / p.h_q;
    const bool exists = node < work.request.num_nodes;
    const T* from = static_cast<const T*>(p.q) + part * 8;
    if (exists) from += (work.request.row0 + int64_t(node)) * p.q_stride_t + m % p.h_q * p.q_stride_h;
#pragma unroll
    for (int d = 0; d < kEach; ++d)
      to[d] = exists ? __ldg(reinterpret_cast<const uint4*>(from + d * 64)) : make_uint4(0, 0, 0, 0);
  };
  Row values, following;
  load(threadIdx.x / 8, values);
  load(threadIdx.x / 8 + kStep, following);
#pragma unroll 1
  for (int row = threadIdx.x / 8; row < Traits::kTileM; row += kStep) {
    uint32_t top = 0;  // the largest magnitudes, which compare as integers
#pragma unroll
    for (int d = 0; d < kEach; ++d) {
      for (const uint32_t word : {values[d].x, values[d].y, values[d].z, values[d].w})
        top = __vmaxu2(top, word & 0x7fff7fff);
    }
    const float2 tops = unpack2<T>(top);
    const float largest = quad_max(fmaxf(tops.x, tops.y));
    const float scale = e4m3_scale(fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 4)));
    if (part == 0) q_unscale[row] = 1.f / scale;
#pragma unroll
    for (int d = 0; d < kEach; ++d) {
      const uint32_t words[4] = {values[d].x, values[d].y, values[d].z, values[d].w};
      uint32_t hi[4], lo[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 v = unpack2<T>(words[w]);
        split_e4m3x2(make_float2(v.x * scale, v.y * scale), hi[w], lo[w]);
      }
      const int chunk = d * 4 + part / 2;
      asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(block.chunk_at(0, row, chunk) + part % 2 * 8),
                   "r"(hi[0] | hi[1] << 16), "r"(hi[2] | hi[3] << 16)
                   : "memory");
      if constexpr (Traits::kSplit)
        asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(block.chunk_at(1, row, chunk) + part % 2 * 8),
                     "r"(lo[0] | lo[1] << 16), "r"(lo[2] | lo[3] << 16)
                     : "memory");
      values[d] = following[d];
    }
  }
}

template <typename Traits, int kGroup>
struct MlaFp8Consumer {
  using T = typename Traits::Element;
  static constexpr int kTileN = Traits::kTileN, kSteps = Traits::kSteps, kParts = Traits::kParts;
  using Prob = uint32_t[kParts][kSteps][4];

  const TreeVerifyParams& p;
  const WorkItem& work;
  const MlaFp8Block<Traits>& block;
  const LogitScale logit_scale;
  const int paged;  // leading tiles that are loaded by page
  const int thread, lane;
  float o[128], s[32], row_max[2], row_sum[2], factor[2];

  __device__ __forceinline__ MlaFp8Consumer(const TreeVerifyParams& p, const WorkItem& work,
                                            const MlaFp8Block<Traits>& block, const float* q_unscale, int paged)
      : p(p),
        work(work),
        block(block),
        logit_scale(make_logit_scale(p.sm_scale, load_scale(p.k_scale), p.logit_cap)),
        paged(paged),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32) {
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[half] = neg_inf(), row_sum[half] = 0.f;
      factor[half] = logit_scale.factor * q_unscale[thread / 32 * 16 + half * 8 + lane / 4];
    }
  }

  // S = Q K^T of a tile of this group. Complete on return.
  __device__ __forceinline__ void scores(int tile) {
    // The shuffle tells the compiler that a warp's threads agree, so that descriptors are in uniform registers.
    const int stage = Traits::kStages == 2 ? kGroup : __shfl_sync(0xffffffff, tile % Traits::kStages, 0);
    const uint64_t operands = wgmma_descriptor(block.operand(0), 0, kSwizzleAtomBytes);
    const uint64_t k = advanced(operands, block.operand(kParts + stage) - block.operand(0));
    const uint64_t ends = Traits::kPaged ? wgmma_half_descriptor(block.operand_end(0))
                                         : wgmma_descriptor(block.operand_end(0), 0, kSwizzleAtomBytes);
    const uint64_t k_end = advanced(ends, block.operand_end(kParts + stage) - block.operand_end(0));
    mbarrier_wait(block.full(stage), tile / Traits::kStages & 1);
    // kSplit: there is no register left for `paged`.
    if (!Traits::kPaged || Traits::kSplit || tile >= paged) fence_async_proxy();
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t q = advanced(operands, block.operand(part) - block.operand(0));
      const uint64_t q_end = advanced(ends, block.operand_end(part) - block.operand_end(0));
#pragma unroll
      for (int i = 0; i < kMlaVDim / 32; ++i) {
        const int at = i / 4 * Traits::kBlockBytes + i % 4 * 32;
        wgmma_e4m3(s, advanced(q, at), advanced(k, at), part + i > 0);
      }
#pragma unroll
      for (int i = 0; i < (kMlaQkDim - kMlaVDim) / 32; ++i)
        wgmma_e4m3(s, advanced(q_end, i * 32), advanced(k_end, i * 32), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(block.empty(stage));
  }

  // Turns s into P. Returns the factors to multiply O by.
  __device__ __forceinline__ float2 softmax(int tile, Prob& prob) {
    const int token0 = work.begin + tile * kTileN;
    if (p.logit_cap > 0.f) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = logit_scale.capped(s[i] * factor[i % 4 / 2]);
    }
    if (needs_mask(work.request, p.sliding_window, token0, kTileN))
      mask_scores<kTileN>(p, work, (block.m0() + thread / 32 * 16 + lane % 16) / p.h_q, token0, s);
    const float scale[2] = {p.logit_cap > 0.f ? 1.f : factor[0], p.logit_cap > 0.f ? 1.f : factor[1]};
    const float2 shrink = online_softmax<kTileN>(s, scale, kE4m3Headroom, 0.f, row_max, row_sum);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = s + (k * 4 + i / 2 * 2) * 4 + i % 2 * 2;
        if constexpr (Traits::kSplit) {
          split_e4m3x4(pair[0], pair[1], pair[4], pair[5], prob[0][k][i], prob[1][k][i]);
        } else {
          prob[0][k][i] = to_e4m3x4(pair[0], pair[1], pair[4], pair[5]);
        }
      }
    }
    return shrink;
  }

  // Shared-memory addresses of this thread's part of the mailbox.
  __device__ __forceinline__ uint32_t mailed_prob(int i) const {
    return block.at(offsetof(typename Traits::Storage, mailbox)) + (i * 128 + thread) * 16;
  }
  __device__ __forceinline__ uint32_t mailed_maxima() const {
    return block.at(offsetof(typename Traits::Storage, mailbox) + offsetof(typename Traits::Mailbox, maxima), thread);
  }

  __device__ __forceinline__ void post(const Prob& prob) {
#pragma unroll
    for (int i = 0; i < kParts * kSteps; ++i) {
      const uint32_t (&v)[4] = prob[i / kSteps][i % kSteps];
      store_shared_16(mailed_prob(i), make_uint4(v[0], v[1], v[2], v[3]));
    }
    store_shared_pair(mailed_maxima(), row_max);
    mbarrier_arrive(block.posted(kGroup));
  }

  // Takes the other group's P and maxima. Returns the factors to multiply O by.
  __device__ __forceinline__ float2 receive(int tile, Prob& prob) {
    mbarrier_wait(block.posted(kGroup ^ 1), tile >> 1 & 1);
#pragma unroll
    for (int i = 0; i < kParts * kSteps; ++i) {
      uint32_t (&v)[4] = prob[i / kSteps][i % kSteps];
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                   : "r"(mailed_prob(i))
                   : "memory");
    }
    return take_maxima(mailed_maxima(), row_max, row_sum);
  }

  static __device__ __forceinline__ void copy(const Prob& from, Prob& to) {
#pragma unroll
    for (int i = 0; i < kParts * kSteps * 4; ++i)
      to[i / (kSteps * 4)][i / 4 % kSteps][i % 4] = from[i / (kSteps * 4)][i / 4 % kSteps][i % 4];
  }

  // O = O shrink + P V, for this group's dimensions.
  __device__ __forceinline__ void add_values(int tile, const Prob& prob, float2 shrink) {
    const int stage = tile & 1;
    const uint64_t v =
        wgmma_descriptor(block.values() + kGroup * 256 * kSwizzleRowBytes + stage * 64, 0, kSwizzleAtomBytes);
    mbarrier_wait(block.values_full(stage), tile >> 1 & 1);
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // 64 dimensions each, in the registers of s
      wgmma_pin(s);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kParts * kSteps; ++i)
        wgmma_e4m3(s, prob[i % kParts][i / kParts], advanced(v, part * 64 * kSwizzleRowBytes + i / kParts * 32), i > 0);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(s);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float& sum = o[part * 32 + i];
        sum = fmaf(sum, i % 4 / 2 == 0 ? shrink.x : shrink.y, s[i]);
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(block.values_empty(stage));
  }

  __device__ __forceinline__ void run() {
    Prob own, others;
    int tile = kGroup;
    for (; tile < block.tiles(); tile += 2) {
      scores(tile);
      const bool first = kGroup == 0 && tile == 0;  // the other group has no tile before
      float2 factors = make_float2(1.f, 1.f);
      if (!first) factors = receive(tile - 1, others);
      const float2 shrink = softmax(tile, own);
      post(own);
      if (first) copy(own, others), factors = shrink;
#pragma unroll 1
      for (int t = first ? tile : tile - 1; t <= tile; ++t) {
        add_values(t, others, factors);
        copy(own, others), factors = shrink;
      }
    }
    if (tile - 1 < block.tiles()) {  // the other group's last tile
      const float2 shrink = receive(tile - 1, others);
      add_values(tile - 1, others, shrink);
    }

    add_other_sums(block, block.at(offsetof(typename Traits::Storage, mailbox)), kGroup, thread, row_sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = block.m0() + thread / 32 * 16 + half * 8 + lane / 4;
      RowWriter<T>(p, work, blockIdx.y, 0, m, row_max[half], row_sum[half], kGroup == 0 && lane % 4 == 0)
          .template store_even_odd<16>(kGroup * 256 + lane % 4 * 4, o, half * 2);
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    mla_fp8_sm90_partial_kernel(const __grid_constant__ TreeVerifyParams p, const __grid_constant__ Pages pages) {
  using Storage = typename Traits::Storage;
  extern __shared__ __align__(1024) char sm90_smem[];
  Storage& storage = *reinterpret_cast<Storage*>(sm90_smem);
  WorkItem& work = storage.work;
  const MlaFp8Block<Traits> block{work, smem_address(sm90_smem)};
  if (threadIdx.x < 32) {
    WorkItem found = find_work(p, blockIdx.y, block.m0(), p.h_q);
    drop_unseen_nodes(p, found, block.m0(), Traits::kTileM, p.h_q, Traits::kTileN);
    if (threadIdx.x == 0) work = found;
  }
  if (threadIdx.x == 128) {
    if (Traits::kPaged) pages.prefetch();
    for (int i = 0; i < Traits::kStages; ++i) {
      mbarrier_init(block.full(i), 64);
      mbarrier_init(block.empty(i), 4 + 64);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(block.values_full(i), 64);
      mbarrier_init(block.values_empty(i), 8);
      mbarrier_init(block.posted(i), 128);
    }
    mbarrier_init(block.at(offsetof(Storage, meeting)), 256);
    fence_mbarrier_init();
  }
  __syncthreads();
  allow_dependents();
  if (work.index < 0) return;

  const int group = threadIdx.x / 128, helper = threadIdx.x / 32 - 8;
  if (group == 2) {
    shrink_registers<Traits::kHelperRegisters>();
    if (helper < 2) {
      mla_fp8_produce<Traits>(p, work, pages, block, helper);
    } else {
      mla_fp8_transpose<Traits>(block, helper - 2);
    }
  } else {
    grow_registers<Traits::kConsumerRegisters>();
    mla_fp8_load_q<Traits>(p, work, block, storage.q_unscale);
    fence_async_proxy();
    block.meet(0);
    if (group == 0) {
      MlaFp8Consumer<Traits, 0>(p, work, block, storage.q_unscale, pages.tiles<Traits>(work)).run();
    } else {
      MlaFp8Consumer<Traits, 1>(p, work, block, storage.q_unscale, pages.tiles<Traits>(work)).run();
    }
  }
}

}  // namespace ddtree
