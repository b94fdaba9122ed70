// wgmma (sm_90a): matrix products of a warpgroup (four warps), with fp32 accumulators in registers and operands in
// shared memory in the 128-byte swizzle. Products run asynchronously: fence, products, commit, wait.
//
// A swizzled block is [rows][128 bytes], 1024-byte aligned. The 16-byte chunk c of row r is stored at chunk c ^ (r %
// 8). Accumulator of m64nN, thread t of the group, g = t % 32 / 4, c = 2 * (t % 4): d[4 j .. 4 j + 3] are (row, column)
// (16 (t / 32) + g, 8 j + c .. + 1) and (row + 8, the same). A from registers has the layout of mma.sync's A.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace ddtree {

constexpr int kSwizzleRowBytes = 128;
constexpr int kSwizzleAtomBytes = 8 * kSwizzleRowBytes;

// Byte offset of a row's 16-byte chunk in a swizzled block.
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * kSwizzleRowBytes + ((chunk ^ (row & 7)) << 4);
}

// The 64-byte swizzle is for blocks of [rows][64 bytes], 512-byte aligned: chunk c of row r is stored at chunk
// c ^ (r / 2 % 4).
__device__ __forceinline__ int half_swizzled(int row, int chunk) { return row * 64 + ((chunk ^ (row / 2 & 3)) << 4); }

// Shared-memory descriptor of a K-major operand in the 64-byte swizzle.
__device__ __forceinline__ uint64_t wgmma_half_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle64 = uint64_t(2) << 62, kAtom = 8 * 64;
  return kSwizzle64 | (kAtom >> 4) << 32 | (address & 0x3ffff) >> 4;
}

// Shared-memory descriptor of an operand in the 128-byte swizzle. `stride` is the step between atoms of eight rows. A
// K-major product reads 32 bytes along each row and ignores `leading`. An MN-major product reads across 16 rows, and
// `leading` is the step between blocks of 128 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, int leading, int stride) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return kSwizzle128 | uint64_t(stride >> 4) << 32 | uint64_t(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// The descriptor of an operand `bytes` further on. Only the low word changes, which saves the compiler 64-bit sums.
__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, int bytes) {
  return descriptor >> 32 << 32 | (uint32_t(descriptor) + uint32_t(bytes >> 4));
}

// Orders earlier accesses to registers and ordinary accesses to shared memory before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the group's committed batches are running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to accumulators across the surrounding waits and fences.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Makes this thread's ordinary writes to shared memory visible to the products of threads that synchronize with it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The products m64nNk16 of 16-bit types. The size of the accumulator `d` implies N.

#define DDTREE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DDTREE_D16(i) DDTREE_D4(i), DDTREE_D4(i + 4), DDTREE_D4(i + 8), DDTREE_D4(i + 12)
#define DDTREE_OUT_32 DDTREE_D16(0)
#define DDTREE_OUT_64 DDTREE_OUT_32, DDTREE_D16(16)
#define DDTREE_OUT_96 DDTREE_OUT_64, DDTREE_D16(32)
#define DDTREE_OUT_128 DDTREE_OUT_96, DDTREE_D16(48)
#define DDTREE_OUT_192 DDTREE_OUT_128, DDTREE_D16(64), DDTREE_D16(80)
#define DDTREE_OUT_256 DDTREE_OUT_192, DDTREE_D16(96), DDTREE_D16(112)
#define DDTREE_REG_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define DDTREE_REG_64 DDTREE_REG_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DDTREE_REG_96 DDTREE_REG_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define DDTREE_REG_128 DDTREE_REG_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DDTREE_REG_192                                                                                                \
  DDTREE_REG_128                                                                                                      \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
  "%92,%93,%94,%95"
#define DDTREE_REG_256                                                                                               \
  DDTREE_REG_192                                                                                                     \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118," \
  "%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define DDTREE_WGMMA_SS(n, type, a_at, b_at, accumulate_at)                                        \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " accumulate_at                 \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" DDTREE_REG_##n \
               "}, " a_at ", " b_at ", accumulate, 1, 1, 0, 0;\n}\n"                               \
               : DDTREE_OUT_##n                                                                    \
               : "l"(a), "l"(b), "r"(int(accumulate)))

#define DDTREE_DEFINE_WGMMA_SS(n, a_at, b_at, accumulate_at)                                             \
  template <typename T>                                                                                  \
  __device__ __forceinline__ void wgmma_ss(float (&d)[n / 2], uint64_t a, uint64_t b, bool accumulate) { \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                                    \
      DDTREE_WGMMA_SS(n, "bf16", a_at, b_at, accumulate_at);                                             \
    } else {                                                                                             \
      static_assert(std::is_same_v<T, __half>);                                                          \
      DDTREE_WGMMA_SS(n, "f16", a_at, b_at, accumulate_at);                                              \
    }                                                                                                    \
  }

// d [64, N] = a [64, 16] b [N, 16]^T (+ d), with a and b in shared memory, K-major.
DDTREE_DEFINE_WGMMA_SS(32, "%16", "%17", "%18")
DDTREE_DEFINE_WGMMA_SS(64, "%32", "%33", "%34")
DDTREE_DEFINE_WGMMA_SS(128, "%64", "%65", "%66")

