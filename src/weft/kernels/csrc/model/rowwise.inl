// Kernels of single rows: sums to outputs, RMSNorm with residual, rotary embedding with the cache's write, gated
// activations.

template <class T>
WEFT_TARGET void finish_t(const Linear& c, int64_t begin, int64_t end, const float* found) {
  const T* bias = static_cast<const T*>(c.bias);
  for (int64_t row = 0; row < c.rows; ++row, found += kMaxChunk) {
    T* out = static_cast<T*>(c.out) + row * c.out_stride;
    for (int64_t o = begin; o < end; o += 16) {
      F value = load(found + o - begin);
      if (bias) value = add(value, load_some16(bias + o, end - o));
      store_some16(out + o, value, end - o);
    }
  }
}

// Writes found sums of outputs begin … end − 1, with the bias.
inline void finish(const Linear& c, int64_t begin, int64_t end, const float* found) {
  by_type(c.out_dtype, [&](auto t) { finish_t<decltype(t)>(c, begin, end, found); });
}

template <class T>
WEFT_FN Pair rounded(Pair x) {
  T narrowed[32];
  store32(narrowed, x);
  return load32(narrowed);
}

// out = weight · x / √(mean(x²) + eps). N: type of the weight; float with a narrower T is multiplied before rounding.
template <class T, class N>
WEFT_TARGET void norm_row(const T* x, const N* weight, int64_t width, float eps, T* out) {
  Pair squares = {all(0.0f), all(0.0f)};
  for (int64_t k = 0; k < width; k += 32) {
    const Pair wide = load_some(x + k, width - k);
    squares.a = fma(wide.a, wide.a, squares.a), squares.b = fma(wide.b, wide.b, squares.b);
  }
  const F scale = all(1.0f / __builtin_sqrtf(sum(add(squares.a, squares.b)) / float(width) + eps));
  for (int64_t k = 0; k < width; k += 32) {
    Pair normed = load_some(x + k, width - k);
    normed = {mul(normed.a, scale), mul(normed.b, scale)};
    Pair factor;
    if constexpr (std::is_same_v<T, N>) {
      normed = rounded<T>(normed), factor = load_some(weight + k, width - k);
    } else {  // in the order of T's lanes
      float factors[32] = {};
      for (int64_t i = 0; i < 32 && k + i < width; ++i) factors[lane_of<T>(int(i))] = weight[k + i];
      factor = {load(factors), load(factors + 16)};
    }
    store_some(out + k, {mul(normed.a, factor.a), mul(normed.b, factor.b)}, width - k);
  }
}

template <class T>
WEFT_TARGET void norm_t(const Norm& c, int64_t row) {
  const T* x = static_cast<const T*>(c.x) + row * c.x_stride;
  T* out = static_cast<T*>(c.out) + row * c.width;
  if (c.delta) {
    const T* delta = static_cast<const T*>(c.delta) + row * c.delta_stride;
    T* total = static_cast<T*>(c.total) + row * c.width;
    for (int64_t k = 0; k < c.width; k += 32) {
      const Pair left = load_some(x + k, c.width - k), right = load_some(delta + k, c.width - k);
      store_some(total + k, {add(left.a, right.a), add(left.b, right.b)}, c.width - k);
    }
    x = total;
  }
  if (c.weight_dtype == c.dtype) return norm_row(x, static_cast<const T*>(c.weight), c.width, c.eps, out);
  if constexpr (!std::is_same_v<T, float>) norm_row(x, static_cast<const float*>(c.weight), c.width, c.eps, out);
}

inline void norm(const Norm& c, int64_t row) {
  by_type(c.dtype, [&](auto t) { norm_t<decltype(t)>(c, row); });
}

// Rotates the first 2 · half elements of a head; each result is rounded once.
template <class T>
WEFT_TARGET void rotate(const Rope& c, const T* x, const T* cos, const T* sin, T* out) {
  const int64_t step = c.interleaved ? 2 : 1, across = c.interleaved ? 1 : c.half;
  int64_t i = 0;
  for (; !c.interleaved && i + 16 <= c.half; i += 16) {
    const F left = load16(x + i), right = load16(x + i + c.half), by = load16(cos + i), with = load16(sin + i);
    store16(out + i, sub(mul(left, by), mul(right, with)));
    store16(out + i + c.half, add(mul(right, by), mul(left, with)));
  }
  for (; i < c.half; ++i) {
    const float left = widen(x[i * step]), right = widen(x[i * step + across]);
    const float by = widen(cos[i]), with = widen(sin[i]);
    narrow(left * by - right * with, out + i * step);
    narrow(right * by + left * with, out + i * step + across);
  }
  for (i = 2 * c.half; i < c.dim; ++i) out[i] = x[i];
}

// Stores x as weft.kernels.float8.to_vectors does, and returns its power of two.
template <class T>
WEFT_TARGET int8_t vector_of_float8(const T* x, int64_t dim, f8* to) {
  float wide[kMaxDim];
  widen_in_order(x, dim, wide);
  uint32_t largest = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const uint32_t magnitude = bits_of(wide[i]) & 0x7fffffffu;
    largest = std::max(largest, magnitude > 0x7f800000u ? 0 : magnitude);
  }
  const int exponent = std::max(-32, std::min(32, int((largest + 0x1fffff) >> 23) - (127 + 8)));
  const float factor = float_of(uint32_t(127 - exponent) << 23);
  for (int64_t i = 0; i < dim; ++i) {
    const float scaled = wide[i] * factor;
    narrow(scaled > 448.0f ? 448.0f : scaled < -448.0f ? -448.0f : scaled, to + i);
  }
  return int8_t(exponent);
}

