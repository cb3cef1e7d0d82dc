// Model kernels of few rows, chosen for the CPU at run time. All instruction sets give the same bits, but for products
// of bfloat16 numbers by AVX512-BF16 and AMX.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft::model {

// A float8_e4m3fn. `widen` and `load32` give it divided by kOfFloat8: its bits are that number's in float16.
struct f8 {
  uint8_t bits;
};
constexpr float kOfFloat8 = 256.0f;
using weft::narrow, weft::widen;
inline float widen(f8 x) {
  const int magnitude = x.bits & 0x7f;
  return widen(f16{uint16_t((x.bits & 0x80) << 8 | (magnitude == 0x7f ? 0x7e00 : magnitude << 7))});
}
// x: at most 464 in magnitude, or NaN.
inline void narrow(float x, f8* out) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - 960;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
  const uint32_t found = magnitude < 0x3c800000u ? subnormal : normal;
  out->bits = uint8_t(((u >> 24) & 0x80) | (magnitude > 0x7f800000u ? 0x7f : found));
}

constexpr int kTokens = 64;      // of a softmax's block
constexpr int kAheadTokens = 8;  // from a key to the one that is prefetched
constexpr int64_t kPart = 128;   // tokens that one thread attends to, of one key-value head
constexpr int64_t kSeen = 128;   // tokens of a prompt's block, counted from the sequence's first
constexpr int64_t kMaxDim = 1024;
constexpr int64_t kMaxRows = 16;  // of a product
constexpr int64_t kChunk = 48;    // outputs of a product that one thread computes at least
constexpr int64_t kMaxChunk = 192;
constexpr int64_t kDecoded = 512;      // elements of f8 weights that are decoded at a time
constexpr int64_t kMaxColumns = 1024;  // of f8 numbers with one scale
constexpr int64_t kGroup = 12;         // outputs of a product: all rows use their weights in turn
constexpr int64_t kDepth = 8192;       // elements of all rows that stay in the first cache

// Sums of products of rows with a weight [outputs, inputs]. Strides are in elements.
struct Product {
  DType dtype, weight_dtype;  // of x and the weight; f8 weights multiply x in f8, or x that `widen_rows` quantises
  int64_t rows, inputs, padded;
  const float* wide;  // x as `product` reads it, up to `padded` floats a row
  const void *x, *weight;
  const int32_t* from;  // x's row for each row; null: the same
  int64_t x_stride, weight_stride;
  // Of f8: one scale for `columns` elements of a row, and for a block of `unit_rows` outputs and `columns` inputs.
  const float *x_scales, *scales;
  int64_t x_scale_stride, scale_stride, unit_rows, columns;
};

struct Linear : Product {
  DType out_dtype;
  const void* bias;
  void* out;
  int64_t out_stride;
};

// Attention of one row per sequence; see weft.engine.attention.backend.AttentionInputs.
struct Decode {
  DType dtype, cache_dtype;
  int64_t heads, kv_heads, dim, value_dim, padded, padded_value, page_size, page_stride;
  int64_t q_row, q_head, key_slot, key_head, value_slot, value_head;
  const void *q, *keys, *values;
  const int32_t* pages;
  const int8_t *key_exponents, *value_exponents;  // [slots, kv heads], of an f8 cache
  void* out;
  float* lse;
  float scale;
};

// Tokens begin … end − 1 of a sequence and a key-value head.
struct Part {
  int64_t sequence, kv, begin, end;
};

// Attention of a prompt's rows in bf16; see `prompt`. The first `skipped` of `tokens` are not there, and nothing sees them.
struct Prompt {
  int64_t rows, heads, kv_heads, skipped, tokens, dim, value_dim, padded, padded_value, window;
  int64_t q_row, q_head, key_slot, key_head, value_slot, value_head, out_row, out_head, lse_row;
  const void *q, *keys, *values;
  const int32_t* slots;  // of tokens; null: keys and values begin with them
  const int32_t* limits;
  void* out;
  float* lse;
  float scale;
};

struct Norm {
  DType dtype, weight_dtype;
  int64_t width, x_stride, delta_stride;
  const void *x, *delta, *weight;
  void *total, *out;
  float eps;
};

// Rows [queries, keys, values] of heads; see weft.engine.attention.projections.HeadSplit.
struct Rope {
  DType dtype, weight_dtype, cache_dtype;
  int64_t heads, kv_heads, dim, half, qkv_stride, table_stride, key_slot, key_head, value_slot, value_head, unused;
  const void *qkv, *cos, *sin, *q_weight, *k_weight;
  const int64_t* slots;
  void *q, *keys, *values;
  int8_t *key_exponents, *value_exponents;
  float eps;
  bool interleaved;
};

// See weft.engine.kernels.model_reference.gated. scaled: alpha is given.
struct Gated {
  DType dtype;
  int64_t inner, x_stride;
  const void* x;
  void* out;
  bool limited, scaled;
  float limit, alpha;
};

// See weft.kernels.float8.quantise.
struct Quantise {
  DType dtype;
  int64_t width, x_stride, columns;
  const void* x;
  f8* values;
  float* scales;
};

// Sums of `choices` pairs of each token, times their weights: see weft.engine.kernels.model_reference.experts.
struct Combine {
  DType dtype, pair_dtype;
  int64_t choices, width, out_stride;
  const float* weights;  // [tokens, choices]
  const int32_t* pairs;  // rows of `values` [pairs, width]; -1: none
  const void* values;
  void* out;
  bool add;
};

// Index of an element among 32 in the order of load32: even bfloat16 numbers come first.
template <class T>
constexpr int lane_of(int i) {
  return std::is_same_v<T, bf16> ? i % 2 * 16 + i / 2 : i;
}

