// ddtree_index_logits on sm_90a. A warpgroup takes 64 keys at a time as the A operand of wgmma. Each warp copies its
// own 16 of them into a ring in shared memory, a few tiles ahead, and takes them into registers from there. The queries
// of a request are the B operand, 64 heads per row, filled up with zeros. While the heads of one row are added up, the
// products of the next row and of the other warpgroups run.
//
// The order of the 128 dimensions within a product is free as long as both operands agree. A lane reads 16 bytes of a
// key, dimensions 32 c + 8 (lane % 4) to + 7, and feeds them to two consecutive steps of 16 dimensions. The queries are
// put into the same order.
#include "common/cp_async.cuh"
#include "common/mbarrier.cuh"
#include "common/wgmma.cuh"
#include "indexer/launch.h"
#include "indexer/tiles.cuh"

namespace ddtree {
namespace {

using Traits = IndexSm90Traits;
constexpr int kChunks = kIndexHeadDim / 32;  // of 32 dimensions: 16 bytes per lane of a quad
constexpr int kChunkBytes = 64, kKeyBytes = kIndexHeadDim * 2;
constexpr int kBlockBytes = kMaxIndexHeads * kSwizzleRowBytes;  // a row's queries are two swizzled blocks
constexpr int kRowBytes = Traits::kRowBytes;
static_assert(kRowBytes == 2 * kBlockBytes);

// Shared memory of a block.
struct Block {
  char* queries;   // [R] rows of kRowBytes, 1024-byte aligned
  char* ring;      // of this warp: [stages] of kStageBytes
  float* weights;  // [R, kMaxIndexHeads]
  int* lengths;    // [R] keys that each row sees
  uint32_t full;   // of this warp: a barrier per stage, completed by the copy into it
  int stages;

  __device__ __forceinline__ Block(char* shared, int rows) : queries(shared), stages(Traits::stages(rows)) {
    const int warp = threadIdx.x / 32;
    char* rings = queries + rows * kRowBytes;
    ring = rings + warp * stages * Traits::kStageBytes;
    weights = reinterpret_cast<float*>(rings + Traits::kWarps * stages * Traits::kStageBytes);
    lengths = reinterpret_cast<int*>(weights + kMaxIndexRows * kMaxIndexHeads);
    full = smem_address(lengths + kMaxIndexRows) + warp * Traits::kMaxStages * static_cast<int>(sizeof(uint64_t));
  }
  __device__ __forceinline__ uint32_t barrier(int stage) const {
    return full + stage * static_cast<int>(sizeof(uint64_t));
  }
};

// The stage that a warp takes next.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1;
  }
};

// Copies a warp's keys into a stage whose former keys every lane has in registers. One lane calls it.
__device__ __forceinline__ void copy_keys(const Block& block, int stage, const __nv_bfloat16* source) {
  mbarrier_arrive_expecting(block.barrier(stage), Traits::kStageBytes);
  bulk_copy(smem_address(block.ring + stage * Traits::kStageBytes), source, Traits::kStageBytes, block.barrier(stage));
}

// One warp's keys: rows g = lane / 4 and g + 8.
struct KeyTile {
  uint4 low[kChunks], high[kChunks];
};

// A lane's 16 bytes of each chunk of a key. Keys are a multiple of 128 bytes apart, so the odd ones are read with the
// chunks of a pair exchanged: otherwise two keys would meet in each bank.
__device__ __forceinline__ void load_key(uint4 (&chunks)[kChunks], const char* key, bool odd) {
#pragma unroll
  for (int c = 0; c < kChunks; c += 2) {
    const uint4 a = *reinterpret_cast<const uint4*>(key + (c + odd) * kChunkBytes);
    const uint4 b = *reinterpret_cast<const uint4*>(key + (c + !odd) * kChunkBytes);
    chunks[c] = {odd ? b.x : a.x, odd ? b.y : a.y, odd ? b.z : a.z, odd ? b.w : a.w};
    chunks[c + 1] = {odd ? a.x : b.x, odd ? a.y : b.y, odd ? a.z : b.z, odd ? a.w : b.w};
  }
}

