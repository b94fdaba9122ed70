// ddtree_index_logits on sm_90a. A warpgroup takes 64 keys at a time as the A operand of wgmma, from global memory into
// registers. The queries of a request are the B operand, 64 heads per row, filled up with zeros. They stay in shared
// memory. While one warpgroup adds up heads or waits for keys, the others multiply.
//
// The order of the 128 dimensions within a product is free as long as both operands agree. A lane loads 16 bytes of a
// key, dimensions 32 c + 8 (lane % 4) to + 7, and feeds them to two consecutive steps of 16 dimensions. place_queries
// puts the dimensions of the queries into the same order.
#include "common/wgmma.cuh"
#include "indexer/launch.h"
#include "indexer/tiles.cuh"

namespace ddtree {
namespace {

using Traits = IndexSm90Traits;
constexpr int kChunks = kIndexHeadDim / 32;  // of 32 dimensions: 16 bytes per lane of a quad
constexpr int kWarpKeys = Traits::kTileKeys / 4;
constexpr int kBlockBytes = kMaxIndexHeads * kSwizzleRowBytes;  // a row's queries are two swizzled blocks
constexpr int kRowBytes = Traits::kRowBytes;
static_assert(kRowBytes == 2 * kBlockBytes);

// One warp's keys: rows g = lane / 4 and g + 8.
struct KeyTile {
  uint4 low[kChunks], high[kChunks];
};

// Keys past the length may hold any bits. That does no harm: a key affects only its own logit, and that one is not
// written.
__device__ __forceinline__ void load_keys(KeyTile& keys, const __nv_bfloat16* source) {
  const int lane = threadIdx.x % 32;
  source += lane / 4 * kIndexHeadDim + lane % 4 * 8;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    keys.low[c] = load_streaming(source + 32 * c);
    keys.high[c] = load_streaming(source + 8 * kIndexHeadDim + 32 * c);
  }
}

// Byte offset in a row's queries of dimensions 32 c + 8 j + 2 pair and + 1 of a head. They are the values that lane j
// of a quad holds in 32-bit register `pair` of chunk c: step pair / 2, and the lower or upper half of its 16
// dimensions.
__device__ __forceinline__ int query_offset(int head, int c, int j, int pair) {
  return c / 2 * kBlockBytes + swizzled(head, c % 2 * 4 + pair) + 4 * j;
}

struct Queries {
  char* rows;      // [R] rows of kRowBytes, 1024-byte aligned
  float* weights;  // [R, kMaxIndexHeads]
  int* lengths;    // [R] keys that each row sees
};

__device__ __forceinline__ void place_queries(const Queries& queries, const IndexLogitsParams& p, int request,
                                              int limit) {
  const int64_t first_row = int64_t{request} * p.rows;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.rows * kMaxIndexHeads * kChunks * 4; i += Traits::kThreads) {
    const int j = i % 4, c = i / 4 % kChunks;
    const int head = i / (4 * kChunks) % kMaxIndexHeads, row = i / (4 * kChunks * kMaxIndexHeads);
    uint4 q = {};
    if (head < p.heads) {
      q = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) + (first_row + row) * p.q_stride_row +
                                          head * p.q_stride_head + 32 * c + 8 * j);
    }
    const uint32_t pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      *reinterpret_cast<uint32_t*>(queries.rows + row * kRowBytes + query_offset(head, c, j, pair)) = pairs[pair];
    }
  }
  for (int i = threadIdx.x; i < p.rows * kMaxIndexHeads; i += Traits::kThreads) {
    const int row = i / kMaxIndexHeads, head = i % kMaxIndexHeads;
    queries.weights[i] = head < p.heads ? p.weights[(first_row + row) * p.weight_stride + head] : 0.0f;
  }
  if (threadIdx.x < p.rows) queries.lengths[threadIdx.x] = min(p.seq_lens[first_row + threadIdx.x], limit);
  fence_async_proxy();
}

