// Compile-time shape of the partial kernels: tile sizes, warp layout, shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan.h"

namespace ddtree {

constexpr int kMaxSharedMemory = 101376;  // a block's limit on sm_120 (99 KiB)
constexpr int kRowPad = 16;  // bytes; makes the eight rows that one ldmatrix reads fall into distinct banks

// Up to 16 packed rows: every warp takes 16 of a tile's tokens and the warps' results are merged at the end. More:
// every warp takes 16 or 32 rows and all tokens.
template <typename T, bool kFp8_, int kD_, int kTileM_>
struct GqaTraits {
  using Element = T;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kD = kD_, kTileM = kTileM_;
  static constexpr int kWarpsM = kTileM == 16 ? 1 : 4;
  static constexpr int kWarpsN = kTileM > 16 ? 1 : (kD <= 128 ? 4 : 2);
  static constexpr int kWarps = kWarpsM * kWarpsN, kThreads = kWarps * 32;
  static constexpr int kMinBlocks = kTileM == 128 || kD > 128 ? 2 : 3;  // a multiprocessor: a bound for the registers
  static constexpr int kFragsM = kTileM / kWarpsM / 16;
  static constexpr int kWarpTokens = kTileM == 16 ? 16 : 32;  // of a tile, a warp
  static constexpr int kTileN = kWarpTokens * kWarpsN;
  static constexpr int kRowsPerWarp = kTileN / kWarps;    // tokens a warp loads
  static constexpr int kPitch = kD * 2 + kRowPad;         // bytes of a token in the 16-bit tile
  static constexpr int kTileBytes = 2 * kTileN * kPitch;  // K, V
  static constexpr int kStageBytes = kFp8 ? 2 * kTileN * kD : kTileBytes;
  // Q lives in registers, or here where 128 rows of 128 dimensions leave none.
  static constexpr bool kQShared = kTileM == 128 && kD == 128;
  static constexpr int kQBytes = kQShared ? kTileM * kPitch : 0;
  static constexpr int kFixedBytes = kQBytes + (kFp8 ? kTileBytes : 0);         // fp8 stages become one 16-bit tile
  static constexpr int kBudget = kTileM == 128 ? kMaxSharedMemory : 75 * 1024;  // 75 KiB: three blocks share sm_90
  static constexpr int kStages = (kBudget - kFixedBytes) / kStageBytes >= 4   ? 4
                                 : (kBudget - kFixedBytes) / kStageBytes >= 3 ? 3
                                                                              : 2;
  static constexpr int kMergeBytes = kWarpsN > 1 ? kWarpsN * 16 * (kD + 2) * 4 : 0;  // O, max, sum a warp
  static constexpr int kPipeBytes = kFixedBytes + kStages * kStageBytes;
  static constexpr int kSharedBytes = kPipeBytes > kMergeBytes ? kPipeBytes : kMergeBytes;
  static_assert(kSharedBytes <= kMaxSharedMemory);
};

// One latent tile serves as K and as V. Eight warps: for S, warp w takes rows 16 (w % 4) and half w / 4 of the 576
// dimensions, with its Q in registers; for O, all 64 rows and 64 of the 512 value dimensions.
template <typename T, bool kFp8_>
struct MlaTraits {
  using Element = T;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kTileM = kMlaTileM, kTileN = 32, kWarps = 8, kThreads = 256;
  static constexpr int kHalf = kMlaQkDim / 2;  // dimensions of S a warp sums
  static constexpr int kSteps = kHalf / 16;
  static constexpr int kWarpV = kMlaVDim / kWarps;  // value dimensions a warp owns
  static constexpr int kPitch = kMlaQkDim * 2 + kRowPad;
  static constexpr int kTileBytes = kTileN * kPitch;
  static constexpr int kStageBytes = kFp8 ? kTileN * kMlaQkDim : kTileBytes;
  static constexpr int kStages = kFp8 ? 1 : 2;
  static constexpr int kPipeBytes = (kFp8 ? kTileBytes : 0) + kStages * kStageBytes;
  static constexpr int kExchangeBytes = kWarps * 32 * 16 * 4;  // a warp's half sums of S
  static constexpr int kPitchP = kTileN * 2 + kRowPad;
  static constexpr int kProbBytes = kTileM * kPitchP;
  static constexpr int kRescaleOffset = kPipeBytes + kExchangeBytes + kProbBytes;
  static constexpr int kSharedBytes = kRescaleOffset + kTileM * 4 + 4 * 4;
  static_assert(kSharedBytes <= kMaxSharedMemory);
};

}  // namespace ddtree
