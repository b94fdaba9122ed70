// Loads by page. The prefix tokens of a page are neighbors in the pool. If pages have a multiple of 64 tokens, TMA
// copies 64 tokens at a time as a box, which takes one thread and no address arithmetic. Tiles that reach into the tree
// are gathered by slot.
#pragma once

#include <type_traits>

#include "common/mbarrier.cuh"
#include "common/tensor_map.h"
#include "tree_verify/kernel_launch.cuh"
#include "tree_verify/params.h"
#include "tree_verify/tree_mask.cuh"

namespace ddtree {

constexpr int kBoxTokens = 64;  // boxes of 16 tokens are slower than gathering
static_assert(kChunkGranule % kBoxTokens == 0, "tiles must start with a box");

struct Pages {
  CUtensorMap k, rest;  // rest: V; for fp8 latents, the 64 bytes after the last whole 128

  // Leading tiles of a work item that are loaded by page: those in the prefix.
  template <typename Traits>
  __device__ __forceinline__ int tiles(const WorkItem& work) const {
    return Traits::kPaged ? max(0, min(work.request.prefix, work.end) - work.begin) / Traits::kTileN : 0;
  }
  // Fetches the maps before they are needed.
  __device__ __forceinline__ void prefetch() const {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&k) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&rest) : "memory");
  }
};

// Copies a box: the 128 bytes (or what the map says) from byte `at` of kBoxTokens rows, which start at `slot`.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int at, int head, int slot,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(at), "r"(head), "r"(slot)
      : "memory");
}

// Barrier of a block's producer warps, `threads` threads in all. The others wait there for the one that copies pages.
__device__ __forceinline__ void meet_producers(int threads) {
  asm volatile("bar.sync 3, %0;" ::"r"(threads) : "memory");
}

// Calls launch(true_type, pages) if the kernel can load by page, otherwise launch(false_type, {}): kernels that gather
// every token have no code for pages, because even a branch around a fence would cost them 3 to 6%. With a sliding
// window all tokens are gathered, because chunks start where the window does, in the middle of a page.
template <typename F>
cudaError_t with_pages(const TreeVerifyParams& p, const Launch& launch, F f) {
  Pages pages{};
  if (launch.shape || p.page_size % kBoxTokens != 0 || p.sliding_window >= 0) return f(std::false_type(), pages);
  const bool fp8 = p.kv_dtype == DType::kFloat8E4M3, latents = p.d_qk == kMlaQkDim;
  const int size = fp8 ? 1 : 2;
  const auto encode = [&](CUtensorMap* map, const void* cache, int64_t slot_stride, int64_t head_stride, int d,
                          int box_bytes) {
    return encode_rows(map, cache, p.num_slots, slot_stride * size, p.h_kv, head_stride * size, d * size, kBoxTokens,
                       box_bytes);
  };
  DDTREE_RETURN_IF_FAILED(encode(&pages.k, p.k_cache, p.k_stride_slot, p.k_stride_h, p.d_qk, 128));
  if (fp8 && latents) {
    DDTREE_RETURN_IF_FAILED(encode(&pages.rest, p.k_cache, p.k_stride_slot, p.k_stride_h, p.d_qk, 64));
  } else {
    DDTREE_RETURN_IF_FAILED(encode(&pages.rest, p.v_cache, p.v_stride_slot, p.v_stride_h, p.d_v, 128));
  }
  return f(std::true_type(), pages);
}

}  // namespace ddtree