// Keys past the length may hold any bits. That does no harm: a key affects only its own logit, and that one is not
// written.
__device__ __forceinline__ void load_keys(KeyTile& keys, const char* stage) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const char* key = stage + row * kKeyBytes + lane % 4 * 16;
  load_key(keys.low, key, row % 2);
  load_key(keys.high, key + 8 * kKeyBytes, row % 2);
}

// Byte offset in a row's queries of dimensions 32 c + 8 j + 2 pair and + 1 of a head. They are the values that lane j
// of a quad holds in 32-bit register `pair` of chunk c: step pair / 2, and the lower or upper half of its 16
// dimensions.
__device__ __forceinline__ int query_offset(int head, int c, int j, int pair) {
  return c / 2 * kBlockBytes + swizzled(head, c % 2 * 4 + pair) + 4 * j;
}

// What a thread brings of a request's queries into shared memory: 16 bytes, always at the same dimensions, of every
// kHeadStep-th head over all rows. All of it is asked for before the first keys. Behind the keys that a block asks for
// at once, the queries of the first tile would arrive when most keys have.
template <int kRows>
struct Queries {
  static constexpr int kHeadPieces = kChunks * 4, kHeads = kRows * kMaxIndexHeads;
  static constexpr int kHeadStep = Traits::kThreads / kHeadPieces;
  static constexpr int kPieces = (kHeads + kHeadStep - 1) / kHeadStep;
  static_assert(Traits::kThreads % kHeadPieces == 0 && kHeads <= Traits::kThreads);
  static_assert(kHeadStep % 8 == 0);  // so that a thread's pieces have the same swizzle
  uint4 pieces[kPieces];
  float weight;
  int length;

  __device__ __forceinline__ void load(const IndexLogitsParams& p, int request, int limit) {
    const int64_t first_row = int64_t{request} * kRows;
    const auto* q = static_cast<const __nv_bfloat16*>(p.q) + first_row * p.q_stride_row;
    q += threadIdx.x % kHeadPieces * 8;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int i = threadIdx.x / kHeadPieces + n * kHeadStep, row = i / kMaxIndexHeads, head = i % kMaxIndexHeads;
      pieces[n] = {};
      if (i < kHeads && head < p.heads) {
        pieces[n] = *reinterpret_cast<const uint4*>(q + row * p.q_stride_row + head * p.q_stride_head);
      }
    }
    const int row = threadIdx.x / kMaxIndexHeads, head = threadIdx.x % kMaxIndexHeads;
    weight = row < kRows && head < p.heads ? p.weights[(first_row + row) * p.weight_stride + head] : 0.0f;
    length = threadIdx.x < kRows ? min(p.seq_lens[first_row + threadIdx.x], limit) : 0;
  }

  __device__ __forceinline__ void store(const Block& block) const {
    const int piece = threadIdx.x % kHeadPieces, first = threadIdx.x / kHeadPieces;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int i = first + n * kHeadStep;
      // Rows are kRowBytes apart, of which the heads of one swizzled block take half.
      char* at = block.queries + n * kHeadStep * kSwizzleRowBytes + i / kMaxIndexHeads * (kRowBytes - kBlockBytes);
      const uint32_t pairs[4] = {pieces[n].x, pieces[n].y, pieces[n].z, pieces[n].w};
      if (i < kHeads) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          *reinterpret_cast<uint32_t*>(at + query_offset(first, piece / 4, piece % 4, pair)) = pairs[pair];
        }
      }
    }
    if (threadIdx.x < kHeads) block.weights[threadIdx.x] = weight;
    if (threadIdx.x < kRows) block.lengths[threadIdx.x] = length;
    fence_async_proxy();
  }
};

