// Compile-time shape of the partial kernels: tile sizes, warp layout, and the layout of shared memory. An array of
// length zero takes no space: it exists only in some instantiations. Arrays are flat, because two-dimensional ones
// would make the compiler compute addresses in 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/shared_memory.h"
#include "tree_verify/plan.h"
#include "tree_verify/work_item.h"

struct __half;  // from cuda_fp16.h and cuda_fp8.h, which a host without CUDA does not have
struct __nv_fp8_e4m3;

namespace ddtree {

constexpr int kRowPad = 16;  // bytes per row, so that the eight rows of one ldmatrix fall into distinct banks

// What a common kernel does with KV: multiplies it as it is stored (16 bits or fp8), or converts fp8 to 16 bits first.
enum class KvMath { k16Bit, kFp8, kConverted };

// The type that the GQA kernel multiplies in. Converted fp8 KV is fp16, one instruction for two values. Each row of
// bf16 Q is then scaled by a power of two, which is exact, to fit fp16's range.
template <typename T, KvMath kMath>
using MmaType =
    std::conditional_t<kMath == KvMath::k16Bit, T, std::conditional_t<kMath == KvMath::kFp8, __nv_fp8_e4m3, __half>>;

// For up to 16 packed rows, every warp takes 16 tokens of a tile, and the warps' results are merged at the end. For
// more rows, every warp takes 16 or 32 rows and all tokens. Products in fp8 contract 32 tokens at a time, so every warp
// then takes 32 tokens.
template <typename T, KvMath kMath, int kD_, int kTileM_>
struct GqaTraits {
  using Element = T;
  using Mma = MmaType<T, kMath>;
  static constexpr bool kFp8 = kMath != KvMath::k16Bit;  // as stored
  static constexpr bool kConverts = kMath == KvMath::kConverted, kMmaFp8 = kMath == KvMath::kFp8;
  static constexpr bool kScaleQ = !std::is_same_v<Mma, T>;
  static constexpr int kD = kD_, kTileM = kTileM_;
  static constexpr int kWarpsM = kTileM == 16 ? 1 : kTileM == 128 && kMmaFp8 ? 8 : 4;
  static constexpr int kWarpsN = kTileM > 16 ? 1 : (kD <= 128 ? 4 : 2);
  static constexpr int kWarps = kWarpsM * kWarpsN, kThreads = kWarps * 32;
  // Per multiprocessor: limits the registers. Of fp8 products, sm_120 has no shared memory for three.
  static constexpr int kMinBlocks = kWarps == 8 && kD > 64 ? 1 : kTileM == 128 || kD > 128 || kMmaFp8 ? 2 : 3;
  static constexpr int kFragsM = kTileM / kWarpsM / 16;
  static constexpr int kWarpTokens = kTileM == 16 && !kMmaFp8 ? 16 : 32;  // tokens of a tile that a warp computes
  static constexpr int kTileN = kWarpTokens * kWarpsN;
  static constexpr int kTokensPerWarp = kTileN / kWarps;       // tokens of a tile that a warp loads
  static constexpr int kSteps = kD * (kMmaFp8 ? 1 : 2) / 32;   // of a row, 32 bytes each
  static constexpr int kPitch = kSteps * 32 + kRowPad;         // bytes of a token in a tile to multiply by
  static constexpr int kStagePitch = kConverts ? kD : kPitch;  // and in a stage
  static constexpr int kTileBytes = 2 * kTileN * kPitch;       // K, V
  static constexpr int kStageBytes = 2 * kTileN * kStagePitch;
  // 128 rows of 128 dimensions leave no registers for Q in 16 bits, so it stays in shared memory.
  static constexpr bool kQShared = kTileM == 128 && kD == 128 && !kMmaFp8;

