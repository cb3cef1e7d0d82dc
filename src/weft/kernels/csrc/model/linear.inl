// Products of few rows. Each output is a sum of lanes, added by a tree: the same for any number of rows or threads.

// Widens `width` elements to floats in the order of load32, and fills up with zeros to whole groups of 32.
template <class T>
WEFT_TARGET void widen_row(const T* from, int64_t width, float* to) {
  int64_t k = 0;
  for (; k + 32 <= width; k += 32) {
    const Pair x = load32(from + k);
    save(to + k, x.a), save(to + k + 16, x.b);
  }
  if (k == width) return;
  T tail[32] = {};
  std::memcpy(tail, from + k, size_t(width - k) * sizeof(T));
  const Pair x = load32(tail);
  save(to + k, x.a), save(to + k + 16, x.b);
}

// Lanes of a product's sum: 32 products of widened numbers, or 16 sums of two products.
template <class T>
struct Dot {
  using Factor = Pair;
  using Total = Pair;
  WEFT_FN Total zero() { return {all(0.0f), all(0.0f)}; }
  WEFT_FN Total load_total(const float* p) { return {load(p), load(p + 16)}; }
  WEFT_FN void save_total(float* p, Total x) { save(p, x.a), save(p + 16, x.b); }
  WEFT_FN Factor weight(const T* p) { return load32(p); }
  WEFT_FN Factor row(const float* x, int64_t k) { return {load(x + k), load(x + k + 16)}; }
  WEFT_FN void add_product(Factor w, Factor x, Total& total) {
    total.a = fma(w.a, x.a, total.a), total.b = fma(w.b, x.b, total.b);
  }
  WEFT_FN F folded(Total x) { return add(x.a, x.b); }
};
#ifdef WEFT_DOT_BF16
template <>
struct Dot<bf16> {
  using Factor = __m512bh;
  using Total = F;
  WEFT_FN Total zero() { return all(0.0f); }
  WEFT_FN Total load_total(const float* p) { return load(p); }
  WEFT_FN void save_total(float* p, Total x) { save(p, x); }
  WEFT_FN Factor weight(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  WEFT_FN Factor row(const float* x, int64_t k) { return weight(reinterpret_cast<const bf16*>(x) + k); }
  WEFT_FN void add_product(Factor w, Factor x, Total& total) { total = _mm512_dpbf16_ps(total, w, x); }
  WEFT_FN F folded(Total x) { return x; }
};
#endif

// Elements begin … end − 1 of the sums of O outputs and R rows. totals: lanes of the sums so far, for each output of a
// group and each of c.rows; not read if begin is 0, not written if end is the last.
template <class T, int O, int R>
WEFT_TARGET void block(const Linear& c, int64_t output, int64_t row, int64_t begin, int64_t end, float* totals) {
  using D = Dot<T>;
  const T* weight = static_cast<const T*>(c.weight) + output * c.weight_stride;
  const float* x = c.wide + row * c.padded;
  typename D::Total total[O][R];
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) total[o][r] = begin ? D::load_total(totals + (o * c.rows + r) * 32) : D::zero();
  const auto step = [&](const T* w, int64_t stride, int64_t k) WEFT_TARGET {
    typename D::Factor factors[O];
    for (int o = 0; o < O; ++o) factors[o] = D::weight(w + o * stride);
    for (int r = 0; r < R; ++r) {
      const typename D::Factor xs = D::row(x + r * c.padded, k);
      for (int o = 0; o < O; ++o) D::add_product(factors[o], xs, total[o][r]);
    }
  };
  int64_t k = begin;
  for (; k + 32 <= end; k += 32) {
    for (int o = 0; o < O; ++o) __builtin_prefetch(weight + (o + O) * c.weight_stride + k);
    step(weight + k, c.weight_stride, k);
  }
  if (k < end) {
    T tail[O * 32] = {};
    for (int o = 0; o < O; ++o)
      std::memcpy(tail + o * 32, weight + o * c.weight_stride + k, size_t(end - k) * sizeof(T));
    step(tail, 32, k);
  }
  if (end < c.inputs) {
    for (int o = 0; o < O; ++o)
      for (int r = 0; r < R; ++r) D::save_total(totals + (o * c.rows + r) * 32, total[o][r]);
    return;
  }
  F lanes[R * O];
  float found[R * O];
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) lanes[r * O + o] = D::folded(total[o][r]);
  sums<R * O>(lanes, found);
  const auto bias = static_cast<const T*>(c.bias);
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < O; ++o) {
      const float value = bias ? found[r * O + o] + widen(bias[output + o]) : found[r * O + o];
      narrow(value, static_cast<T*>(c.out) + (row + r) * c.out_stride + output + o);
    }
}

