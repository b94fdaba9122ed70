// Conversions between float and the 16- and 8-bit types of the caches, for host code without torch.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace ddtree {

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct BFloat16 {
  uint16_t bits;
  operator float() const { return float_from_bits(uint32_t{bits} << 16); }
  static BFloat16 round(float value) {
    if (std::isnan(value)) return {0x7fc0};
    const uint32_t wide = bits_from_float(value);
    return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};  // to nearest, ties to even
  }
};

struct Float16 {
  uint16_t bits;
  operator float() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    // 2^112 moves the half's exponent bias (15) to the float's (127), subnormals included.
    const float value = float_from_bits(magnitude << 13) * 0x1p112f;
    const uint32_t wide = magnitude >= 0x7c00 ? 0x7f800000u | (magnitude << 13) : bits_from_float(value);
    return float_from_bits(wide | sign);
  }
  static Float16 round(float value) {
    const uint32_t wide = bits_from_float(value);
    const uint16_t sign = static_cast<uint16_t>((wide >> 16) & 0x8000u);
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds to infinity
    if (magnitude < 0x1p-14f) {
      return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)))};
    }
    const uint32_t rebased = bits_from_float(magnitude) - (112u << 23);
    return {static_cast<uint16_t>(sign | ((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13))};
  }
};

// float8_e4m3fn: bias 7, no infinity, NaN only if all bits except the sign are set.
struct Float8E4M3 {
  uint8_t bits;
  operator float() const { return table()[bits]; }

 private:
  static const std::array<float, 256>& table() {
    static const std::array<float, 256> values = [] {
      std::array<float, 256> out{};
      for (int i = 0; i < 256; ++i) {
        const int exponent = (i >> 3) & 15, mantissa = i & 7;
        float value = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
        if (exponent == 15 && mantissa == 7) value = std::numeric_limits<float>::quiet_NaN();
        out[i] = i & 128 ? -value : value;
      }
      return out;
    }();
    return values;
  }
};

}  // namespace ddtree