  template <int kCount>
  struct PipelineOf {
    char q[kQShared ? kTileM * kPitch : 0];
    float q_unscale[kQShared ? kTileM : 0];
    char tile[kConverts ? kTileBytes : 0];  // a stage, converted to 16 bits
    char stages[kCount * kStageBytes];
  };
  // 75 KiB: three blocks share sm_90. 48 KiB: two blocks share sm_120.
  static constexpr int kBudget = kMmaFp8 ? 48 * 1024 : kTileM == 128 ? kMaxSharedMemory : 75 * 1024;
  static constexpr int kFit = (kBudget - int(sizeof(PipelineOf<0>))) / kStageBytes;
  static constexpr int kStages = kFit >= 4 ? 4 : kFit == 3 ? 3 : 2;
  using Pipeline = PipelineOf<kStages>;
  struct Merge {  // the warps' results, once the pipeline is done
    float maxima[kWarpsN * 16], sums[kWarpsN * 16], outputs[kWarpsN * 16 * kD];
  };
  union Storage {
    Pipeline pipeline;
    Merge merge;
  };
  static constexpr int kSharedBytes = sizeof(Storage);
  static_assert(kSharedBytes <= kMaxSharedMemory);
};

// GQA on sm_90a with wgmma (sm90/gqa_sm90.cuh): 64 packed rows per warpgroup, plus warps that copy. Blocks of one
// warpgroup are limited by memory, and two of them share a multiprocessor. A block of two warpgroups is limited by
// arithmetic and takes a multiprocessor alone, as does head size 256. A multiprocessor has 228 KiB, of which the system
// takes 1 KiB per block.
template <typename T, int kD_, int kWarpgroups_, bool kPaged_, bool kTasks_ = false>
struct GqaSm90Traits {
  using Element = T;
  static constexpr int kD = kD_, kWarpgroups = kWarpgroups_, kTileM = 64 * kWarpgroups;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kMinBlocks = kWarpgroups == 2 || kD == 256 ? 1 : 2;
  static constexpr int kProducers = kMinBlocks == 2 ? 2 : 4;  // warps; limited by the consumers' registers
  static constexpr int kThreads = kConsumers + 32 * kProducers;
  // Of two warpgroups. 168: registers per thread at launch.
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static_assert(2 * kConsumerRegisters + kProducerRegisters == 3 * 168);
  // Passes of a copy unrolled, as the producers' registers allow.
  static constexpr int kAhead = kWarpgroups == 2 ? 4 : 8;
  static constexpr bool kTogether = true;                        // K and V of a token are copied together
  static constexpr bool kPaged = kPaged_;                        // load by page (sm90/pages.cuh)
  static constexpr int kMaxTasks = kTasks_ ? kThreads / 32 : 1;  // of a block (sm90/gqa_tasks.cuh)
  static constexpr int kTileN = kD == 192 ? 32 : kD == 64 || kWarpgroups == 2 ? 128 : 64;
  static constexpr int kProducerTokens = kTileN / kProducers;
  static constexpr int kRowBytes = kD * 2;                  // of K or V
  static constexpr int kColumns = (kD + 63) / 64 * 64;      // whole blocks of 128 bytes
  static constexpr int kTileBytes = kTileN * kColumns * 2;  // of K or V

