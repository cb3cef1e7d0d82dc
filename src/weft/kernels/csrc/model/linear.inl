// Products of few rows. Each output is a sum of lanes, added by a tree: the same for any number of rows or threads.

template <class T>
WEFT_FN F load_some16(const T* p, int64_t count) {
  if (count >= 16) return load16(p);
  T some[16] = {};
  std::memcpy(some, p, size_t(count) * sizeof(T));
  return load16(some);
}

template <class T>
WEFT_FN void store_some16(T* p, F x, int64_t count) {
  if (count >= 16) return store16(p, x);
  T some[16];
  store16(some, x);
  std::memcpy(static_cast<void*>(p), some, size_t(count) * sizeof(T));
}

template <class T>
WEFT_FN Pair load_some(const T* p, int64_t count) {
  if (count >= 32) return load32(p);
  T some[32] = {};
  std::memcpy(some, p, size_t(count) * sizeof(T));
  return load32(some);
}

template <class T>
WEFT_FN void store_some(T* p, Pair x, int64_t count) {
  if (count >= 32) return store32(p, x);
  T some[32];
  store32(some, x);
  std::memcpy(static_cast<void*>(p), some, size_t(count) * sizeof(T));
}

// Widens `width` elements, and fills up with zeros to whole groups of 32.
template <class T>
WEFT_TARGET void widen_in_order(const T* from, int64_t width, float* to) {
  for (int64_t k = 0; k < (width + 31) / 32 * 32; k += 16)
    save(to + k, k < width ? load_some16(from + k, width - k) : all(0.0f));
}

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

// Lanes of a product's sum: of widened numbers, the first 16 of 32 and then the others, or of 16 sums of two products.
template <class W>
struct Dot {
  using Factor = Pair;
  WEFT_FN Factor weight(const W* p) { return load32(p); }
  WEFT_FN Factor row(const float* x, int64_t k) { return {load(x + k), load(x + k + 16)}; }
  WEFT_FN F add_product(Factor w, Factor x, F total) { return fma(w.b, x.b, fma(w.a, x.a, total)); }
};
#ifdef WEFT_DOT_BF16
template <>
struct Dot<bf16> {
  using Factor = __m512bh;
  WEFT_FN Factor weight(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  WEFT_FN Factor row(const float* x, int64_t k) { return weight(reinterpret_cast<const bf16*>(x) + k); }
  WEFT_FN F add_product(Factor w, Factor x, F total) { return _mm512_dpbf16_ps(total, w, x); }
};
#endif

// Adds elements begin … end − 1 to the sums of O outputs and R rows, [output, row]: lanes in `totals`, which are not read
// if begin is 0. If end is the last, fills found [row, kMaxChunk] instead. weight: the first of these elements.
template <class W, int O, int R>
WEFT_TARGET void block(const Product& c, const W* weight, int64_t stride, int64_t row, int64_t begin, int64_t end,
                       F* totals, float* found) {
  using D = Dot<W>;
  const float* x = c.wide + row * c.padded;
  F total[R * O];
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < O; ++o) total[r * O + o] = begin ? totals[o * kMaxRows + r] : all(0.0f);
  const auto step = [&](const W* w, int64_t stride, int64_t k) WEFT_TARGET {
    typename D::Factor factors[O];
    for (int o = 0; o < O; ++o) factors[o] = D::weight(w + o * stride);
    for (int r = 0; r < R; ++r) {
      const typename D::Factor xs = D::row(x + r * c.padded, k);
      for (int o = 0; o < O; ++o) total[r * O + o] = D::add_product(factors[o], xs, total[r * O + o]);
    }
  };
  int64_t k = begin;
  for (; k + 32 <= end; k += 32, weight += 32) {
    for (int o = 0; o < O; ++o) __builtin_prefetch(weight + (o + O) * stride);
    step(weight, stride, k);
  }
  if (k < end) {
    W tail[O * 32] = {};
    for (int o = 0; o < O; ++o) std::memcpy(tail + o * 32, weight + o * stride, size_t(end - k) * sizeof(W));
    step(tail, 32, k);
  }
  if (end < c.inputs) {
    for (int r = 0; r < R; ++r)
      for (int o = 0; o < O; ++o) totals[o * kMaxRows + r] = total[r * O + o];
    return;
  }
  float each[R * O];
  sums<R * O>(total, each);
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < O; ++o) found[r * kMaxChunk + o] = each[r * O + o];
}

