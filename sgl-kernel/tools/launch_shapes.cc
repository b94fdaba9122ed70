// Prints what the partial kernels' traits fix and their machine code does not show: for each instantiation its template
// arguments, threads a block and dynamic shared memory. kernel_report.py compiles and runs it.
#include <cstdio>

#include "tree_verify/traits.h"

using namespace ddtree;

struct Element {};

template <bool kFp8, int kD, int kTileM>
void print_gqa() {
  using Traits = GqaTraits<Element, kFp8, kD, kTileM>;
  std::printf("gqa %d %d %d %d %d\n", kFp8, kD, kTileM, Traits::kThreads, Traits::kSharedBytes);
}

template <bool kFp8, int kD>
void print_gqa_tiles() {
  print_gqa<kFp8, kD, 16>();
  print_gqa<kFp8, kD, 64>();
  if constexpr (kD <= 128) print_gqa<kFp8, kD, 128>();
}

template <bool kFp8>
void print_all() {
  print_gqa_tiles<kFp8, 64>();
  print_gqa_tiles<kFp8, 96>();
  print_gqa_tiles<kFp8, 128>();
  print_gqa_tiles<kFp8, 192>();
  print_gqa_tiles<kFp8, 256>();
  using Traits = MlaTraits<Element, kFp8>;
  std::printf("mla %d 0 0 %d %d\n", kFp8, Traits::kThreads, Traits::kSharedBytes);
}

int main() {
  print_all<false>();
  print_all<true>();
}