// The products of a tile's keys with the heads of one row, whose descriptor is `row`.
__device__ __forceinline__ void multiply(float (&d)[kMaxIndexHeads / 2], const KeyTile& keys, uint64_t row) {
  wgmma_pin(d);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const uint64_t at = row + ((c / 2 * kBlockBytes + c % 2 * 64) >> 4);
    const uint4 low = keys.low[c], high = keys.high[c];
    wgmma_rs_k_major(d, {low.x, high.x, low.y, high.y}, at, c > 0);
    wgmma_rs_k_major(d, {low.z, high.z, low.w, high.w}, at + (32 >> 4), true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
}

// Sums over heads. Lanes 4 g to + 3 return the logit of the warp's key g + lane % 4 / 2 * 8.
__device__ __forceinline__ float add_heads(const float (&d)[kMaxIndexHeads / 2], const float* weights) {
  const int lane = threadIdx.x % 32;
  float sums[4] = {};  // of key g, even and odd heads, then of key g + 8
#pragma unroll
  for (int i = 0; i < kMaxIndexHeads / 8; ++i) {
    const float2 weight = *reinterpret_cast<const float2*>(weights + 8 * i + lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] = fmaf(fmaxf(d[4 * i + j], 0.0f), j % 2 ? weight.y : weight.x, sums[j]);
  }
  // Each half of the quad gives away the sum that it does not keep.
  const float low = sums[0] + sums[1], high = sums[2] + sums[3];
  const bool upper = lane & 2;
  const float kept = (upper ? high : low) + __shfl_xor_sync(kWholeWarp, upper ? low : high, 2);
  return kept + __shfl_xor_sync(kWholeWarp, kept, 1);
}

// Tiles [begin, end) of one request, by the whole block. A warpgroup's next tile arrives in registers during the
// products of the last row, and the one after that is brought into the L2 cache.
__device__ __forceinline__ void process(const Queries& queries, const IndexLogitsParams& p, int request, int begin,
                                        int end, int limit) {
  const int lane = threadIdx.x % 32, count = keys_of(p, request, limit);
  const int first = threadIdx.x % 128 / 32 * kWarpKeys;  // the warp's keys in a tile
  const uint64_t rows =
      wgmma_descriptor(static_cast<uint32_t>(__cvta_generic_to_shared(queries.rows)), 0, kSwizzleAtomBytes);
  KeyTile keys = {};
  // Null where the tile or the warp's part of it is past the last key, whose page need not exist.
  const auto source_of = [&](int tile) -> const __nv_bfloat16* {
    const int key = tile * Traits::kTileKeys + first;
    return tile < end && key < count ? key_at(p, request, key) : nullptr;
  };
  const auto prefetch = [&](const __nv_bfloat16* source) {
    if (source != nullptr && lane == 0) prefetch_keys<kWarpKeys>(source);
  };
  int tile = begin + threadIdx.x / 128;
  if (const auto* source = source_of(tile)) load_keys(keys, source);  // in flight while the queries arrive
  const auto* next = source_of(tile + Traits::kWarpgroups);
  prefetch(next);
  __syncthreads();  // every warp is done with the previous request's queries
  place_queries(queries, p, request, limit);
  __syncthreads();

  for (; tile < end; tile += Traits::kWarpgroups) {
    const auto* after = source_of(tile + 2 * Traits::kWarpgroups);
    prefetch(after);
    const int key = tile * Traits::kTileKeys + first + lane % 4 / 2 * 8 + lane / 4;
    float* out = p.out + int64_t{request} * p.rows * p.out_stride + key;
    const auto write = [&](const float (&d)[kMaxIndexHeads / 2], int row) {
      const float logit = add_heads(d, queries.weights + row * kMaxIndexHeads);
      if (lane % 2 == 0 && key < queries.lengths[row]) out[row * p.out_stride] = logit;
    };
    float d[kMaxIndexHeads / 2];
    const int last = p.rows - 1;
#pragma unroll 1
    for (int row = 0; row < last; ++row) {
      multiply(d, keys, rows + (row * kRowBytes >> 4));
      write(d, row);
    }
    multiply(d, keys, rows + (last * kRowBytes >> 4));
    if (next != nullptr) load_keys(keys, next);
    next = after;
    write(d, last);
  }
}

__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    index_logits_sm90_kernel(const __grid_constant__ IndexLogitsParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) char shared[];
  auto* weights = reinterpret_cast<float*>(shared + p.rows * kRowBytes);
  const Queries queries{shared, weights, reinterpret_cast<int*>(weights + p.rows * kMaxIndexHeads)};
  const int limit = static_cast<int>(p.limit());
  for_each_request<Traits>(p, limit,
                           [&](int request, int begin, int end) { process(queries, p, request, begin, end, limit); });
}

}  // namespace

cudaError_t launch_sm90(const IndexLogitsParams& p, cudaStream_t stream) {
  return launch_index<Traits>(index_logits_sm90_kernel, p, p.rows * Traits::kSharedPerRow, stream);
}

}  // namespace ddtree
