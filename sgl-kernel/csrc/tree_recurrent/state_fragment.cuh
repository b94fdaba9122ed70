// A tile of the stored state in registers.
#pragma once

#include "tree_recurrent/device.cuh"

namespace ddtree {

// Sixteen columns of the state as A operands. Lane 4 g + c holds rows (columns of S) g and g + 8. Of each 32 channels
// it holds 8 c to 8 c + 7: the first four feed one mma and the others the next. q and k are read in the same order.
template <typename State, int kDk>
struct StateFragment {
  static constexpr bool kSplit = sizeof(State) == 4;
  static constexpr int kPerRow = kSplit ? 8 : 4;  // registers per row and 32 channels
  uint32_t raw[kDk / 32 * 2 * kPerRow];

  __device__ __forceinline__ void load(const StatePool& pool, int64_t slot, int head, int column) {
    const int lane = threadIdx.x & 31;
    const State* base = static_cast<const State*>(pool.data) + slot * pool.stride_slot + head * pool.stride_h +
                        (column + lane / 4) * pool.stride_v + 8 * (lane & 3) * pool.stride_k;
    if (pool.stride_k == 1) {
#pragma unroll
      for (int i = 0; i < kDk / 32; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int part = 0; part < kPerRow / 4; ++part) {
            const uint4 v = load_global_16(base + 8 * r * pool.stride_v + 32 * i + 4 * part);
            uint32_t* out = raw + (2 * i + r) * kPerRow + 4 * part;
            out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
          }
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kDk / 32; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < kPerRow; ++e) {
          const State* at = base + 8 * r * pool.stride_v;
          uint32_t& out = raw[(2 * i + r) * kPerRow + e];
          if constexpr (kSplit) {
            out = __float_as_uint(at[(32 * i + e) * pool.stride_k]);
          } else {
            const auto* bits = reinterpret_cast<const uint16_t*>(at);
            out = bits[(32 * i + 2 * e) * pool.stride_k] | uint32_t(bits[(32 * i + 2 * e + 1) * pool.stride_k]) << 16;
          }
        }
      }
    }
  }

  // Turns fp32 values into their two bf16 parts, in place.
  __device__ __forceinline__ void split() {
    if constexpr (kSplit) {
#pragma unroll
      for (int i = 0; i < kDk / 32 * kPerRow; ++i) {
        split2(__uint_as_float(raw[2 * i]), __uint_as_float(raw[2 * i + 1]), raw[2 * i], raw[2 * i + 1]);
      }
    }
  }

  // The operand of step `half` (0, 1) of channels 32 i to 32 i + 31; part 0 is the high one. bf16 states have no other.
  __device__ __forceinline__ void operand(int i, int half, int part, uint32_t (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        a[2 * pair + r] = raw[(2 * i + r) * kPerRow + (kSplit ? 4 * half + 2 * pair + part : 2 * half + pair)];
      }
    }
  }
};

}  // namespace ddtree