template <int N>
using Count = std::integral_constant<int, N>;

// Calls function with a number of this type, but for f8.
template <class Function>
void by_type(DType dtype, const Function& function) {
  if (dtype == DType::f32) function(float());
  if (dtype == DType::bf16) function(bf16());
  if (dtype == DType::f16) function(f16());
}

struct ModelKernels {
  const char* isa;
  void (*widen_rows)(const Product&, float* to);
  void (*product)(const Product&, int64_t begin, int64_t end, float* found);
  void (*columns)(const Product&, int64_t begin, int64_t end, float* found);
  void (*finish)(const Linear&, int64_t begin, int64_t end, const float* found);
  // state: see attend.inl, with the widened queries behind it.
  void (*attend)(const Decode&, const Part&, float* state);
  void (*merge)(const Decode&, int64_t sequence, int64_t head, const float* states, int64_t stride, int64_t parts);
  void (*norm)(const Norm&, int64_t row);
  void (*rope)(const Rope&, int64_t row);
  void (*gated)(const Gated&, int64_t row);
  void (*combine)(const Combine&, int64_t token);
  void (*quantise)(const Quantise&, int64_t row);
  // Outputs begin … end − 1 of many rows of bf16, which `pack_block` has packed by 32 as c.wide [rows, padded] in bf16 where
  // `packs_rows` says so, and else are read without `widen_rows`; null: there is none.
  void (*many_rows)(const Linear&, int64_t begin, int64_t end, float* memory) = nullptr;
  bool (*packs_rows)(const Product&) = nullptr;
  void (*pack_block)(const Product&, int64_t first) = nullptr;
  int64_t (*panel_outputs)(int64_t inputs) = nullptr;  // of one call
  int64_t (*panel_floats)(const Product&, int64_t outputs) = nullptr;
  // Attention of prompts: packs 32 tokens of a key-value head, and attends by 32 rows of a head.
  void (*pack_tokens)(const Prompt&, int64_t kv, int64_t first, float* memory) = nullptr;
  void (*attend_rows)(const Prompt&, int64_t head, int64_t first, const float* packed, float* memory) = nullptr;
  int64_t (*prompt_floats)(const Prompt&, bool packed) = nullptr;
};

#define WEFT_FN WEFT_TARGET static inline
#define WEFT_KERNELS columns, finish, attend, merge, norm, rope, gated, combine, quantise
namespace model_scalar {
#define WEFT_TARGET
#include "lanes_scalar.inl"
#include "linear.inl"
#include "attend.inl"
#include "rowwise.inl"
inline constexpr ModelKernels kKernels{"scalar", widen_rows, product, WEFT_KERNELS};
#undef WEFT_TARGET
}  // namespace model_scalar

#if defined(__x86_64__)
namespace model_avx2 {
#define WEFT_TARGET __attribute__((target("avx2,fma,f16c")))
#include "lanes_avx2.inl"
#include "linear.inl"
#include "attend.inl"
#include "rowwise.inl"
inline constexpr ModelKernels kKernels{"avx2", widen_rows, product, WEFT_KERNELS};
#undef WEFT_TARGET
}  // namespace model_avx2

namespace model_avx512 {
#define WEFT_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#include "lanes_avx512.inl"
#include "linear.inl"
#include "attend.inl"
#include "rowwise.inl"
inline constexpr ModelKernels kKernels{"avx512", widen_rows, product, WEFT_KERNELS};
#undef WEFT_TARGET
}  // namespace model_avx512

// Products of bfloat16 numbers by instructions for them. Last bits differ: two products are added at a time, and
// subnormal numbers count as zero.
namespace model_avx512_bf16 {
#define WEFT_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")))
#define WEFT_DOT_BF16
#include "lanes_avx512.inl"
#include "linear.inl"
#undef WEFT_DOT_BF16
#undef WEFT_TARGET
using namespace model_avx512;
inline constexpr ModelKernels kKernels{"avx512_bf16", model_avx512_bf16::widen_rows, model_avx512_bf16::product,
                                       WEFT_KERNELS};
}  // namespace model_avx512_bf16

namespace model_amx {
#define WEFT_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,amx-tile,amx-bf16")))
using namespace model_avx512;
#include "amx.inl"
#include "amx_rows.inl"
#include "amx_attend.inl"
#undef WEFT_TARGET
inline constexpr ModelKernels kKernels{"amx",        rows_of_tiles, product_by_tiles, WEFT_KERNELS,
                                       many_rows,    packs_rows,    pack_block,       panel_outputs,
                                       panel_floats, pack_tokens,   attend_rows,      prompt_floats};

// Linux lets a process use tiles once it has asked.
inline bool permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
}  // namespace model_amx
#endif
#undef WEFT_FN
#undef WEFT_KERNELS

// The kernels of an instruction set by name; "auto": the widest that this CPU has. Throws std::invalid_argument.
inline const ModelKernels& kernels_for(const std::string& isa) {
  const bool any = isa == "auto";
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool narrow = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (wide && narrow && __builtin_cpu_supports("amx-bf16") && (any || isa == "amx") && model_amx::permitted())
    return model_amx::kKernels;
  if (wide && narrow && __builtin_cpu_supports("avx512bf16") && (any || isa == "avx512_bf16"))
    return model_avx512_bf16::kKernels;
  if (wide && narrow && (any || isa == "avx512")) return model_avx512::kKernels;
  if (narrow && (any || isa == "avx2")) return model_avx2::kKernels;
#endif
  if (any || isa == "scalar") return model_scalar::kKernels;
  throw std::invalid_argument("this CPU has no " + isa);
}

}  // namespace weft::model
