// Kernels on rows: sums, copies that bypass the cache, residual add with RMSNorm; chosen for the CPU at run time.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace weft {

struct Rows {
  const char* isa;
  // out[i] = Σ sources[k][i] in order of k, in float (f64: double), rounded once. stream: store past the cache.
  void (*reduce)(DType, void* out, const void* const* sources, int n, int64_t count, bool stream);
  // out[i] = Σ weights[k] · sources[k][i] in order of k, in float, each product and sum rounded; out rounded once. No
  // f64.
  void (*weighted)(DType, void* out, const void* const* sources, const float* weights, int n, int64_t count);
  // memcpy to a 64-byte aligned address past the cache: a plain store would first fetch lines that a peer has read.
  void (*copy_stream)(void* out, const void* in, int64_t bytes);
  // residual_out = residual + delta; normed = RMSNorm(residual_out) · weight, in float (f64: double).
  void (*add_norm)(DType, void* residual_out, void* normed, const void* delta, const void* residual, const void* weight,
                   int64_t rows, int64_t width, double eps);
};

// Makes streamed stores visible before the next publication.
inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

namespace scalar {
#define WEFT_ISA_NAME "scalar"
#define WEFT_TARGET
#define WEFT_FN static inline
#include "vec_scalar.inl"
inline void copy_stream(void* out, const void* in, int64_t bytes) { std::memcpy(out, in, size_t(bytes)); }
#include "rows.inl"
#undef WEFT_ISA_NAME
#undef WEFT_TARGET
#undef WEFT_FN
}  // namespace scalar

#if defined(__x86_64__)
namespace avx2 {
#define WEFT_ISA_NAME "avx2"
#define WEFT_TARGET __attribute__((target("avx2,f16c")))
#define WEFT_FN WEFT_TARGET static inline
#include "vec_avx2.inl"
WEFT_TARGET inline void copy_stream(void* out, const void* in, int64_t bytes) {
  auto to = static_cast<char*>(out);
  auto from = static_cast<const char*>(in);
  for (; bytes >= 64; bytes -= 64, to += 64, from += 64)
    for (int i = 0; i < 64; i += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  std::memcpy(to, from, size_t(bytes));
}
#include "rows.inl"
#undef WEFT_ISA_NAME
#undef WEFT_TARGET
#undef WEFT_FN
}  // namespace avx2

namespace avx512 {
#define WEFT_ISA_NAME "avx512"
#define WEFT_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c")))
#define WEFT_FN WEFT_TARGET static inline
#include "vec_avx512.inl"
WEFT_TARGET inline void copy_stream(void* out, const void* in, int64_t bytes) {
  auto to = static_cast<char*>(out);
  auto from = static_cast<const char*>(in);
  for (; bytes >= 64; bytes -= 64, to += 64, from += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  std::memcpy(to, from, size_t(bytes));
}
#include "rows.inl"
#undef WEFT_ISA_NAME
#undef WEFT_TARGET
#undef WEFT_FN
}  // namespace avx512
#endif

#if defined(__aarch64__)
namespace neon {
#define WEFT_ISA_NAME "neon"
#define WEFT_TARGET
#define WEFT_FN static inline
#include "vec_neon.inl"
inline void copy_stream(void* out, const void* in, int64_t bytes) { std::memcpy(out, in, size_t(bytes)); }
#include "rows.inl"
#undef WEFT_ISA_NAME
#undef WEFT_TARGET
#undef WEFT_FN
}  // namespace neon
#endif

// The kernels of an instruction set by name; "auto": the widest that this CPU has. Throws std::invalid_argument.
inline const Rows& rows_for(const std::string& isa) {
  const bool any = isa == "auto";
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (wide && (any || isa == "avx512")) return avx512::kRows;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && (any || isa == "avx2")) return avx2::kRows;
#elif defined(__aarch64__)
  if (any || isa == "neon") return neon::kRows;
#endif
  if (any || isa == "scalar") return scalar::kRows;
  throw std::invalid_argument("this CPU has no " + isa);
}

}  // namespace weft