  template <int kCount>
  struct StorageOf {
    char q[kTileM * kColumns * 2];
    char stages[kCount * 2 * kTileBytes];  // K and V of each stage
    uint64_t full[kCount], empty[kCount];  // mbarriers
    uint64_t q_full[kTasks_ ? 2 : 0], q_empty[kTasks_ ? 2 : 0];
    alignas(64) WorkItem work[kTasks_ ? 0 : 1];
    Task tasks[kTasks_ ? kMaxTasks : 0];
  };
  static constexpr int kMaxStages = 4;
  static constexpr int kOverhead = sizeof(StorageOf<kMaxStages>) - kMaxStages * 2 * kTileBytes;
  static constexpr int kFit = ((228 / kMinBlocks - 1) * 1024 - kOverhead) / (2 * kTileBytes);
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  // The tile of a task before which its Q is loaded, unless the task is the block's first. Producers that have this
  // tile's stage find the last S of the task before running or done.
  static constexpr int kQueryAt = kStages - 2;
  using Storage = StorageOf<kStages>;
  static constexpr int kSharedBytes = sizeof(Storage);
  static_assert(kStages >= 2 && kSharedBytes <= kMaxSharedMemorySm90);
};

// GQA over fp8 KV on sm_90a with fp8 wgmma (sm90/gqa_fp8_sm90.cuh). Two of the helper warps copy, two transpose V. Rows
// of K and V take one or two blocks of 128 bytes.
template <typename T, bool kSplit_, int kD_, int kWarpgroups_, bool kPaged_>
struct GqaFp8Sm90Traits {
  using Element = T;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kD = kD_, kWarpgroups = kWarpgroups_, kTileM = 64 * kWarpgroups, kTileN = 128;
  static constexpr int kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 128;
  static constexpr int kProducers = 2, kProducerTokens = kTileN / kProducers;
  static constexpr int kMinBlocks = kWarpgroups == 2 || kD > 128 ? 1 : 2;
  // Registers per thread at launch: 168 of three warpgroups, 128 of two blocks of two, 255 of one block of two.
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 216 : kMinBlocks == 2 ? 192 : 256;
  static constexpr int kHelperRegisters = kWarpgroups == 2 ? 72 : 64;
  // Whether there are registers for O, S, P and P V at the same time.
  static constexpr bool kOverlap = kD == 64 && (kWarpgroups == 2 || !kSplit);
  static constexpr int kRowBytes = kD, kBlocks = (kD + 127) / 128;
  static constexpr int kParts = kBlocks, kPartD = kD / kParts;  // P V is computed in parts, for lack of registers
  static constexpr int kTileBytes = kTileN * kBlocks * 128;     // K or V as stored
  static constexpr int kValuesBytes = kD * kTileN;              // V transposed
  static constexpr int kQParts = kSplit ? 2 : 1, kQPartBytes = kTileM * kBlocks * 128;
  static constexpr int kStages = kWarpgroups == 2 ? 4 : 2;
  // As the helpers' registers allow: passes of a copy unrolled, and whether K and V of a token are copied together.
  static constexpr int kAhead = kD == 96 && kWarpgroups == 2 ? 1 : 4;
  static constexpr bool kTogether = kD > 64;
  static constexpr bool kPaged = kPaged_;
  static constexpr int kMaxTasks = kWarpgroups == 2 ? kThreads / 32 : 1;  // of a block (sm90/gqa_tasks.cuh)
  static constexpr int kQueryAt = kStages - 2;                            // as in GqaSm90Traits

  struct Storage {
    char raw_q[kMaxTasks > 1 ? kTileM * ((kD + 63) / 64 * 128) : 0];  // in 16 bits
    char q[kQParts * kQPartBytes];
    char stages[kStages * 2 * kTileBytes];
    char values[2 * kValuesBytes];
    float q_unscale[kTileM];
    uint64_t full[kStages], empty[kStages], values_full[2], values_empty[2];  // mbarriers
    uint64_t q_full[2], q_empty[2];
    alignas(64) Task tasks[kMaxTasks];
  };
  static constexpr int kSharedBytes = sizeof(Storage);
  static_assert(kSharedBytes <= (228 / kMinBlocks - 1) * 1024 && kSharedBytes <= kMaxSharedMemorySm90);
};

// One latent tile serves as both K and V. There are eight warps. For S, warp w takes rows 16 (w % 4) and half w / 4 of
// the 576 dimensions, with its Q in registers. For O, it takes all 64 rows and 64 of the 512 value dimensions.
template <typename T, KvMath kMath>
struct MlaTraits {
  using Element = T;
  static constexpr bool kFp8 = kMath != KvMath::k16Bit;  // as stored
  static constexpr bool kConverts = kMath == KvMath::kConverted, kMmaFp8 = kMath == KvMath::kFp8;
  using Mma = std::conditional_t<kMmaFp8, __nv_fp8_e4m3, T>;
  static constexpr int kTileM = kMlaTileM, kTileN = 32, kWarps = 8, kThreads = 256;
  static constexpr int kHalf = kMlaQkDim / 2;         // dimensions of S that a warp sums
  static constexpr int kBytes = kMmaFp8 ? 1 : 2;      // of an operand's element
  static constexpr int kSteps = kHalf * kBytes / 32;  // 32 bytes each
  // Steps whose Q is in shared memory, because the registers are full.
  static constexpr int kStepsShared = kConverts ? 4 : kMmaFp8 ? 0 : 1;
  static constexpr int kWarpV = kMlaVDim / kWarps;  // value dimensions that a warp owns
  static constexpr int kPitch = kMlaQkDim * kBytes + kRowPad;
  static constexpr int kTileBytes = kTileN * kPitch;
  static constexpr int kStagePitch = kConverts ? kMlaQkDim : kPitch;
  static constexpr int kStageBytes = kTileN * kStagePitch;
  static constexpr int kStages = kConverts ? 1 : kMmaFp8 ? 4 : 2;
  static constexpr int kPitchP = kTileN * kBytes + kRowPad;

