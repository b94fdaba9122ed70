// ddtree_index_logits for every architecture. A warp takes 32 keys at a time as the A operand of mma.sync, straight
// from global memory into registers: each key is read once and by one warp, so shared memory would only add a copy. The
// queries of a request are the B operand and stay in shared memory. Heads are summed in a fixed order, so a row's
// logits do not depend on the batch around it.
//
// The order of the 128 dimensions within a product is free as long as both operands agree. A lane therefore loads 16
// bytes, dimensions 32 c + 8 (lane % 4) to + 7, and feeds them to two consecutive steps of 16 dimensions.
#include "common/mma_sm80.cuh"
#include "common/use_sm90.h"
#include "indexer/launch.h"
#include "indexer/tiles.cuh"

namespace ddtree {
namespace {

constexpr int kChunks = kIndexHeadDim / 32;  // of 32 dimensions: 16 bytes per lane of a quad
constexpr int kMTiles = IndexTraits::kTileKeys / 16;

// One warp's keys: of m tile i, rows g = lane / 4 and g + 8.
struct KeyTile {
  uint4 low[kMTiles][kChunks], high[kMTiles][kChunks];
};

// 16 bytes of keys that are read once.
__device__ __forceinline__ uint4 load_streaming(const __nv_bfloat16* source) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}

// Brings a tile into the L2 cache. One lane calls it.
__device__ __forceinline__ void prefetch_keys(const __nv_bfloat16* source) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source),
               "n"(IndexTraits::kTileKeys * kIndexHeadDim * int(sizeof(__nv_bfloat16))));
}

// The last tile of a request may hold keys past the length, with any bits in them. That does no harm: a key affects
// only its own logit, and that one is not written.
__device__ __forceinline__ void load_keys(KeyTile& keys, const __nv_bfloat16* source) {
  const int lane = threadIdx.x % 32;
  source += lane / 4 * kIndexHeadDim + lane % 4 * 8;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      keys.low[m][c] = load_streaming(source + 16 * m * kIndexHeadDim + 32 * c);
      keys.high[m][c] = load_streaming(source + (16 * m + 8) * kIndexHeadDim + 32 * c);
    }
  }
}

// Shared memory of a block: the queries of one request in the order in which lanes read them, then their weights.
struct Queries {
  uint4* fragments;  // [R * H / 8, kChunks, 32]
  float* weights;    // [R, H]
};

__device__ __forceinline__ void load_queries(const Queries& queries, const IndexLogitsParams& p, int request) {
  const int groups = p.heads / kIndexHeadGroup, first_row = request * p.rows;
  for (int i = threadIdx.x; i < p.rows * groups * kChunks * 32; i += IndexTraits::kThreads) {
    const int lane = i % 32, chunk = i / 32 % kChunks, group = i / 32 / kChunks;
    const auto* source = static_cast<const __nv_bfloat16*>(p.q) + (first_row + group / groups) * p.q_stride_row +
                         (group % groups * kIndexHeadGroup + lane / 4) * p.q_stride_head + 32 * chunk + lane % 4 * 8;
    queries.fragments[i] = *reinterpret_cast<const uint4*>(source);
  }
  for (int i = threadIdx.x; i < p.rows * p.heads; i += IndexTraits::kThreads) {
    queries.weights[i] = p.weights[(first_row + i / p.heads) * p.weight_stride + i % p.heads];
  }
}