template <class W, int O, int R = kRows>
WEFT_TARGET void blocks(const Product& c, const W* weight, int64_t stride, int64_t row, int64_t begin, int64_t end,
                        F* totals, float* found) {
  if constexpr (R > 1)
    if (c.rows - row < R) return blocks<W, O, R - 1>(c, weight, stride, row, begin, end, totals, found);
  block<W, O, R>(c, weight, stride, row, begin, end, totals, found);
}

// Fills `to` with elements begin … end − 1 of f8 weights for outputs first … last − 1, kDecoded apart.
WEFT_TARGET inline void decode(const Product& c, int64_t first, int64_t last, int64_t begin, int64_t end, float* to) {
  const int64_t ahead = end < c.inputs ? end - begin : kGroup * c.weight_stride - begin;
  for (int64_t output = first; output < last; ++output, to += kDecoded) {
    const f8* weight = static_cast<const f8*>(c.weight) + output * c.weight_stride;
    const float* scales = c.scales + output / c.unit_rows * c.scale_stride;
    for (int64_t k = begin; k < end;) {
      const F scale = all(scales[k / c.columns] * kOfFloat8);
      for (const int64_t stop = std::min(end, (k / c.columns + 1) * c.columns); k < stop; k += 32) {
        __builtin_prefetch(weight + k + ahead);
        const Pair x = load_some(weight + k, stop - k);
        save(to + k - begin, mul(x.a, scale)), save(to + k - begin + 16, mul(x.b, scale));
      }
    }
  }
}

// Groups of outputs: their weights and sums stay in the first cache while all rows use them, as do parts of rows that
// would not fit.
template <class W>
WEFT_TARGET void product_t(const Product& c, int64_t begin, int64_t end, float* found) {
  constexpr bool kDecodes = std::is_same_v<W, f8>;
  using D = std::conditional_t<kDecodes, float, W>;
  alignas(64) float decoded[kDecodes ? kGroup * kDecoded : 1];
  F totals[kGroup * kMaxRows];
  const int64_t fits = kDepth / c.rows / 32 * 32, part = kDecodes                     ? kDecoded
                                                         : c.inputs > fits + fits / 2 ? fits
                                                                                      : c.inputs;
  for (int64_t first = begin; first < end; first += kGroup)
    for (int64_t k = 0; k < c.inputs; k += part) {
      const int64_t last = std::min(end, first + kGroup), stop = std::min(c.inputs, k + part);
      const int64_t stride = kDecodes ? kDecoded : c.weight_stride;
      const D* weights = reinterpret_cast<const D*>(decoded);
      if constexpr (kDecodes)
        decode(c, first, last, k, stop, decoded);
      else
        weights = static_cast<const W*>(c.weight) + first * stride + k;
      for (int64_t row = 0; row < c.rows; row += kRows) {
        int64_t output = first;
        const auto run = [&](auto count) WEFT_TARGET {
          constexpr int O = decltype(count)::value;
          for (; output + O <= last; output += O)
            blocks<D, O>(c, weights + (output - first) * stride, stride, row, k, stop,
                         totals + (output - first) * kMaxRows + row, found + row * kMaxChunk + output - begin);
        };
        run(Count<kOutputs>());
        run(Count<1>());
      }
    }
}

template <class T>
WEFT_TARGET void widen_all(const Product& c, float* to) {
  const T* from = static_cast<const T*>(c.x);
  for (int64_t row = 0; row < c.rows; ++row)
    widen_row(from + (c.from ? c.from[row] : row) * c.x_stride, c.inputs, to + row * c.padded);
}

// Sums of columns begin … end − 1 of a weight [inputs, columns], added in the order of inputs.
template <class T, int R = kRows>
WEFT_TARGET void column_block(const Product& c, const float* x, int64_t rows, const T* weight, int64_t count,
                              float* found) {
  if constexpr (R > 1)
    if (rows < R) return column_block<T, R - 1>(c, x, rows, weight, count, found);
  constexpr int C = kChunk / 16;
  F total[R * C];
  for (F& each : total) each = all(0.0f);
  for (int64_t d = 0; d < c.inputs; ++d, weight += c.weight_stride) {
    F w[C];
    __builtin_prefetch(weight + 8 * c.weight_stride), __builtin_prefetch(weight + 8 * c.weight_stride + kChunk - 1);
    for (int i = 0; i < C; ++i) w[i] = count > 16 * i ? load_some16(weight + 16 * i, count - 16 * i) : all(0.0f);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) total[r * C + i] = fma(w[i], all(x[r * c.padded + d]), total[r * C + i]);
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) save(found + r * kMaxChunk + 16 * i, total[r * C + i]);
}

