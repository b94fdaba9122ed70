// Prints what the traits of kernels define but machine code does not show: for each instantiation of a partial or a
// recurrent verify kernel its template arguments, threads per block and dynamic shared memory. For the index logits it
// is the largest shared memory. kernel_report.py compiles and runs it.
#include <cstdio>

#include "indexer/traits.h"
#include "tree_recurrent/traits.h"
#include "tree_verify/traits.h"

using namespace ddtree;

// The traits need only the names of these types.
struct __half;
struct __nv_bfloat16;

template <typename T, KvMath kMath, int kD, int kTileM>
void print_gqa(const char* type) {
  using Traits = GqaTraits<T, kMath, kD, kTileM>;
  std::printf("gqa %s %d %d %d %d %d\n", type, int(kMath), kD, kTileM, Traits::kThreads, Traits::kSharedBytes);
}

template <typename Traits>
void print_own(const char* kernel, const char* type, bool flag, int size, int warpgroups) {
  std::printf("%s %s %d %d %d %d %d\n", kernel, type, flag, size, warpgroups, Traits::kThreads, Traits::kSharedBytes);
}

// The kernels of sm_90a: those that gather, and those that load by page.
template <typename T, bool kSplit, int kD, int kWarpgroups>
void print_gqa_fp8_sm90(const char* type) {
  print_own<GqaFp8Sm90Traits<T, kSplit, kD, kWarpgroups, false>>("gqa_fp8_sm90", type, kSplit, kD, kWarpgroups);
  print_own<GqaFp8Sm90Traits<T, kSplit, kD, kWarpgroups, true>>("gqa_fp8_paged_sm90", type, kSplit, kD, kWarpgroups);
}

template <typename T, int kD, int kWarpgroups>
void print_gqa_sm90(const char* type) {
  print_own<GqaSm90Traits<T, kD, kWarpgroups, false>>("gqa_sm90", type, false, kD, kWarpgroups);
  if constexpr (kWarpgroups == 2) {
    print_own<GqaSm90Traits<T, kD, 2, true>>("gqa_paged_sm90", type, false, kD, 2);
    print_own<GqaSm90Traits<T, kD, 2, false, true>>("gqa_tasks_sm90", type, false, kD, 2);
    print_own<GqaSm90Traits<T, kD, 2, true, true>>("gqa_paged_tasks_sm90", type, false, kD, 2);
  }
  print_gqa_fp8_sm90<T, false, kD, kWarpgroups>(type);
  print_gqa_fp8_sm90<T, true, kD, kWarpgroups>(type);
}

template <typename T>
void print_mla_sm90(const char* type) {
  print_own<MlaSm90Traits<T, false>>("mla_sm90", type, false, 0, 0);
  print_own<MlaSm90Traits<T, true>>("mla_paged_sm90", type, false, 0, 0);
  print_own<MlaFp8Sm90Traits<T, false, false>>("mla_fp8_sm90", type, false, 0, 0);
  print_own<MlaFp8Sm90Traits<T, false, true>>("mla_fp8_paged_sm90", type, false, 0, 0);
  print_own<MlaFp8Sm90Traits<T, true, false>>("mla_fp8_sm90", type, true, 0, 0);
  print_own<MlaFp8Sm90Traits<T, true, true>>("mla_fp8_paged_sm90", type, true, 0, 0);
}

template <typename T, KvMath kMath, int kD>
void print_gqa_tiles(const char* type) {
  print_gqa<T, kMath, kD, 16>(type);
  print_gqa<T, kMath, kD, 64>(type);
  if constexpr (kD <= 128) print_gqa<T, kMath, kD, 128>(type);
}

template <typename T, KvMath kMath>
void print_common(const char* type) {
#define DDTREE_PRINT(size) print_gqa_tiles<T, kMath, size>(type);
  DDTREE_GQA_HEAD_SIZES(DDTREE_PRINT)
#undef DDTREE_PRINT
  using Mla = MlaTraits<T, kMath>;
  std::printf("mla %s %d 0 0 %d %d\n", type, int(kMath), Mla::kThreads, Mla::kSharedBytes);
}

template <typename T, int kD>
void print_gqa_sm90_sizes(const char* type) {
  print_gqa_sm90<T, kD, 1>(type);
  if constexpr (kD <= 128) print_gqa_sm90<T, kD, 2>(type);
}

template <typename T>
void print_all(const char* type) {
  print_common<T, KvMath::k16Bit>(type);
  print_common<T, KvMath::kFp8>(type);
  print_common<T, KvMath::kConverted>(type);
#define DDTREE_PRINT(size) print_gqa_sm90_sizes<T, size>(type);
  DDTREE_GQA_HEAD_SIZES(DDTREE_PRINT)
  print_mla_sm90<T>(type);
}

template <typename State, int kDk, int kTiles, bool kChannel, bool kWide = false>
void print_recurrent(const char* state) {
  using Traits = VerifyTraits<State, kDk, kTiles, kChannel, kWide>;
  std::printf("recurrent%s %s %d %d %d %d %d\n", kWide ? "_wide" : "", state, kChannel, kDk, kTiles, Traits::kThreads,
              Traits::kSharedBytes);
  if constexpr (!kWide && !kChannel && kTiles > 1) print_recurrent<State, kDk, kTiles, kChannel, true>(state);
}

template <typename State, int kDk, bool kChannel>
void print_recurrent_tiles(const char* state) {
  print_recurrent<State, kDk, 1, kChannel>(state);
  print_recurrent<State, kDk, 2, kChannel>(state);
  print_recurrent<State, kDk, 3, kChannel>(state);
  print_recurrent<State, kDk, 4, kChannel>(state);
}

template <typename State>
void print_recurrent_all(const char* state) {
  print_recurrent_tiles<State, 64, false>(state);
  print_recurrent_tiles<State, 64, true>(state);
  print_recurrent_tiles<State, 128, false>(state);
  print_recurrent_tiles<State, 128, true>(state);
}

template <typename Traits>
void print_index(const char* kernel) {
  std::printf("%s __nv_bfloat16 0 %d %d %d %d\n", kernel, kIndexHeadDim, Traits::kTileKeys, Traits::kThreads,
              Traits::kMaxSharedBytes);
}

int main() {
  print_all<__half>("__half");
  print_all<__nv_bfloat16>("__nv_bfloat16");
  print_recurrent_all<float>("float");
  print_recurrent_all<__nv_bfloat16>("__nv_bfloat16");
  print_index<IndexTraits>("index");
  print_index<IndexSm90Traits>("index_sm90");
}
