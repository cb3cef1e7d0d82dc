// Sixteen float lanes in an array: runs everywhere. Pairs have the lanes of lanes_avx512.inl, so that the bits agree.
struct F {
  float x[16];
};
struct Pair {
  F a, b;
};
constexpr int kRows = 4, kOutputs = 1;

template <class Function>
WEFT_FN F each(Function&& function) {
  F out;
  for (int i = 0; i < 16; ++i) out.x[i] = function(i);
  return out;
}
WEFT_FN F all(float x) {
  return each([&](int) { return x; });
}
WEFT_FN F load(const float* p) {
  return each([&](int i) { return p[i]; });
}
WEFT_FN void save(float* p, const F& x) { std::memcpy(p, x.x, sizeof x.x); }
WEFT_FN F add(const F& x, const F& y) {
  return each([&](int i) { return x.x[i] + y.x[i]; });
}
WEFT_FN F sub(const F& x, const F& y) {
  return each([&](int i) { return x.x[i] - y.x[i]; });
}
WEFT_FN F mul(const F& x, const F& y) {
  return each([&](int i) { return x.x[i] * y.x[i]; });
}
WEFT_FN F div(const F& x, const F& y) {
  return each([&](int i) { return x.x[i] / y.x[i]; });
}
WEFT_FN F fma(const F& x, const F& y, const F& z) {
  return each([&](int i) { return __builtin_fmaf(x.x[i], y.x[i], z.x[i]); });
}
// The second operand if one is NaN, as x86 does.
WEFT_FN F max(const F& x, const F& y) {
  return each([&](int i) { return x.x[i] > y.x[i] ? x.x[i] : y.x[i]; });
}
WEFT_FN F min(const F& x, const F& y) {
  return each([&](int i) { return x.x[i] < y.x[i] ? x.x[i] : y.x[i]; });
}
WEFT_FN F nearest(const F& x) {
  return each([&](int i) { return __builtin_nearbyintf(x.x[i]); });
}
WEFT_FN F power_of_two(const F& n) {
  return each([&](int i) { return n.x[i] == n.x[i] ? float_of(uint32_t(int(n.x[i]) + 127) << 23) : n.x[i]; });
}
WEFT_FN F zero_below(const F& x, const F& limit, const F& value) {
  return each([&](int i) { return x.x[i] < limit.x[i] ? 0.0f : value.x[i]; });
}
WEFT_FN float sum(F x) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) x.x[i] += x.x[i + n];
  return x.x[0];
}
template <class T>
WEFT_FN Pair load32(const T* p) {
  return {each([&](int i) { return widen(p[i]); }), each([&](int i) { return widen(p[i + 16]); })};
}
WEFT_FN Pair load32(const bf16* p) {
  return {each([&](int i) { return widen(p[2 * i]); }), each([&](int i) { return widen(p[2 * i + 1]); })};
}
template <class T>
WEFT_FN void store32(T* p, const Pair& x) {
  for (int i = 0; i < 16; ++i) narrow(x.a.x[i], p + i), narrow(x.b.x[i], p + i + 16);
}
WEFT_FN void store32(bf16* p, const Pair& x) {
  for (int i = 0; i < 16; ++i) narrow(x.a.x[i], p + 2 * i), narrow(x.b.x[i], p + 2 * i + 1);
}
template <class T>
WEFT_FN F load16(const T* p) {
  return each([&](int i) { return widen(p[i]); });
}
template <class T>
WEFT_FN void store16(T* p, const F& x) {
  for (int i = 0; i < 16; ++i) narrow(x.x[i], p + i);
}
// Fills out with the sums of N numbers' lanes.
template <int N>
WEFT_FN void sums(const F* x, float* out) {
  for (int i = 0; i < N; ++i) out[i] = sum(x[i]);
}
