// Sixteen lanes: AVX-512 F, BW, VL, DQ.
struct V {
  using R = __m512;
  static constexpr int W = 16;
  WEFT_FN R load(const float* p) { return _mm512_loadu_ps(p); }
  WEFT_FN R load(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  WEFT_FN R load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  // The rounded number as float bits; what is below bit 16 is of no meaning. Not VCVTNEPS2BF16: it takes subnormals for
  // zero. A NaN made of bfloat16 numbers has zeros below bit 16, so rounding cannot carry it away.
  WEFT_FN __m512i rounded_bf16(R x) {
    const __m512i u = _mm512_castps_si512(x), lowest = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), lowest);
  }
  WEFT_FN __m256i pack(R x, const bf16*) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16(x), 16)); }
  WEFT_FN __m256i pack(R x, const f16*) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  WEFT_FN void store(float* p, R x) { _mm512_storeu_ps(p, x); }
  WEFT_FN void stream(float* p, R x) { _mm512_stream_ps(p, x); }
  template <class T>
  WEFT_FN void store(T* p, R x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack(x, p)); }
  template <class T>
  WEFT_FN void stream(T* p, R x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), pack(x, p)); }
  WEFT_FN R round(R x, const float*) { return x; }
  WEFT_FN R round(R x, const bf16*) {
    return _mm512_castsi512_ps(_mm512_and_si512(rounded_bf16(x), _mm512_set1_epi32(int(0xffff0000))));
  }
  WEFT_FN R round(R x, const f16*) { return _mm512_cvtph_ps(pack(x, static_cast<f16*>(nullptr))); }
  // What `round` gave, stored as it is.
  WEFT_FN void store_rounded(float* p, R x) { store(p, x); }
  WEFT_FN void store_rounded(f16* p, R x) { store(p, x); }
  WEFT_FN void store_rounded(bf16* p, R x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)));
  }
  WEFT_FN R add(R a, R b) { return _mm512_add_ps(a, b); }
  WEFT_FN R mul(R a, R b) { return _mm512_mul_ps(a, b); }
  WEFT_FN R all(float x) { return _mm512_set1_ps(x); }
  WEFT_FN R zero() { return _mm512_setzero_ps(); }
  WEFT_FN float sum(R x) { return _mm512_reduce_add_ps(x); }
};