#define DDTREE_WGMMA_RS(n, type, a_at, b_at)                                                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" DDTREE_REG_##n \
               "}, {" a_at "}, " b_at ", 1, 1, 1, 1;\n"                                            \
               : DDTREE_OUT_##n                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define DDTREE_DEFINE_WGMMA_RS(n, a_at, b_at)                                                       \
  template <typename T>                                                                             \
  __device__ __forceinline__ void wgmma_rs(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b) { \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                               \
      DDTREE_WGMMA_RS(n, "bf16", a_at, b_at);                                                       \
    } else {                                                                                        \
      static_assert(std::is_same_v<T, __half>);                                                     \
      DDTREE_WGMMA_RS(n, "f16", a_at, b_at);                                                        \
    }                                                                                               \
  }

// d [64, N] += a [64, 16] b [16, N], with a in registers and b in shared memory, MN-major.
DDTREE_DEFINE_WGMMA_RS(64, "%32,%33,%34,%35", "%36")
DDTREE_DEFINE_WGMMA_RS(96, "%48,%49,%50,%51", "%52")
DDTREE_DEFINE_WGMMA_RS(128, "%64,%65,%66,%67", "%68")
DDTREE_DEFINE_WGMMA_RS(192, "%96,%97,%98,%99", "%100")
DDTREE_DEFINE_WGMMA_RS(256, "%128,%129,%130,%131", "%132")

// d [64, 64] = a [64, 16] b [64, 16]^T (+ d) in bfloat16, with a in registers and b in shared memory, K-major.
__device__ __forceinline__ void wgmma_rs_k_major(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" DDTREE_REG_64
      "}, {%32,%33,%34,%35}, %36, accumulate, 1, 1, 0;\n}\n"
      : DDTREE_OUT_64
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}

// The products m64nNk32 of e4m3. Both operands are K-major: a and b hold rows of K bytes. a is a descriptor of shared
// memory, or four registers with the layout of mma.sync m16n8k32's A: bytes 4 c .. 4 c + 3 (c = lane % 4) and 16 bytes
// further on, of rows g, g + 8, g, g + 8.
#define DDTREE_WGMMA_E4M3(n, a_at, b_at, accumulate_at, ...)                                                          \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " accumulate_at                                    \
               ", 0;\n"                                                                                               \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" DDTREE_REG_##n "}, " a_at ", " b_at       \
                                                                                           ", accumulate, 1, 1;\n}\n" \
               : DDTREE_OUT_##n                                                                                       \
               : __VA_ARGS__, "l"(b), "r"(int(accumulate)))

#define DDTREE_DEFINE_WGMMA_E4M3_SS(n, a_at, b_at, accumulate_at)                                          \
  __device__ __forceinline__ void wgmma_e4m3(float (&d)[n / 2], uint64_t a, uint64_t b, bool accumulate) { \
    DDTREE_WGMMA_E4M3(n, a_at, b_at, accumulate_at, "l"(a));                                               \
  }
#define DDTREE_DEFINE_WGMMA_E4M3_RS(n, a_at, b_at, accumulate_at)                                                      \
  __device__ __forceinline__ void wgmma_e4m3(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) { \
    DDTREE_WGMMA_E4M3(n, "{" a_at "}", b_at, accumulate_at, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));               \
  }

DDTREE_DEFINE_WGMMA_E4M3_SS(64, "%32", "%33", "%34")
DDTREE_DEFINE_WGMMA_E4M3_SS(128, "%64", "%65", "%66")
DDTREE_DEFINE_WGMMA_E4M3_RS(64, "%32,%33,%34,%35", "%36", "%37")
DDTREE_DEFINE_WGMMA_E4M3_RS(96, "%48,%49,%50,%51", "%52", "%53")
DDTREE_DEFINE_WGMMA_E4M3_RS(128, "%64,%65,%66,%67", "%68", "%69")

#undef DDTREE_D4
#undef DDTREE_D16
#undef DDTREE_OUT_32
#undef DDTREE_OUT_64
#undef DDTREE_OUT_96
#undef DDTREE_OUT_128
#undef DDTREE_OUT_192
#undef DDTREE_OUT_256
#undef DDTREE_REG_32
#undef DDTREE_REG_64
#undef DDTREE_REG_96
#undef DDTREE_REG_128
#undef DDTREE_REG_192
#undef DDTREE_REG_256
#undef DDTREE_WGMMA_SS
#undef DDTREE_WGMMA_RS
#undef DDTREE_DEFINE_WGMMA_SS
#undef DDTREE_DEFINE_WGMMA_RS
#undef DDTREE_WGMMA_E4M3
#undef DDTREE_DEFINE_WGMMA_E4M3_SS
#undef DDTREE_DEFINE_WGMMA_E4M3_RS

// Moves registers between warpgroups. Each warpgroup of the block calls one of the two in its own branch.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ddtree
