// Sixteen float lanes in two registers: AVX2, FMA and F16C. Pairs have the lanes of lanes_avx512.inl.
struct F {
  __m256 a, b;
};
struct Pair {
  F a, b;
};
constexpr int kRows = 2, kOutputs = 2;

WEFT_FN F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
WEFT_FN F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
WEFT_FN void save(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
WEFT_FN F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
WEFT_FN F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
WEFT_FN F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
WEFT_FN F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
WEFT_FN F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
WEFT_FN F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
WEFT_FN F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
WEFT_FN F nearest(F x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
WEFT_FN __m256 power8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
WEFT_FN F power_of_two(F n) { return {power8(n.a), power8(n.b)}; }
WEFT_FN F zero_below(F x, F limit, F value) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ), value.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ), value.b)};
}
WEFT_FN float sum(F x) {
  const __m256 y = _mm256_add_ps(x.a, x.b);
  const __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  const __m128 w = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(w, _mm_shuffle_ps(w, w, 1)));
}
WEFT_FN __m256 high_half(__m256i x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))));
}
WEFT_FN Pair load32(const float* p) { return {load(p), load(p + 16)}; }
WEFT_FN Pair load32(const bf16* p) {
  const auto from = reinterpret_cast<const __m256i*>(p);
  const __m256i x = _mm256_loadu_si256(from), y = _mm256_loadu_si256(from + 1);
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))},
          {high_half(x), high_half(y)}};
}
WEFT_FN F half16(const f16* p) {
  const auto from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
WEFT_FN Pair load32(const f16* p) { return {half16(p), half16(p + 16)}; }
WEFT_FN F float8_16(const f8* p) {
  const __m256i bits = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i largest = _mm256_set1_epi16(0x7f), half = _mm256_set1_epi16(int16_t(0xbf80));
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(bits, largest), largest);
  const __m256i wide = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(bits, 7), half),
                                       _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(wide)), _mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1))};
}
WEFT_FN Pair load32(const f8* p) { return {float8_16(p), float8_16(p + 16)}; }
WEFT_FN void store32(float* p, Pair x) { save(p, x.a), save(p + 16, x.b); }
WEFT_FN __m256i rounded_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), lowest = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), lowest);
}
WEFT_FN __m256i packed_bf16(__m256 even, __m256 odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(rounded_bf16(even), 16), rounded_bf16(odd), 0xaa);
}
WEFT_FN void store32(bf16* p, Pair x) {
  const auto to = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(to, packed_bf16(x.a.a, x.b.a)), _mm256_storeu_si256(to + 1, packed_bf16(x.a.b, x.b.b));
}
WEFT_FN __m128i half8(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
WEFT_FN void store32(f16* p, Pair x) {
  const auto to = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(to, half8(x.a.a)), _mm_storeu_si128(to + 1, half8(x.a.b));
  _mm_storeu_si128(to + 2, half8(x.b.a)), _mm_storeu_si128(to + 3, half8(x.b.b));
}
WEFT_FN F load16(const float* p) { return load(p); }
WEFT_FN F load16(const bf16* p) {
  const auto from = reinterpret_cast<const __m128i*>(p);
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(from)), y = _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))};
}
WEFT_FN F load16(const f16* p) { return half16(p); }
WEFT_FN void store16(float* p, F x) { save(p, x); }
WEFT_FN void store16(bf16* p, F x) {
  const __m256i a = _mm256_srli_epi32(rounded_bf16(x.a), 16), b = _mm256_srli_epi32(rounded_bf16(x.b), 16);
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}
WEFT_FN void store16(f16* p, F x) {
  const auto to = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(to, half8(x.a)), _mm_storeu_si128(to + 1, half8(x.b));
}
// Fills out with the sums of N numbers' lanes.
template <int N>
WEFT_FN void sums(const F* x, float* out) {
  for (int i = 0; i < N; ++i) out[i] = sum(x[i]);
}
