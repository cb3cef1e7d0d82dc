// The 16-byte unit in which data travels, its sentinel, and its elements as floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx.cuh"

namespace weft {

// All ones, a NaN of all types: no data yet. A word of data that equals the sentinel is sent as the escape, the NaN
// before it. Sums need no more. Copies must restore each bit: the source of a unit with an escape also stores the
// unit's mark, a byte with bit i set if word i is the sentinel. Until then the mark is no mark.
constexpr uint32_t kSentinel = 0xffffffffu, kEscape = kSentinel - 1, kNoMark = 0xff;

__device__ inline void push_unit(char* p, const Unit& u) {
  store_published(
      p, {min_of(u.w[0], kEscape), min_of(u.w[1], kEscape), min_of(u.w[2], kEscape), min_of(u.w[3], kEscape)});
}
__device__ inline uint32_t largest_word(const Unit& u) { return max(max(u.w[0], u.w[1]), max(u.w[2], u.w[3])); }
__device__ inline bool needs_mark(const Unit& u) { return largest_word(u) >= kEscape; }  // before it is sent
__device__ inline bool has_mark(const Unit& u) { return largest_word(u) == kEscape; }    // once it has arrived
// Not inlined: it is rarely run, and inlining would spread the code around it.
__device__ __noinline__ inline void push_mark(char* mark, Unit u) {
  uint32_t sentinels = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) sentinels |= uint32_t(u.w[i] == kSentinel) << i;
  store_published(mark, uint8_t(sentinels));
}
__device__ inline bool arrived(const Unit& u) {
  return u.w[0] != kSentinel & u.w[1] != kSentinel & u.w[2] != kSentinel & u.w[3] != kSentinel;
}
template <class T>
struct Elements;  // of a unit, as floats. nothing: negative zeros, which change no sum
template <>
struct Elements<float> {
  static constexpr int count = 4;
  __device__ static Unit nothing() { return {{0x80000000u, 0x80000000u, 0x80000000u, 0x80000000u}}; }
  __device__ static void widen(const Unit& u, float* f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] = __uint_as_float(u.w[i]);
  }
  __device__ static Unit narrow(const float* f) {
    Unit u;
#pragma unroll
    for (int i = 0; i < 4; ++i) u.w[i] = __float_as_uint(f[i]);
    return u;
  }
};
template <>
struct Elements<__nv_bfloat16> {
  static constexpr int count = 8;
  __device__ static Unit nothing() { return {{0x80008000u, 0x80008000u, 0x80008000u, 0x80008000u}}; }
  __device__ static void widen(const Unit& u, float* f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(u.w[i] << 16);
      f[2 * i + 1] = __uint_as_float(u.w[i] & 0xffff0000u);
    }
  }
  __device__ static Unit narrow(const float* f) {
    Unit u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
      u.w[i] = reinterpret_cast<const uint32_t&>(two);
    }
    return u;
  }
};
template <>
struct Elements<__half> {
  static constexpr int count = 8;
  __device__ static Unit nothing() { return {{0x80008000u, 0x80008000u, 0x80008000u, 0x80008000u}}; }
  __device__ static void widen(const Unit& u, float* f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __half22float2(reinterpret_cast<const __half2&>(u.w[i]));
      f[2 * i] = two.x;
      f[2 * i + 1] = two.y;
    }
  }
  __device__ static Unit narrow(const float* f) {
    Unit u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 two = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
      u.w[i] = reinterpret_cast<const uint32_t&>(two);
    }
    return u;
  }
};

// A tensor's unit, counted from its first row on. kWhole: rows are whole units, aligned; else bytes go one by one.
template <bool kWhole>
__device__ inline Unit load_local(const char* base, uint32_t unit, uint32_t row_units, uint32_t row_bytes) {
  Unit u{};
  if constexpr (kWhole) {
    const uint4 v = *reinterpret_cast<const uint4*>(base + int64_t(unit) * kUnit);
    u.w[0] = v.x, u.w[1] = v.y, u.w[2] = v.z, u.w[3] = v.w;
  } else {
    const uint32_t k = unit % row_units * kUnit, bytes = min(uint32_t(kUnit), row_bytes - k);
    const char* p = base + int64_t(unit / row_units) * row_bytes + k;
    for (uint32_t i = 0; i < bytes; ++i) u.w[i / 4] |= uint32_t(uint8_t(p[i])) << (8 * (i % 4));
  }
  return u;
}
template <bool kWhole>
__device__ inline void store_local(char* base, uint32_t unit, const Unit& u, uint32_t row_units, uint32_t row_bytes) {
  if constexpr (kWhole) {
    *reinterpret_cast<uint4*>(base + int64_t(unit) * kUnit) = make_uint4(u.w[0], u.w[1], u.w[2], u.w[3]);
  } else {
    const uint32_t k = unit % row_units * kUnit, bytes = min(uint32_t(kUnit), row_bytes - k);
    char* p = base + int64_t(unit / row_units) * row_bytes + k;
    for (uint32_t i = 0; i < bytes; ++i) p[i] = char(u.w[i / 4] >> (8 * (i % 4)));
  }
}

}  // namespace weft
