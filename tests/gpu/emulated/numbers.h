// Stands in for CUDA: numbers of few bits, and vectors of them.
#pragma once

#include "threads.h"

struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct float2 {
  float x, y;
};
inline float __uint_as_float(uint32_t w) { return emulated::value_of<float>(w); }
inline uint32_t __float_as_uint(float f) { return uint32_t(emulated::bits(f)); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  const auto narrow = [](float f) {
    const uint32_t w = __float_as_uint(f);
    if (f != f) return __nv_bfloat16{uint16_t(w >> 16 | 0x40)};
    return __nv_bfloat16{uint16_t((w + 0x7fff + (w >> 16 & 1)) >> 16)};
  };
  return {narrow(a), narrow(b)};
}
using __half = _Float16;
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 h) { return {float(h.x), float(h.y)}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }

enum { __NV_SATFINITE, __NV_E4M3 };
inline uint8_t __nv_cvt_float_to_fp8(float f, int, int) {
  const uint8_t sign = uint8_t(__float_as_uint(f) >> 24 & 0x80);
  const float size = std::fabs(f);
  if (f != f) return sign | 0x7f;
  if (size >= 448) return sign | 0x7e;
  const int exponent = std::max(-6, size > 0 ? std::ilogb(size) : -6);    // below, the numbers lie 2^-9 apart
  const int steps = int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 8 to 16 of them, or fewer
  return sign | uint8_t(((exponent + 6) << 3) + steps);
}
inline uint16_t __nv_cvt_float2_to_fp8x2(float2 f, int saturate, int kind) {
  return uint16_t(__nv_cvt_float_to_fp8(f.x, saturate, kind) | __nv_cvt_float_to_fp8(f.y, saturate, kind) << 8);
}
