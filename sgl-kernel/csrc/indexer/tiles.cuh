// What the index-logits kernels share: how the keys of all requests are divided among blocks, and how keys are read.
//
// Each request has a whole number of tiles of Traits::kTileKeys keys. The tiles of all requests form one list, of which
// each block takes an equal and contiguous part. The grid is fixed and the lengths are read on the device, so one
// captured launch serves every replay.
#pragma once

#include <cuda_bf16.h>

#include "indexer/traits.h"

namespace ddtree {

constexpr unsigned kWholeWarp = 0xffffffff;

// A request's key. The keys after it in its page follow in memory.
__device__ __forceinline__ const __nv_bfloat16* key_at(const IndexLogitsParams& p, int request, int key) {
  const int page = p.page_table[request * p.table_stride + key / p.page_size];
  return static_cast<const __nv_bfloat16*>(p.keys) + page * p.key_stride_page + key % p.page_size * kIndexHeadDim;
}

// Keys of a request: those that its longest row sees.
__device__ __forceinline__ int keys_of(const IndexLogitsParams& p, int request, int limit) {
  int longest = 0;
#pragma unroll
  for (int i = 0; i < kMaxIndexRows; ++i) {
    if (i < p.rows) longest = max(longest, p.seq_lens[request * p.rows + i]);
  }
  return min(longest, limit);
}

template <typename Traits>
__device__ __forceinline__ int tiles_of(const IndexLogitsParams& p, int request, int limit) {
  return (keys_of(p, request, limit) + Traits::kTileKeys - 1) / Traits::kTileKeys;
}

struct Part {
  int begin, end;  // in the list
  int request;     // the one that owns tile `begin`
  int start;       // of that request's tiles in the list
};

// Warp-collective, with the same result in every lane.
template <typename Traits>
__device__ __forceinline__ Part find_part(const IndexLogitsParams& p, int limit) {
  const int lane = threadIdx.x % 32;
  int total = 0;
  for (int r = lane; r < p.bs; r += 32) total += tiles_of<Traits>(p, r, limit);
  total = __reduce_add_sync(kWholeWarp, total);
  const int each = total / gridDim.x, longer = total % gridDim.x;  // the first `longer` parts have one tile more
  const int block = blockIdx.x, begin = block * each + min(block, longer);
  Part part{begin, begin + each + (block < longer), 0, 0};
  for (int base = 0; base < p.bs; base += 32) {
    const int tiles = base + lane < p.bs ? tiles_of<Traits>(p, base + lane, limit) : 0;
    int until = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int up = __shfl_up_sync(kWholeWarp, until, step);
      if (lane >= step) until += up;
    }
    if (const unsigned owner = __ballot_sync(kWholeWarp, part.start + until > begin)) {
      const int source = __ffs(owner) - 1;
      part.request = base + source;
      part.start += __shfl_sync(kWholeWarp, until - tiles, source);
      return part;
    }
    part.start += __shfl_sync(kWholeWarp, until, 31);
  }
  return part;  // an empty one: begin = end = total
}

// Calls process(request, first tile, last tile + 1) for the requests of this block's part.
template <typename Traits, typename Process>
__device__ __forceinline__ void for_each_request(const IndexLogitsParams& p, int limit, Process process) {
  const Part part = find_part<Traits>(p, limit);
  if (part.begin == part.end) return;
  for (int request = part.request, start = part.start; start < part.end; ++request) {
    const int tiles = tiles_of<Traits>(p, request, limit);
    if (tiles > 0) process(request, max(part.begin - start, 0), min(part.end - start, tiles));
    start += tiles;
  }
}

template <typename Traits>
cudaError_t launch_index(void (*kernel)(IndexLogitsParams), const IndexLogitsParams& p, int shared,
                         cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kMaxSharedBytes);
  }
  if (status != cudaSuccess) return status;
  kernel<<<Traits::kBlocks * multiprocessors, Traits::kThreads, shared, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace ddtree
