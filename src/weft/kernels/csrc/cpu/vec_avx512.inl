// Thirty-two lanes in two halves: AVX-512 F, BW, VL, DQ. One half has the even bfloat16 numbers, the
// other the odd ones, as in vec_avx2.inl.
struct V {
  struct R {
    __m512 a, b;
  };
  static constexpr int W = 32;
  WEFT_FN R load(const float* p) { return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)}; }
  WEFT_FN R load(const bf16* p) {
    const __m512i both = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), high_half(both)};
  }
  WEFT_FN R load(const f16* p) {
    const auto from = reinterpret_cast<const __m256i*>(p);
    return {_mm512_cvtph_ps(_mm256_loadu_si256(from)), _mm512_cvtph_ps(_mm256_loadu_si256(from + 1))};
  }
  WEFT_FN __m512 high_half(__m512i x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000))));
  }
  // The rounded number as float bits; bits below 16 are undefined. Not VCVTNEPS2BF16: it treats subnormals as zero. A
  // NaN made of bfloat16 numbers has zeros below bit 16, so rounding cannot carry it away.
  WEFT_FN __m512i rounded_bf16(__m512 x) {
    const __m512i u = _mm512_castps_si512(x), lowest = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), lowest);
  }
  WEFT_FN __m512i high_halves(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
  }
  WEFT_FN __m256i half(__m512 x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  WEFT_FN __m512i pack(R x) { return high_halves(rounded_bf16(x.a), rounded_bf16(x.b)); }
  WEFT_FN void store(float* p, R x) { _mm512_storeu_ps(p, x.a), _mm512_storeu_ps(p + 16, x.b); }
  WEFT_FN void stream(float* p, R x) { _mm512_stream_ps(p, x.a), _mm512_stream_ps(p + 16, x.b); }
  WEFT_FN void store(bf16* p, R x) { _mm512_storeu_si512(p, pack(x)); }
  WEFT_FN void stream(bf16* p, R x) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), pack(x)); }
  WEFT_FN void store(f16* p, R x) {
    const auto to = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(to, half(x.a)), _mm256_storeu_si256(to + 1, half(x.b));
  }
  WEFT_FN void stream(f16* p, R x) {
    const auto to = reinterpret_cast<__m256i*>(p);
    _mm256_stream_si256(to, half(x.a)), _mm256_stream_si256(to + 1, half(x.b));
  }
  WEFT_FN R round(R x, const float*) { return x; }
  WEFT_FN R round(R x, const bf16*) { return {high_half(rounded_bf16(x.a)), high_half(rounded_bf16(x.b))}; }
  WEFT_FN R round(R x, const f16*) { return {_mm512_cvtph_ps(half(x.a)), _mm512_cvtph_ps(half(x.b))}; }
  // Stores the result of `round`.
  WEFT_FN void store_rounded(float* p, R x) { store(p, x); }
  WEFT_FN void store_rounded(f16* p, R x) { store(p, x); }
  WEFT_FN void store_rounded(bf16* p, R x) {
    _mm512_storeu_si512(p, high_halves(_mm512_castps_si512(x.a), _mm512_castps_si512(x.b)));
  }
  WEFT_FN R add(R x, R y) { return {_mm512_add_ps(x.a, y.a), _mm512_add_ps(x.b, y.b)}; }
  WEFT_FN R mul(R x, R y) { return {_mm512_mul_ps(x.a, y.a), _mm512_mul_ps(x.b, y.b)}; }
  WEFT_FN R all(float x) { return {_mm512_set1_ps(x), _mm512_set1_ps(x)}; }
  WEFT_FN R zero() { return {_mm512_setzero_ps(), _mm512_setzero_ps()}; }
  WEFT_FN float sum(R x) { return _mm512_reduce_add_ps(_mm512_add_ps(x.a, x.b)); }
};
