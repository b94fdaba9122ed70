// Compile-time shape of the partial kernels: tile sizes, warp layout, shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "plan.h"

struct __half;  // cuda_fp16.h, which a host without CUDA that reads these shapes lacks

namespace ddtree {

constexpr int kMaxSharedMemory = 101376;  // a block's limit on sm_120 (99 KiB)
constexpr int kRowPad = 16;  // bytes; makes the eight rows that one ldmatrix reads fall into distinct banks

// Up to 16 packed rows: every warp takes 16 of a tile's tokens and the warps' results are merged at the end. More:
// every warp takes 16 or 32 rows and all tokens.
template <typename T, bool kFp8_, int kD_, int kTileM_>
struct GqaTraits {
  using Element = T;
  // fp8 KV is converted to fp16, one instruction for two values. bf16 Q is then scaled by a power of two a row,
  // exactly, to fit fp16's range.
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
  static constexpr int kRowsPerWarp = kTileN / kWarps;    // tokens a warp loads
  static constexpr int kPitch = kD * 2 + kRowPad;         // bytes of a token in the 16-bit tile
  static constexpr int kTileBytes = 2 * kTileN * kPitch;  // K, V
  static constexpr int kStageBytes = kFp8 ? 2 * kTileN * kD : kTileBytes;
  // Q lives in registers, or here where 128 rows of 128 dimensions leave none.
  static constexpr bool kQShared = kTileM == 128 && kD == 128;
  static constexpr int kQBytes = kQShared ? kTileM * (kPitch + 4) : 0;          // and a row's scale
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

// GQA on sm_90a with wgmma (sm90/gqa_sm90.cuh): 64 packed rows a warpgroup, and warps that copy. Blocks of one
// warpgroup are limited by memory and share a multiprocessor in pairs; a block of two, limited by arithmetic, takes it
// alone, and so does head size 256. A multiprocessor has 228 KiB, of which the system takes 1 KiB a block.
template <typename T, bool kFp8_, int kD_, int kWarpgroups_>
struct GqaSm90Traits {
  using Element = T;
  using Mma = std::conditional_t<kFp8_, __half, T>;  // as in GqaTraits
  static constexpr bool kFp8 = kFp8_, kScaleQ = !std::is_same_v<Mma, T>;
  static constexpr int kD = kD_, kWarpgroups = kWarpgroups_, kTileM = 64 * kWarpgroups;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kMinBlocks = kWarpgroups == 2 || kD == 256 ? 1 : 2;
  static constexpr int kProducers = kMinBlocks == 2 ? 2 : 4;  // warps; what the consumers' registers leave room for
  static constexpr int kThreads = kConsumers + 32 * kProducers;
  static constexpr int kTileN = kD == 192                                                       ? 32
                                : (kD == 64 || kWarpgroups == 2) && !(kFp8 && kWarpgroups == 2) ? 128
                                                                                                : 64;
  static constexpr int kProducerRows = kTileN / kProducers;
  static constexpr int kColumns = (kD + 63) / 64 * 64;  // in blocks of 128 bytes
  static constexpr int kQBytes = kTileM * kColumns * 2;
  static constexpr int kTileBytes = 2 * kTileN * kColumns * 2;  // K, V
  static constexpr int kStageBytes = kFp8 ? 2 * kTileN * kD : kTileBytes;
  static constexpr int kStageOffset = kQBytes + (kFp8 ? 2 * kTileBytes : 0);  // fp8: two converted tiles
  static constexpr int kScaleBytes = kScaleQ ? kTileM * 4 : 0, kBarrierBytes = 64, kWorkBytes = 64;
  static constexpr int kRest = kScaleBytes + kBarrierBytes + kWorkBytes;
  static constexpr int kFit = ((228 / kMinBlocks - 1) * 1024 - kStageOffset - kRest) / kStageBytes;
  static constexpr int kStages = kFit < 4 ? kFit : 4;
  static constexpr int kScaleOffset = kStageOffset + kStages * kStageBytes;
  static constexpr int kBarrierOffset = kScaleOffset + kScaleBytes;
  static constexpr int kWorkOffset = kBarrierOffset + kBarrierBytes;
  static constexpr int kSharedBytes = kWorkOffset + kWorkBytes;
  static_assert(kStages >= 2 && 2 * kStages * 8 <= kBarrierBytes);
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
  static constexpr int kStepsShared = kFp8 ? 4 : 1;  // whose Q lies in shared memory: the registers are full
  static constexpr int kWarpV = kMlaVDim / kWarps;   // value dimensions a warp owns
  static constexpr int kPitch = kMlaQkDim * 2 + kRowPad;
  static constexpr int kTileBytes = kTileN * kPitch;
  static constexpr int kStageBytes = kFp8 ? kTileN * kMlaQkDim : kTileBytes;
  static constexpr int kStages = kFp8 ? 1 : 2;
  static constexpr int kPipeBytes = (kFp8 ? kTileBytes : 0) + kStages * kStageBytes;
  static constexpr int kExchangeBytes = kWarps * 32 * 16 * 4;  // a warp's half sums of S
  static constexpr int kPitchP = kTileN * 2 + kRowPad;
  static constexpr int kProbBytes = kTileM * kPitchP;
  static constexpr int kRescaleOffset = kPipeBytes + kExchangeBytes + kProbBytes;
  static constexpr int kQOffset = kRescaleOffset + kTileM * 4 + 4 * 4;
  static constexpr int kSharedBytes = kQOffset + kStepsShared * kThreads * 16;
  static_assert(kSharedBytes <= kMaxSharedMemory);
};

// The same for sm_90a with wgmma (sm90/mla_sm90.cuh), which has 227 KiB a block: Q, two stages of latents, the mailbox
// of the two consumer groups, barriers and the work item.
template <typename T, bool kFp8_>
struct MlaSm90Traits {
  using Element = T;
  // fp8 KV is converted to fp16, one instruction for two values. bf16 Q is then scaled by a power of two a row.
  using Mma = std::conditional_t<kFp8_, __half, T>;
  static constexpr bool kFp8 = kFp8_, kScaleQ = !std::is_same_v<Mma, T>;
  static constexpr int kTileM = kMlaTileM, kTileN = 64, kThreads = 384;
  static constexpr int kConsumerRegisters = kFp8 ? 208 : 216, kProducerRegisters = kFp8 ? 88 : 72;
  static_assert(2 * kConsumerRegisters + kProducerRegisters == 3 * 168);  // what the launch allocates a thread
  static constexpr int kBlocks = kMlaQkDim / 64;                          // [64][128 bytes] each, swizzled
  static constexpr int kBlockBytes = 64 * 128;
  static constexpr int kTileBytes = kBlocks * kBlockBytes;
  static constexpr int kMailboxOffset = 3 * kTileBytes;
  static constexpr int kScaleOffset = kMailboxOffset + 128 * (kTileN + 8);
  static constexpr int kBarrierOffset = kScaleOffset + (kScaleQ ? kTileM * 4 : 0);
  static constexpr int kWorkOffset = kBarrierOffset + 96;
  static constexpr int kSharedBytes = kWorkOffset + 64;
  static_assert(kSharedBytes <= 232448);
};

}  // namespace ddtree
