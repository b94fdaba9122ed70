// wgmma products of the shapes that the GQA kernel needs: m64nNk16, N implied by the accumulator's size.
#pragma once

#include "wgmma.cuh"

namespace ddtree {

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

// d [64, N] = a [64, 16] b [N, 16]^T (+ d), both from shared memory, K-major.
DDTREE_DEFINE_WGMMA_SS(32, "%16", "%17", "%18")
DDTREE_DEFINE_WGMMA_SS(64, "%32", "%33", "%34")
DDTREE_DEFINE_WGMMA_SS(128, "%64", "%65", "%66")

#define DDTREE_WGMMA_RS(n, type, a_at, b_at, one_at)                                               \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " one_at                        \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" DDTREE_REG_##n \
               "}, {" a_at "}, " b_at ", accumulate, 1, 1, 1;\n}\n"                                \
               : DDTREE_OUT_##n                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))

#define DDTREE_DEFINE_WGMMA_RS(n, a_at, b_at, one_at)                                               \
  template <typename T>                                                                             \
  __device__ __forceinline__ void wgmma_rs(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b) { \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                               \
      DDTREE_WGMMA_RS(n, "bf16", a_at, b_at, one_at);                                               \
    } else {                                                                                        \
      static_assert(std::is_same_v<T, __half>);                                                     \
      DDTREE_WGMMA_RS(n, "f16", a_at, b_at, one_at);                                                \
    }                                                                                               \
  }

// d [64, N] += a [64, 16] b [16, N]: a from registers, b from shared memory, MN-major.
DDTREE_DEFINE_WGMMA_RS(64, "%32,%33,%34,%35", "%36", "%37")
DDTREE_DEFINE_WGMMA_RS(96, "%48,%49,%50,%51", "%52", "%53")
DDTREE_DEFINE_WGMMA_RS(128, "%64,%65,%66,%67", "%68", "%69")
DDTREE_DEFINE_WGMMA_RS(192, "%96,%97,%98,%99", "%100", "%101")
DDTREE_DEFINE_WGMMA_RS(256, "%128,%129,%130,%131", "%132", "%133")

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

}  // namespace ddtree