template <class T>
WEFT_TARGET void columns_t(const Product& c, int64_t begin, int64_t end, float* found) {
  alignas(64) float x[kMaxRows * kMaxDim];
  for (int64_t row = 0; row < c.rows; ++row)
    widen_in_order(static_cast<const T*>(c.x) + row * c.x_stride, c.inputs, x + row * c.padded);
  for (int64_t at = begin; at < end; at += kChunk)
    for (int64_t row = 0; row < c.rows; row += kRows)
      column_block<T>(c, x + row * c.padded, c.rows - row, static_cast<const T*>(c.weight) + at, end - at,
                      found + row * kMaxChunk + at - begin);
}

// Like `product`, for a weight [inputs, outputs].
inline void columns(const Product& c, int64_t begin, int64_t end, float* found) {
  by_type(c.weight_dtype, [&](auto t) { columns_t<decltype(t)>(c, begin, end, found); });
}

// Fills values with x [count] times a scale by which the greatest magnitude is 448, and returns the factor of values.
template <class T>
WEFT_TARGET float quantise_group(const T* x, int64_t count, f8* values) {
  float wide[kMaxColumns];
  for (int64_t i = 0; i < count; i += 16) save(wide + i, load_some16(x + i, count - i));
  uint32_t largest = bits_of(1e-10f);  // in this order NaN is the greatest magnitude
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, bits_of(wide[i]) & 0x7fffffffu);
  const float factor = 448.0f / float_of(largest);
  for (int64_t i = 0; i < count; ++i) narrow(wide[i] * factor, values + i);
  return float_of(largest) / 448.0f;
}

template <class T>
WEFT_TARGET void widen_quantised(const Product& c, float* to) {
  for (int64_t row = 0; row < c.rows; ++row, to += c.padded) {
    const int64_t from = c.from ? c.from[row] : row;
    const T* x = static_cast<const T*>(c.x) + from * c.x_stride;
    for (int64_t k = 0; k < c.inputs; k += c.columns) {
      f8 values[kMaxColumns];
      const int64_t count = std::min(c.columns, c.inputs - k);
      float scale;
      if constexpr (std::is_same_v<T, f8>) {
        std::memcpy(values, x + k, size_t(count));
        scale = c.x_scales[from * c.x_scale_stride + k / c.columns];
      } else {
        scale = quantise_group(x + k, count, values);
      }
      widen_row(values, count, to + k);
      for (int64_t i = k; i < k + count; i += 16) save(to + i, mul(load(to + i), all(scale * kOfFloat8)));
    }
  }
}

// Fills c.wide with the rows in the order in which `product` reads them.
inline void widen_rows(const Product& c, float* to) {
  if (c.weight_dtype == DType::f8) {
    if (c.dtype == DType::f8) widen_quantised<f8>(c, to);
    by_type(c.dtype, [&](auto t) { widen_quantised<decltype(t)>(c, to); });
    return;
  }
#ifdef WEFT_DOT_BF16
  if (c.dtype == DType::bf16) {
    const auto from = static_cast<const bf16*>(c.x);
    for (int64_t row = 0; row < c.rows; ++row) {
      const auto wide = static_cast<bf16*>(static_cast<void*>(to + row * c.padded));
      std::memcpy(static_cast<void*>(wide), from + (c.from ? c.from[row] : row) * c.x_stride,
                  size_t(c.inputs) * sizeof(bf16));
      std::memset(static_cast<void*>(wide + c.inputs), 0, size_t(c.padded - c.inputs) * sizeof(bf16));
    }
    return;
  }
#endif
  by_type(c.dtype, [&](auto t) { widen_all<decltype(t)>(c, to); });
}

// Fills found [rows, kMaxChunk] with the sums of outputs begin … end − 1.
inline void product(const Product& c, int64_t begin, int64_t end, float* found) {
  by_type(c.weight_dtype, [&](auto t) { product_t<decltype(t)>(c, begin, end, found); });
  if (c.weight_dtype == DType::f8) product_t<f8>(c, begin, end, found);
}
