// Eight lanes: AVX2 and F16C.
struct V {
  using R = __m256;
  static constexpr int W = 8;
  WEFT_FN R load(const float* p) { return _mm256_loadu_ps(p); }
  WEFT_FN R load(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  WEFT_FN R load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  // The rounded number as float bits; what is below bit 16 is of no meaning. A NaN made of bfloat16 numbers has zeros
  // below bit 16, so rounding cannot carry it away.
  WEFT_FN __m256i rounded_bf16(R x) {
    const __m256i u = _mm256_castps_si256(x), lowest = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), lowest);
  }
  WEFT_FN __m128i high_halves(__m256i x) {
    const __m256i high = _mm256_srli_epi32(x, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  WEFT_FN __m128i pack(R x, const bf16*) { return high_halves(rounded_bf16(x)); }
  WEFT_FN __m128i pack(R x, const f16*) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  WEFT_FN void store(float* p, R x) { _mm256_storeu_ps(p, x); }
  WEFT_FN void stream(float* p, R x) { _mm256_stream_ps(p, x); }
  template <class T>
  WEFT_FN void store(T* p, R x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack(x, p)); }
  template <class T>
  WEFT_FN void stream(T* p, R x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), pack(x, p)); }
  WEFT_FN R round(R x, const float*) { return x; }
  WEFT_FN R round(R x, const bf16*) {
    return _mm256_castsi256_ps(_mm256_and_si256(rounded_bf16(x), _mm256_set1_epi32(int(0xffff0000))));
  }
  WEFT_FN R round(R x, const f16*) { return _mm256_cvtph_ps(pack(x, static_cast<f16*>(nullptr))); }
  // What `round` gave, stored as it is.
  WEFT_FN void store_rounded(float* p, R x) { store(p, x); }
  WEFT_FN void store_rounded(f16* p, R x) { store(p, x); }
  WEFT_FN void store_rounded(bf16* p, R x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), high_halves(_mm256_castps_si256(x)));
  }
  WEFT_FN R add(R a, R b) { return _mm256_add_ps(a, b); }
  WEFT_FN R mul(R a, R b) { return _mm256_mul_ps(a, b); }
  WEFT_FN R all(float x) { return _mm256_set1_ps(x); }
  WEFT_FN R zero() { return _mm256_setzero_ps(); }
  WEFT_FN float sum(R x) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, x);
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  }
};