template <class T, int O>
WEFT_TARGET void blocks(const Linear& c, int64_t output, int64_t row, int64_t begin, int64_t end, float* totals) {
  const int64_t rows = std::min<int64_t>(kRows, c.rows - row);
  if (rows == 1) return block<T, O, 1>(c, output, row, begin, end, totals);
  if (rows == 2) return block<T, O, 2>(c, output, row, begin, end, totals);
  if (rows == 3) return block<T, O, 3>(c, output, row, begin, end, totals);
  block<T, O, 4>(c, output, row, begin, end, totals);
}

// Groups of outputs: their weights and sums stay in the first cache while all rows use them, as do parts of rows that
// would not fit.
template <class T, int O>
WEFT_TARGET void linear_outputs(const Linear& c, int64_t begin, int64_t end) {
  alignas(64) float totals[kGroup * kMaxRows * 32];
  const int64_t depth = c.rows > 1 && c.inputs > 3 * kDepth ? kDepth : c.inputs;
  for (int64_t first = begin; first < end; first += kGroup)
    for (int64_t k = 0; k < c.inputs; k += depth)
      for (int64_t row = 0; row < c.rows; row += kRows) {
        const int64_t last = std::min(end, first + kGroup), stop = std::min(c.inputs, k + depth);
        const auto at = [&](int64_t output) { return totals + ((output - first) * c.rows + row) * 32; };
        int64_t output = first;
        for (; output + O <= last; output += O) blocks<T, O>(c, output, row, k, stop, at(output));
        for (; output < last; ++output) blocks<T, 1>(c, output, row, k, stop, at(output));
      }
}

template <class T>
WEFT_TARGET void linear_t(const Linear& c, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<typename Dot<T>::Total, F>) return linear_outputs<T, 4>(c, begin, end);
  if (c.rows == 1) return linear_outputs<T, kOutputsOfOne>(c, begin, end);
  if (c.rows == 2) return linear_outputs<T, kOutputsOfTwo>(c, begin, end);
  linear_outputs<T, kOutputsOfMany>(c, begin, end);
}

template <class T>
WEFT_TARGET void widen_all(const Linear& c, float* to) {
  const T* from = static_cast<const T*>(c.x);
  for (int64_t row = 0; row < c.rows; ++row) widen_row(from + row * c.x_stride, c.inputs, to + row * c.padded);
}

// Fills c.wide with the rows in the order in which `linear` reads them.
inline void widen_rows(const Linear& c, float* to) {
#ifdef WEFT_DOT_BF16
  if (c.dtype == DType::bf16) {
    const auto from = static_cast<const bf16*>(c.x);
    for (int64_t row = 0; row < c.rows; ++row) {
      const auto wide = static_cast<bf16*>(static_cast<void*>(to + row * c.padded));
      std::memcpy(static_cast<void*>(wide), from + row * c.x_stride, size_t(c.inputs) * sizeof(bf16));
      std::memset(static_cast<void*>(wide + c.inputs), 0, size_t(c.padded - c.inputs) * sizeof(bf16));
    }
    return;
  }
#endif
  if (c.dtype == DType::f32) widen_all<float>(c, to);
  if (c.dtype == DType::bf16) widen_all<bf16>(c, to);
  if (c.dtype == DType::f16) widen_all<f16>(c, to);
}

inline void linear(const Linear& c, int64_t begin, int64_t end) {
  if (c.dtype == DType::f32) linear_t<float>(c, begin, end);
  if (c.dtype == DType::bf16) linear_t<bf16>(c, begin, end);
  if (c.dtype == DType::f16) linear_t<f16>(c, begin, end);
}