  struct Storage {
    char tile[kConverts ? kTileBytes : 0];  // the fp8 stage, converted to 16 bits
    char stages[kStages * kStageBytes];
    union {
      float exchange[kWarps * 4 * 32 * 4];  // float4 [warp, fragment, lane]: each warp's half sums of S
      struct {
        float maxima[kTileM], sums[2 * kTileM];
      } totals;  // after the last tile
    };
    char probs[kTileM * kPitchP];
    float rescale[kTileM];
    int rescale_any[4];                                   // per group of 16 rows
    alignas(16) uint32_t q[kStepsShared * kThreads * 4];  // uint4 [step, thread]
  };
  static constexpr int kSharedBytes = sizeof(Storage);
  static_assert(kSharedBytes <= kMaxSharedMemory);
};

// Barriers of mla_sm90.cuh, which describes them.
struct MlaSm90Barriers {
  uint64_t full[2][2], empty[2][2], posted[2], turn, meeting;
};

// MLA on sm_90a with wgmma (sm90/mla_sm90.cuh). One block takes all of a multiprocessor's shared memory.
template <typename T, bool kPaged_>
struct MlaSm90Traits {
  using Element = T;
  static constexpr int kTileM = kMlaTileM, kTileN = 64, kThreads = 384;
  static constexpr bool kPaged = kPaged_;
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
  static_assert(2 * kConsumerRegisters + kProducerRegisters == 3 * 168);  // 168: registers per thread at launch
  static constexpr int kBlocks = kMlaQkDim / 64;                          // [64][128 bytes] each, swizzled
  static constexpr int kBlockBytes = 64 * 128;
  static constexpr int kTileBytes = kBlocks * kBlockBytes;

  // Passes P and the running maxima from a thread of one consumer group to its counterpart in the other.
  struct Mailbox {
    uint32_t prob[kTileN / 16 * 128 * 4];  // uint4 [step, thread]
    float maxima[128 * 2];                 // float2 [thread]
  };
  struct Storage {
    char q[kTileBytes];
    char stages[2 * kTileBytes];
    Mailbox mailbox;
    MlaSm90Barriers barriers;
    alignas(32) WorkItem work;
  };
  static constexpr int kSharedBytes = sizeof(Storage);
  static_assert(kSharedBytes <= kMaxSharedMemorySm90);
};

// MLA over fp8 latents on sm_90a with fp8 wgmma (sm90/mla_fp8_sm90.cuh). One block takes a multiprocessor. A block of
// 128-byte rows is [64][128 bytes], swizzled.
template <typename T, bool kSplit_, bool kPaged_>
struct MlaFp8Sm90Traits {
  using Element = T;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kTileM = kMlaTileM, kTileN = 64, kThreads = 384;
  static constexpr bool kPaged = kPaged_;
  static constexpr int kConsumerRegisters = 232, kHelperRegisters = 40;
  static_assert(2 * kConsumerRegisters + kHelperRegisters == 3 * 168);  // 168: registers per thread at launch
  static constexpr int kBlockBytes = 64 * 128;
  static constexpr int kSteps = kTileN / 32, kParts = kSplit ? 2 : 1;  // of Q and P
  static constexpr int kStages = 4 - kParts;

  // Passes P and the running maxima from a thread of one consumer group to its counterpart in the other.
  struct Mailbox {
    uint32_t prob[kParts * kSteps * 128 * 4];  // uint4 [part, step, thread]
    float maxima[128 * 2];                     // float2 [thread]
  };
  struct Storage {
    // The parts of Q, then the stages: 512 dimensions of each (4 blocks), then the last 64 of each (half a block).
    char operands[18 * kBlockBytes];
    char values[8 * kBlockBytes];  // V transposed, [512][128 bytes]: the tokens of even tiles, then those of odd tiles
    Mailbox mailbox;
    float q_unscale[kTileM];
    uint64_t full[kStages], empty[kStages], values_full[2], values_empty[2], posted[2], meeting;  // mbarriers
    alignas(32) WorkItem work;
  };
  static constexpr int kSharedBytes = sizeof(Storage);
  static_assert(kSharedBytes <= kMaxSharedMemorySm90);
};

}  // namespace ddtree
