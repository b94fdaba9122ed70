// What all parts of the verify kernel share: where a block of threads is in the grid, its layout of shared memory, and
// how its warps and threads divide the tasks of a phase.
#pragma once

#include "tree_recurrent/device.cuh"
#include "tree_recurrent/traits.h"

namespace ddtree {

// Byte offset of a 16-byte chunk in a row of q or k. It avoids bank conflicts between the same chunk of eight rows, and
// between four neighbouring chunks of two rows.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return (chunk ^ ((row & 1) << 2 | (row >> 1 & 3))) << 4;
}

// Byte offset of a channel in a row of decays, chosen for the same reason.
__device__ __forceinline__ int decay_offset(int row, int channel) {
  return ((channel >> 2 ^ (row & 1)) << 4) + (channel & 3) * 4;
}

// Byte offset of row t, columns 8 h to 8 h + 7 of a 16x16 block.
__device__ __forceinline__ int block_offset(int t, int h) { return t * 32 + ((h ^ (t >> 2 & 1)) << 4); }

__device__ __forceinline__ constexpr int block_index(int i, int j) { return i * (i + 1) / 2 + j; }

template <typename Traits>
struct VerifyBlock {
  static constexpr int kDk = Traits::kDk, kNodes = Traits::kNodes, kTiles = Traits::kTiles, kBlocks = Traits::kBlocks;
  static constexpr int kSystem = kBlocks * Traits::kBlockBytes;  // bytes of one part of A or M
  using Nodes = typename Traits::Nodes;
  using NodeSet = typename Traits::NodeSet;

  const RecurrentVerifyParams& p;
  char* smem;
  Nodes& nodes;
  int column_warps, warps, warp, lane, head, key_head, slice;
  int64_t row0;
  bool delta;

  __device__ __forceinline__ VerifyBlock(const RecurrentVerifyParams& params, int with_columns, char* shared)
      : p(params),
        smem(shared),
        nodes(*reinterpret_cast<Nodes*>(shared + Traits::kNodesOffset)),
        column_warps(with_columns) {
    warps = blockDim.x / 32;
    warp = threadIdx.x / 32;
    lane = threadIdx.x & 31;
    slice = blockIdx.x;
    head = blockIdx.y;
    key_head = head / p.heads_per_key;
    row0 = int64_t(blockIdx.z) * p.num_nodes;
    delta = p.kind == RecurrentKind::kGatedDelta || p.kind == RecurrentKind::kChannelDelta;
  }

  __device__ __forceinline__ static NodeSet node_set(const uint32_t (&words)[2]) {
    if constexpr (kNodes <= 32) return words[0];
    return words[0] | NodeSet(words[1]) << (kNodes <= 32 ? 0 : 32);
  }
  __device__ __forceinline__ static int last_of(NodeSet nodes) {
    return kNodes <= 32 ? 31 - __clz(int(nodes)) : 63 - __clzll(static_cast<long long>(nodes));
  }

  __device__ __forceinline__ char* k_row(int row) const { return smem + row * Traits::kRowBytes; }
  __device__ __forceinline__ char* q_row(int row) const { return smem + Traits::kQOffset + row * Traits::kRowBytes; }
  __device__ __forceinline__ char* decay_row(int row) const { return smem + Traits::kDecayOffset + row * kDk * 4; }
  __device__ __forceinline__ float* diagonal(int tile) const {
    char* base = Traits::kWide ? reinterpret_cast<char*>(stashed_by(0, 0)) : smem + Traits::kDiagonalOffset;
    return reinterpret_cast<float*>(base) + tile * 256;
  }
  // Parts 0 and 1 are the high and the low part of A, and 2 and 3 those of M.
  __device__ __forceinline__ char* block(int part, int index) const {
    return smem + Traits::kSystemOffset + part * kSystem + index * Traits::kBlockBytes;
  }
  __device__ __forceinline__ char* slab(int row) const {
    return smem + Traits::kSlabOffset + row * slab_pitch(column_warps) + 2 * kColumnsPerWarp * warp;
  }
  __device__ __forceinline__ bool writes_gates() const { return slice == 0; }
  __device__ __forceinline__ bool writes_keys() const { return slice == 0 && head == key_head * p.heads_per_key; }

  // This lane's part of u of a tile, which later tiles need.
  __device__ __forceinline__ uint4* stashed(int tile) const { return stashed_by(warp, tile) + lane; }
  __device__ __forceinline__ uint4* stashed_by(int of_warp, int tile) const {
    char* base = smem + Traits::kSlabOffset + kNodes * slab_pitch(column_warps);
    return reinterpret_cast<uint4*>(base + (of_warp * (kTiles - 1) + tile) * kStashBytes);
  }

  // This warp's first task among those that all warps share. Helper warps get the first tasks.
  __device__ __forceinline__ int first_task() const { return (warp + warps - column_warps) % warps; }

  // How many threads, a power of two of at most 16, share each of `count` tasks; as a logarithm.
  __device__ __forceinline__ static int log_threads_per(int count) {
    return 31 - __clz(max(int(blockDim.x) / count, 1));
  }
};

}  // namespace ddtree
