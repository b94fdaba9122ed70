// Compile-time shape of the partial kernels: tile sizes, warp layout, shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plan.h"

struct __half;  // cuda_fp16.h, which a host without CUDA that reads these shapes lacks

namespace ddtree {

constexpr int kMaxSharedMemory = 101376;  // a block's limit on sm_120 (99 KiB)
constexpr int kRowPad = 16;               // bytes; makes the eight rows that one ldmatrix reads fall into distinct banks

// Up to 16 packed rows: every warp takes 16 of a tile's tokens and the warps' results are merged at the end. More:
// every warp takes 16 or 32 rows and all tokens.
template <typename T, bool kFp8_, int kD_, int kTileM_>
struct GqaTraits {
  using Element = T;
  // fp8 KV is converted to fp16, which takes a quarter of the instructions that bf16 takes. bf16 Q is then scaled by a
  // power of two a row, exactly, to fit fp16's range.
  using Mma = std::conditional_t<kFp8_, __half, T>;
  static constexpr bool kFp8 = kFp8_, kScaleQ = !std::is_same_v<Mma, T>;
  static constexpr int kD = kD_, kTileM = kTileM_;
  static constexpr int kWarpsM = kTileM == 16 ? 1 : 4;
  static constexpr int kWarpsN = kTileM > 16 ? 1 : (kD <= 128 ? 4 : 2);
  static constexpr int kWarps = kWarpsM * kWarpsN, kThreads = kWarps * 32;
  static constexpr int kMinBlocks = kTileM == 128 || kD > 128 ? 2 : 3;  // a multiprocessor: a bound for the registers
  static constexpr int kFragsM = kTileM / kWarpsM / 16;
  static constexpr int kWarpTokens = kTileM == 16 ? 16 : 32;  // of a tile, a warp
  static constexpr int kTileN = kWarpTokens * kWarpsN;
  static constexpr int kRowsPerWarp = kTileN / kWarps;        // tokens a warp loads
  static constexpr int kPitch = kD * 2 + kRowPad;             // bytes of a token in the 16-bit tile
  static constexpr int kTileBytes = 2 * kTileN * kPitch;      // K, V
  static constexpr int kStageBytes = kFp8 ? 2 * kTileN * kD : kTileBytes;
  // Q lives in registers, or here where 128 rows of 128 dimensions leave none.
  static constexpr bool kQShared = kTileM == 128 && kD == 128;
  static constexpr int kQBytes = kQShared ? kTileM * (kPitch + 4) : 0;   // and a row's scale
  static constexpr int kFixedBytes = kQBytes + (kFp8 ? kTileBytes : 0);  // fp8 stages become one 16-bit tile
  static constexpr int kBudget = kTileM == 128 ? kMaxSharedMemory : 75 * 1024;  // 75 KiB: three blocks share sm_90
  static constexpr int kStages = (kBudget - kFixedBytes) / kStageBytes >= 4   ? 4
                                 : (kBudget - kFixedBytes) / kStageBytes >= 3 ? 3
                                                                              : 2;
  static constexpr int kMergeBytes = kWarpsN > 1 ? kWarpsN * 16 * (kD + 2) * 4 : 0;  // O, max, sum a warp
  static constexpr int kPipeBytes = kFixedBytes + kStages * kStageBytes;
  static constexpr int kSharedBytes = kPipeBytes > kMergeBytes ? kPipeBytes : kMergeBytes;
  static_assert(kSharedBytes <= kMaxSharedMemory);
};

// One latent tile serves as K and as V. Two groups of four warps take 32 of the 64 rows each and run half a tile apart,
// one on the tensor cores while the other is in its softmax. Within a group, warp w sums a quarter of the 576 dimensions
// of S (its Q is in registers), finishes 8 rows of it, and owns 128 of the 512 value dimensions of O.
template <typename T, bool kFp8_>
struct MlaTraits {
  using Element = T;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kTileM = kMlaTileM, kGroups = 2, kGroupM = kTileM / kGroups;
  static constexpr int kTileN = kFp8 ? 16 : 32;          // fp8 needs room for tiles before conversion
  static constexpr int kRounds = kTileN / 16;            // of 16 tokens, for S
  static constexpr int kGroupThreads = 128, kThreads = kGroups * kGroupThreads;
  static constexpr int kWarpK = kMlaQkDim / 4, kSteps = kWarpK / 16;
  static constexpr int kWarpV = kMlaVDim / 4;
  static constexpr int kPitch = kMlaQkDim * 2 + kRowPad;
  static constexpr int kStageBytes = kTileN * kPitch;
  static constexpr int kStages = kFp8 ? 3 : 2;
  static constexpr int kFp8Bytes = kFp8 ? kTileN * kMlaQkDim : 0;  // a group's tile before conversion
  static constexpr int kPitchP = kTileN * 2 + kRowPad;
  static constexpr int kPartBytes = kRounds * 32 * 16;   // 8 rows of S from one warp to another
  static constexpr int kRegionBytes = 3 * kPartBytes;    // what a warp receives; then its 8 rows of P
  static_assert(8 * kPitchP <= kRegionBytes);
  // A group's own memory: the exchange's four regions, rescale factors and flags, slots.
  static constexpr int kRescaleOffset = 4 * kRegionBytes;                // [kGroupM] float
  static constexpr int kFlagOffset = kRescaleOffset + kGroupM * 4;       // [4] int
  static constexpr int kSlotOffset = kFlagOffset + 4 * 4;                // [kTileN] int
  static constexpr int kGroupBytes = kSlotOffset + kTileN * 4;
  // Shared memory: the ring, the groups' tiles before conversion, the groups' own memory, barriers.
  static constexpr int kFp8Offset = kStages * kStageBytes;
  static constexpr int kGroupOffset = kFp8Offset + kGroups * kFp8Bytes;
  static constexpr int kBarrierOffset = kGroupOffset + kGroups * kGroupBytes;  // full, empty: [kStages] each
  static constexpr int kSharedBytes = kBarrierOffset + 2 * kStages * 8;
  static_assert(kSharedBytes <= kMaxSharedMemory - 64);                           // 64: the work item
};

}  // namespace ddtree
