// Element types of reductions, and the scalar conversions that every instruction set uses for tails.
// Rounding is to nearest, ties to even, so that all paths give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace weft {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3, f8 = 4 };

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
inline float widen(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0));
  if (exponent) return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = float(fraction) * 0x1p-24f;  // zero and subnormal: exact
  return sign ? -magnitude : magnitude;
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bf16* out) {
  const uint32_t u = bits_of(x);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  out->bits = uint16_t(nan ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline void narrow(float x, f16* out) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00 | ((magnitude >> 13) & 0x1ff);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    half = 0x7c00;
  } else if (magnitude >= 0x38800000u) {
    half = (magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  } else {  // subnormal: the addition rounds as the hardware does
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  }
  out->bits = uint16_t(sign | half);
}

}  // namespace weft