// The logits of one query row and the warp's 32 keys, one per lane: lane 4 g + j has key 8 j + g.
__device__ __forceinline__ float row_logits(const KeyTile& keys, const Queries& queries, int row, int heads) {
  const int lane = threadIdx.x % 32, groups = heads / kIndexHeadGroup;
  const uint4* fragments = queries.fragments + row * groups * kChunks * 32 + lane;
  const float* weights = queries.weights + row * heads + lane % 4 * 2;
  float sums[2 * kMTiles] = {};  // of this lane's two heads per group; [j] is key 8 j + g
#pragma unroll 1                 // two groups at a time do not fit the registers
  for (int group = 0; group < groups; ++group) {
    float d[kMTiles][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint4 q = fragments[(group * kChunks + c) * 32];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const uint4 low = keys.low[m][c], high = keys.high[m][c];
        mma_m16n8k16<__nv_bfloat16>(d[m], {low.x, high.x, low.y, high.y}, q.x, q.y);
        mma_m16n8k16<__nv_bfloat16>(d[m], {low.z, high.z, low.w, high.w}, q.z, q.w);
      }
    }
    const float2 weight = *reinterpret_cast<const float2*>(weights + group * kIndexHeadGroup);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      sums[2 * m] += fmaxf(d[m][0], 0.0f) * weight.x + fmaxf(d[m][1], 0.0f) * weight.y;
      sums[2 * m + 1] += fmaxf(d[m][2], 0.0f) * weight.x + fmaxf(d[m][3], 0.0f) * weight.y;
    }
  }
  // Sums over the quad that leave sums[j] in lane j: each lane gives away the half that it does not keep.
  static_assert(kMTiles == 2, "four sums for the four lanes of a quad");
  const bool upper = lane & 2, odd = lane & 1;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float received = __shfl_xor_sync(kWholeWarp, upper ? sums[j] : sums[j + 2], 2);
    sums[j] = (upper ? sums[j + 2] : sums[j]) + received;
  }
  const float received = __shfl_xor_sync(kWholeWarp, odd ? sums[0] : sums[1], 1);
  return (odd ? sums[1] : sums[0]) + received;
}

__device__ __forceinline__ void write_logits(const KeyTile& keys, const Queries& queries, const IndexLogitsParams& p,
                                             int request, int tile, int limit) {
  const int lane = threadIdx.x % 32, key = tile * IndexTraits::kTileKeys + lane % 4 * 8 + lane / 4;
  for (int i = 0; i < p.rows; ++i) {
    const int64_t row = int64_t{request} * p.rows + i;
    const float logit = row_logits(keys, queries, i, p.heads);
    if (key < min(p.seq_lens[row], limit)) p.out[row * p.out_stride + key] = logit;
  }
}

// Tiles [begin, end) of one request, by the whole block. Registers hold one tile per warp, so the next one is brought
// into the L2 cache: without it the memory would wait for the multiplications.
__device__ __forceinline__ void process(const Queries& queries, const IndexLogitsParams& p, int request, int begin,
                                        int end, int limit) {
  KeyTile keys;
  const auto tile_keys = [&](int tile) { return key_at(p, request, tile * IndexTraits::kTileKeys); };
  const auto load = [&](int tile) {
    if (tile < end) load_keys(keys, tile_keys(tile));
    const int next = tile + IndexTraits::kWarps;
    if (next < end && threadIdx.x % 32 == 0) prefetch_keys(tile_keys(next));
  };
  int tile = begin + threadIdx.x / 32;
  load(tile);       // in flight while the queries arrive
  __syncthreads();  // every warp is done with the previous request's queries
  load_queries(queries, p, request);
  __syncthreads();
  for (; tile < end; tile += IndexTraits::kWarps, load(tile)) write_logits(keys, queries, p, request, tile, limit);
}

__global__ void __launch_bounds__(IndexTraits::kThreads, IndexTraits::kBlocks)
    index_logits_kernel(const __grid_constant__ IndexLogitsParams p) {
  extern __shared__ uint4 shared[];
  const Queries queries{shared,
                        reinterpret_cast<float*>(shared + p.rows * p.heads * IndexTraits::kQueryBytes / sizeof(uint4))};
  const int limit = static_cast<int>(p.limit());
  for_each_request<IndexTraits>(
      p, limit, [&](int request, int begin, int end) { process(queries, p, request, begin, end, limit); });
}

}  // namespace

cudaError_t launch(const IndexLogitsParams& p, cudaStream_t stream) {
  if (p.bs == 0 || p.limit() == 0) return cudaSuccess;  // an empty grid is a launch error
#ifdef DDTREE_SM90
  if (use_sm90()) return launch_sm90(p, stream);
#endif
  return launch_index<IndexTraits>(index_logits_kernel, p, p.rows * p.heads * IndexTraits::kSharedPerHead, stream);
}

}  // namespace ddtree
