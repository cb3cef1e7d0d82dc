// One lane: runs everywhere; tests compare the other instruction sets with it.
struct V {
  using R = float;
  static constexpr int W = 1;
  template <class T>
  WEFT_FN R load(const T* p) { return widen(*p); }
  template <class T>
  WEFT_FN void store(T* p, R x) { narrow(x, p); }
  template <class T>
  WEFT_FN void stream(T* p, R x) { narrow(x, p); }
  template <class T>
  WEFT_FN R round(R x, const T*) {
    T narrowed;
    narrow(x, &narrowed);
    return widen(narrowed);
  }
  template <class T>
  WEFT_FN void store_rounded(T* p, R x) { store(p, x); }
  WEFT_FN R add(R a, R b) { return a + b; }
  WEFT_FN R mul(R a, R b) { return a * b; }
  WEFT_FN R all(float x) { return x; }
  WEFT_FN R zero() { return 0.0f; }
  WEFT_FN float sum(R x) { return x; }
};
