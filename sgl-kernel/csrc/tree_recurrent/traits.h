// Compile-time shape of the verify kernel: how it divides the work, and its layout of shared memory. Compiles without
// CUDA.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/draft_tree.h"
#include "common/shared_memory.h"

namespace ddtree {

constexpr int kColumnsPerWarp = 16;
constexpr int kStashBytes = 1024;  // u of 16 nodes in a warp's columns, in two bf16 parts

struct alignas(8) SplitFloat {
  float hi, lo;
};

// Bytes of a row of the slab: v of the block's columns, later o. The odd number of 16-byte chunks keeps ldmatrix free
// of conflicts.
DDTREE_HOST_DEVICE constexpr int slab_pitch(int column_warps) { return 2 * kColumnsPerWarp * column_warps + 16; }

// State: float or __nv_bfloat16. kTiles: of 16 nodes. kChannel: a decay per key channel. kWide: for several tiles,
// where A and M cost more than the columns. Eight warps make them once per head of 128, and as so many warps have
// registers for u of one tile only, that of the others is stashed.
template <typename State_, int kDk_, int kTiles_, bool kChannel_, bool kWide_>
struct VerifyTraits {
  using State = State_;
  static constexpr int kDk = kDk_, kTiles = kTiles_, kNodes = 16 * kTiles;
  static constexpr bool kChannel = kChannel_, kWide = kWide_, kFp32 = std::is_same_v<State, float>;
  static_assert(!kWide || (!kChannel && kTiles > 1));
  static constexpr int kBlocks = kTiles * (kTiles + 1) / 2;  // 16x16 blocks on and below the diagonal
  static constexpr int kRowBytes = 2 * kDk;                  // of q or k
  static constexpr int kBlockBytes = 512;                    // 16 rows of 16 bf16

  using NodeSet = std::conditional_t<kNodes <= 32, uint32_t, uint64_t>;

  // Per node.
  struct Nodes {
    NodeSet mask[kNodes];    // ancestors and the node; none past num_nodes
    long long g[kNodes];     // fixed point
    SplitFloat sum[kNodes];  // G in two parts, so that differences keep their digits
    float decay[kNodes];     // exp(G)
    float beta[kNodes], k_factor[kNodes], q_factor[kNodes];
    uint32_t bad_g[2], bad[2];  // bit sets of nodes
  };

  static constexpr int kQOffset = kNodes * kRowBytes;
  static constexpr int kDecayOffset = 2 * kQOffset;
  static constexpr int kSystemOffset = kDecayOffset + (kChannel ? kNodes * kDk * 4 : 0);
  static constexpr int kSystemBytes = 4 * kBlocks * kBlockBytes;  // A and M, each in two parts
  static constexpr int kDiagonalOffset = kSystemOffset + kSystemBytes;
  static constexpr int kDiagonalBytes = kWide ? 0 : kTiles * 16 * 16 * 4;  // kWide: the stash is not in use yet
  static constexpr int kNodesOffset = kDiagonalOffset + kDiagonalBytes;
  static constexpr int kSlabOffset = kNodesOffset + (int(sizeof(Nodes)) + 15) / 16 * 16;

  static constexpr int shared_bytes(int column_warps) {
    return kSlabOffset + kNodes * slab_pitch(column_warps) + (kWide ? column_warps * (kTiles - 1) * kStashBytes : 0);
  }

  // Warps per block that have columns of the state, at most, and what a block without helpers then takes.
  static constexpr int kColumnWarps = kWide ? 8 : shared_bytes(4) <= kMaxSharedMemory ? 4 : 2;
  static constexpr int kThreads = 32 * kColumnWarps, kSharedBytes = shared_bytes(kColumnWarps);
  static_assert(kSharedBytes <= kMaxSharedMemory);
  // Of a block with helpers, if a multiprocessor has no other block: at least one per 16x16 block of A, up to 12.
  static constexpr int kAllWarps = kBlocks > 8 ? 12 : 8;

  // Three or four blocks of four warps per multiprocessor, or two of eight. S_0 (64 registers in fp32) waits while A
  // and M are made. If kStateFirst, so do its products with the first tile of nodes, which fill the time that other
  // warps need. For more than one tile, sm_100 and later have no registers for that, nor for kWide.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr bool kStateFirst = !kChannel && kTiles == 1;
  static constexpr int kRegisters = kTiles == 1 && !(kChannel && kFp32) ? 128 : 168;
#else
  static constexpr bool kStateFirst = !kChannel && !kWide;
  static constexpr int kRegisters = kWide || kTiles == 1 || (kTiles == 2 && kChannel && !kFp32) ? 128 : 168;
#endif
};

}  // namespace ddtree