// Starts the products of a tile's keys with the heads of one row, whose descriptor is `row`.
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

// Tiles [begin, end) of one request, by the whole block. kRows is p.rows.
template <int kRows>
__device__ __forceinline__ void process(const Block& block, const IndexLogitsParams& p, int request, int begin, int end,
                                        int limit, Turn& turn) {
  const int lane = threadIdx.x % 32, count = keys_of(p, request, limit);
  const int first = threadIdx.x % 128 / 32 * Traits::kWarpKeys;  // the warp's keys in a tile
  const uint64_t rows = wgmma_descriptor(smem_address(block.queries), 0, kSwizzleAtomBytes);
  // Null where the tile or the warp's part of it is past the last key, whose page need not exist.
  const auto source_of = [&](int tile) -> const __nv_bfloat16* {
    const int key = tile * Traits::kTileKeys + first;
    return tile < end && key < count ? key_at(p, request, key) : nullptr;
  };
  int tile = begin + threadIdx.x / 128;
  Queries<kRows> queries;
  queries.load(p, request, limit);
  if (lane < block.stages) {
    const auto* source = source_of(tile + lane * Traits::kWarpgroups);
    if (source != nullptr) copy_keys(block, (turn.stage + lane) % block.stages, source);
  }
  __syncthreads();  // every warp is done with the previous request's queries
  queries.store(block);
  __syncthreads();

  KeyTile keys = {};
  for (; tile < end; tile += Traits::kWarpgroups) {
    const auto* next = source_of(tile + block.stages * Traits::kWarpgroups);
    const bool exists = tile * Traits::kTileKeys + first < count;
    if (exists) {
      mbarrier_wait(block.barrier(turn.stage), turn.parity);
      load_keys(keys, block.ring + turn.stage * Traits::kStageBytes);
    }
    const int key = tile * Traits::kTileKeys + first + lane % 4 / 2 * 8 + lane / 4;
    float* out = p.out + int64_t{request} * kRows * p.out_stride + key;
    float d[2][kMaxIndexHeads / 2];
    multiply(d[0], keys, rows);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row + 1 < kRows) {
        multiply(d[(row + 1) % 2], keys, rows + ((row + 1) * kRowBytes >> 4));
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      wgmma_pin(d[row % 2]);
      if (row == 0 && exists) {
        if (next != nullptr && lane == 0) copy_keys(block, turn.stage, next);
        turn.advance(block.stages);
      }
      const float logit = add_heads(d[row % 2], block.weights + row * kMaxIndexHeads);
      if (lane % 2 == 0 && key < block.lengths[row]) out[row * p.out_stride] = logit;
    }
  }
}

template <int kRows>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    index_logits_sm90_kernel(const __grid_constant__ IndexLogitsParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) char shared[];
  const Block block(shared, kRows);
  if (threadIdx.x % 32 == 0) {
    for (int stage = 0; stage < block.stages; ++stage) mbarrier_init(block.barrier(stage), 1);
    fence_mbarrier_init();
  }
  __syncwarp();
  const int limit = static_cast<int>(p.limit());
  Turn turn;
  for_each_request<Traits>(
      p, limit, [&](int request, int begin, int end) { process<kRows>(block, p, request, begin, end, limit, turn); });
}

}  // namespace

cudaError_t launch_sm90(const IndexLogitsParams& p, cudaStream_t stream) {
  const auto run = [&](void (*kernel)(IndexLogitsParams)) {
    return launch_index<Traits>(kernel, p, Traits::kMaxSharedBytes, stream);
  };
  switch (p.rows) {
    case 1: return run(index_logits_sm90_kernel<1>);
    case 2: return run(index_logits_sm90_kernel<2>);
    case 3: return run(index_logits_sm90_kernel<3>);
    default: return run(index_logits_sm90_kernel<4>);
  }
}

}  // namespace ddtree
