// Four lanes: AArch64 Advanced SIMD. There is no cheap non-temporal store: `stream` is a store.
struct V {
  using R = float32x4_t;
  static constexpr int W = 4;
  WEFT_FN R load(const float* p) { return vld1q_f32(p); }
  WEFT_FN R load(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
  WEFT_FN R load(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
  WEFT_FN void store(float* p, R x) { vst1q_f32(p, x); }
  WEFT_FN void store(bf16* p, R x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x), high = vshrq_n_u32(u, 16);
    const uint32x4_t lowest = vandq_u32(high, vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(u, vaddq_u32(vdupq_n_u32(0x7fff), lowest)), 16);
    const uint32x4_t number = vceqq_f32(x, x);
    vst1_u16(&p->bits, vmovn_u32(vbslq_u32(number, rounded, vorrq_u32(high, vdupq_n_u32(0x40)))));
  }
  WEFT_FN void store(f16* p, R x) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
  template <class T>
  WEFT_FN void stream(T* p, R x) { store(p, x); }
  template <class T>
  WEFT_FN R round(R x, const T*) {
    T narrowed[W];
    store(narrowed, x);
    return load(narrowed);
  }
  WEFT_FN R round(R x, const float*) { return x; }
  template <class T>
  WEFT_FN void store_rounded(T* p, R x) { store(p, x); }
  WEFT_FN R add(R a, R b) { return vaddq_f32(a, b); }
  WEFT_FN R mul(R a, R b) { return vmulq_f32(a, b); }
  WEFT_FN R all(float x) { return vdupq_n_f32(x); }
  WEFT_FN R zero() { return vdupq_n_f32(0.0f); }
  WEFT_FN float sum(R x) { return vaddvq_f32(x); }
};
