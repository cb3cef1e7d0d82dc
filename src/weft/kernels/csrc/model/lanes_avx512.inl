// Sixteen float lanes in one register: AVX-512 F, BW, VL, DQ.
using F = __m512;
struct Pair {
  F a, b;
};
// Sizes of a block of sums, which stay in registers.
constexpr int kRows = 4, kOutputs = 4;

WEFT_FN F all(float x) { return _mm512_set1_ps(x); }
WEFT_FN F load(const float* p) { return _mm512_loadu_ps(p); }
WEFT_FN void save(float* p, F x) { _mm512_storeu_ps(p, x); }
WEFT_FN F add(F x, F y) { return _mm512_add_ps(x, y); }
WEFT_FN F sub(F x, F y) { return _mm512_sub_ps(x, y); }
WEFT_FN F mul(F x, F y) { return _mm512_mul_ps(x, y); }
WEFT_FN F div(F x, F y) { return _mm512_div_ps(x, y); }
WEFT_FN F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
WEFT_FN F max(F x, F y) { return _mm512_max_ps(x, y); }
WEFT_FN F min(F x, F y) { return _mm512_min_ps(x, y); }
WEFT_FN F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
WEFT_FN F power_of_two(F n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
WEFT_FN F zero_below(F x, F limit, F value) {
  return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), _mm512_setzero_ps());
}
WEFT_FN float sum(F x) {
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  const __m128 w = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(w, _mm_shuffle_ps(w, w, 1)));
}
WEFT_FN Pair load32(const float* p) { return {load(p), load(p + 16)}; }
WEFT_FN Pair load32(const bf16* p) {
  const __m512i both = _mm512_loadu_si512(p), high = _mm512_set1_epi32(int(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(_mm512_and_si512(both, high))};
}
WEFT_FN Pair load32(const f16* p) {
  const auto from = reinterpret_cast<const __m256i*>(p);
  return {_mm512_cvtph_ps(_mm256_loadu_si256(from)), _mm512_cvtph_ps(_mm256_loadu_si256(from + 1))};
}
WEFT_FN Pair load32(const f8* p) {
  const __m512i bits = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i largest = _mm512_set1_epi16(0x7f), half = _mm512_set1_epi16(int16_t(0xbf80));
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, largest), largest);
  const __m512i wide =
      _mm512_mask_mov_epi16(_mm512_and_si512(_mm512_slli_epi16(bits, 7), half), nan, _mm512_set1_epi16(0x7e00));
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(wide)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(wide, 1))};
}
WEFT_FN void store32(float* p, Pair x) { save(p, x.a), save(p + 16, x.b); }
// The rounded number in the high half. Not VCVTNEPS2BF16: it treats subnormals as zero.
WEFT_FN __m512i rounded_bf16(F x) {
  const __m512i u = _mm512_castps_si512(x), lowest = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), lowest);
}
WEFT_FN void store32(bf16* p, Pair x) {
  const __m512i even = _mm512_srli_epi32(rounded_bf16(x.a), 16);
  _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaa, even, rounded_bf16(x.b)));
}
WEFT_FN void store32(f16* p, Pair x) {
  const auto to = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(to, _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm256_storeu_si256(to + 1, _mm512_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Sixteen numbers in order.
WEFT_FN F load16(const float* p) { return load(p); }
WEFT_FN F load16(const bf16* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
WEFT_FN F load16(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
WEFT_FN void store16(float* p, F x) { save(p, x); }
WEFT_FN void store16(bf16* p, F x) {
  const __m256i narrowed = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16(x), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed);
}
WEFT_FN void store16(f16* p, F x) {
  const __m256i narrowed = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed);
}
// Sums of halves, of quarters, of pairs and of two lanes; each step adds lanes of two registers, in the order of `sum`.
WEFT_FN F halves(F x, F y) { return add(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee)); }
WEFT_FN F quarters(F x, F y) { return add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd)); }
WEFT_FN F pairs(F x, F y) { return add(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee)); }
WEFT_FN F singles(F x, F y) { return add(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd)); }
// Fills out with the sums of N numbers' lanes, sixteen or eight numbers at a time.
template <int N>
WEFT_FN void sums(const F* x, float* out) {
  if constexpr (N == 16) {
    const auto four = [&](int i) WEFT_TARGET { return quarters(halves(x[i], x[i + 4]), halves(x[i + 8], x[i + 12])); };
    save(out, singles(pairs(four(0), four(1)), pairs(four(2), four(3))));
  } else if constexpr (N == 8) {
    const auto four = [&](int i) WEFT_TARGET { return quarters(halves(x[i], x[i + 2]), halves(x[i + 4], x[i + 6])); };
    const F both = pairs(four(0), four(1)), all_sums = singles(both, both);
    float found[16];
    save(found, all_sums);
    for (int i = 0; i < 8; ++i) out[i] = found[i / 2 * 4 + i % 2];
  } else {
    for (int i = 0; i < N; ++i) out[i] = sum(x[i]);
  }
}
