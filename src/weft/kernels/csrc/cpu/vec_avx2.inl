// Sixteen lanes in two halves: AVX2 and F16C. One half has the even bfloat16 numbers, the other the odd ones: that
// costs a mask and a shift, and a blend to put them back, instead of unpacking neighbours.
struct V {
  struct R {
    __m256 a, b;
  };
  static constexpr int W = 16;
  WEFT_FN R load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  WEFT_FN R load(const bf16* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), high_half(both)};
  }
  WEFT_FN R load(const f16* p) {
    const auto from = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
  }
  WEFT_FN __m256 high_half(__m256i x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))));
  }
  // The rounded number as float bits; bits below 16 are undefined. A NaN made of bfloat16 numbers has zeros below bit
  // 16, so rounding cannot carry it away.
  WEFT_FN __m256i rounded_bf16(__m256 x) {
    const __m256i u = _mm256_castps_si256(x), lowest = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), lowest);
  }
  WEFT_FN __m256i high_halves(__m256i even, __m256i odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
  }
  WEFT_FN __m128i half(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  WEFT_FN __m256i pack(R x, const bf16*) { return high_halves(rounded_bf16(x.a), rounded_bf16(x.b)); }
  WEFT_FN __m256i pack(R x, const f16*) { return _mm256_set_m128i(half(x.b), half(x.a)); }
  WEFT_FN void store(float* p, R x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
  WEFT_FN void stream(float* p, R x) { _mm256_stream_ps(p, x.a), _mm256_stream_ps(p + 8, x.b); }
  template <class T>
  WEFT_FN void store(T* p, R x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack(x, p)); }
  template <class T>
  WEFT_FN void stream(T* p, R x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), pack(x, p)); }
  WEFT_FN R round(R x, const float*) { return x; }
  WEFT_FN R round(R x, const bf16*) { return {high_half(rounded_bf16(x.a)), high_half(rounded_bf16(x.b))}; }
  WEFT_FN R round(R x, const f16*) { return {_mm256_cvtph_ps(half(x.a)), _mm256_cvtph_ps(half(x.b))}; }
  // Stores the result of `round`.
  WEFT_FN void store_rounded(float* p, R x) { store(p, x); }
  WEFT_FN void store_rounded(f16* p, R x) { store(p, x); }
  WEFT_FN void store_rounded(bf16* p, R x) {
    const __m256i both = high_halves(_mm256_castps_si256(x.a), _mm256_castps_si256(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
  }
  WEFT_FN R add(R x, R y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  WEFT_FN R mul(R x, R y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  WEFT_FN R all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  WEFT_FN R zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  WEFT_FN float sum(R x) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, _mm256_add_ps(x.a, x.b));
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  }
};