template <class T>
WEFT_TARGET void rope_t(const Rope& c, int64_t row) {
  const T* x = static_cast<const T*>(c.qkv) + row * c.qkv_stride;
  const T* cos = static_cast<const T*>(c.cos) + row * c.table_stride;
  const T* sin = static_cast<const T*>(c.sin) + row * c.table_stride;
  T* q = static_cast<T*>(c.q) + row * c.heads * c.dim;
  const int64_t slot = c.slots[row] < 0 ? c.unused : c.slots[row];
  T normed[kMaxDim], rotated[kMaxDim];
  const auto store = [&](const T* from, void* cache, int64_t at, int8_t* exponents, int64_t h) WEFT_TARGET {
    if (c.cache_dtype == DType::f8)
      exponents[slot * c.kv_heads + h] = vector_of_float8(from, c.dim, static_cast<f8*>(cache) + at);
    else
      std::memcpy(static_cast<void*>(static_cast<T*>(cache) + at), from, size_t(c.dim) * sizeof(T));
  };
  const auto head = [&](const T* from, const void* weight, T* to) WEFT_TARGET {
    if (weight && c.weight_dtype == c.dtype) {
      norm_row(from, static_cast<const T*>(weight), c.dim, c.eps, normed);
    } else if constexpr (!std::is_same_v<T, float>) {
      if (weight) norm_row(from, static_cast<const float*>(weight), c.dim, c.eps, normed);
    }
    rotate(c, weight ? normed : from, cos, sin, to);
  };
  for (int64_t h = 0; h < c.heads; ++h, x += c.dim) head(x, c.q_weight, q + h * c.dim);
  for (int64_t h = 0; h < c.kv_heads; ++h, x += c.dim) {
    head(x, c.k_weight, rotated);
    store(rotated, c.keys, slot * c.key_slot + h * c.key_head, c.key_exponents, h);
  }
  for (int64_t h = 0; h < c.kv_heads; ++h, x += c.dim)
    store(x, c.values, slot * c.value_slot + h * c.value_head, c.value_exponents, h);
}

inline void rope(const Rope& c, int64_t row) {
  by_type(c.dtype, [&](auto t) { rope_t<decltype(t)>(c, row); });
}

template <class T>
WEFT_TARGET void gated_t(const Gated& c, int64_t row) {
  const T* gates = static_cast<const T*>(c.x) + row * c.x_stride;
  T* out = static_cast<T*>(c.out) + row * c.inner;
  const F one = all(1.0f), minus = all(-1.0f), limit = all(c.limit), low = all(-c.limit), alpha = all(c.alpha);
  const auto value = [&](F gate, F up) WEFT_TARGET {
    if (c.scaled) gate = min(limit, gate), up = add(min(limit, max(low, up)), one);
    const F exponent = mul(c.scaled ? mul(alpha, gate) : gate, minus);
    F silu = div(gate, add(one, exponential(exponent)));
    if (c.limited && !c.scaled) silu = min(limit, silu), up = min(limit, max(low, up));
    return mul(silu, up);
  };
  for (int64_t k = 0; k < c.inner; k += 32) {
    const Pair gate = load_some(gates + k, c.inner - k), up = load_some(gates + c.inner + k, c.inner - k);
    store_some(out + k, {value(gate.a, up.a), value(gate.b, up.b)}, c.inner - k);
  }
}

inline void gated(const Gated& c, int64_t row) {
  by_type(c.dtype, [&](auto t) { gated_t<decltype(t)>(c, row); });
}

// T: type of outputs. P: type of the pairs' values.
template <class T, class P>
WEFT_TARGET void combine_t(const Combine& c, int64_t token) {
  T* out = static_cast<T*>(c.out) + token * c.out_stride;
  for (int64_t k = 0; k < c.width; k += 16) {
    F total = c.add ? load_some16(out + k, c.width - k) : all(0.0f);
    for (int64_t i = token * c.choices; i < (token + 1) * c.choices; ++i) {
      if (c.pairs[i] < 0) continue;
      T weight;
      narrow(c.weights[i], &weight);
      const P* value = static_cast<const P*>(c.values) + c.pairs[i] * c.width + k;
      total = fma(load_some16(value, c.width - k), all(widen(weight)), total);
    }
    store_some16(out + k, total, c.width - k);
  }
}

inline void combine(const Combine& c, int64_t token) {
  by_type(c.dtype, [&](auto t) {
    using T = decltype(t);
    c.pair_dtype == c.dtype ? combine_t<T, T>(c, token) : combine_t<T, float>(c, token);
  });
}

template <class T>
WEFT_TARGET void quantise_t(const Quantise& c, int64_t row) {
  const int64_t groups = (c.width + c.columns - 1) / c.columns;
  const T* x = static_cast<const T*>(c.x) + row * c.x_stride;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t k = group * c.columns;
    c.scales[row * groups + group] =
        quantise_group(x + k, std::min(c.columns, c.width - k), c.values + row * c.width + k);
  }
}

inline void quantise(const Quantise& c, int64_t row) {
  by_type(c.dtype, [&](auto t) { quantise_t<decltype(t)>(c, row); });
}
