// Attention of sequences of one row over pages, in parts of kPart tokens, which are merged in order. A part's state per
// query head: its outputs times the sum of exponentials, the sum, and the greatest score.

// e^x, in about two units in the last place; 0 below -87.3.
WEFT_FN F exponential(F x) {
  const F low = all(-87.3f);
  const F bounded = min(all(88.3f), max(low, x));
  const F n = nearest(mul(bounded, all(1.44269504f)));
  F r = fma(n, all(-0.693359375f), bounded);
  r = fma(n, all(2.12194440e-4f), r);
  F p = all(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, all(factor));
  p = fma(p, mul(r, r), add(r, all(1.0f)));
  return zero_below(x, low, mul(p, power_of_two(n)));
}

WEFT_FN float greatest(F x) {
  float lanes[16];
  save(lanes, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
  return lanes[0];
}

template <class T>
WEFT_FN void prefetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += int64_t(64 / sizeof(T))) __builtin_prefetch(from + i);
}

// left: number of tokens from the first slot to the last of the part.
template <class T, int G>
WEFT_TARGET void scores_of(const Decode& c, const T* keys, const T* values, const int64_t* slots, int tokens,
                           int64_t left, const float* q, float (*scores)[kTokens]) {
  F lanes[G][kTokens];
  for (int t = 0; t < tokens; ++t) {
    const T* key = keys + slots[t] * c.key_slot;
    if (t + kAheadTokens < left) prefetch(keys + slots[t + kAheadTokens] * c.key_slot, c.dim);
    prefetch(values + slots[t] * c.value_slot, c.value_dim);
    Pair total[G];
    for (int g = 0; g < G; ++g) total[g] = {all(0.0f), all(0.0f)};
    const auto step = [&](const T* from, int64_t d) WEFT_TARGET {
      const Pair k = load32(from);
      for (int g = 0; g < G; ++g) {
        total[g].a = fma(k.a, load(q + g * c.padded + d), total[g].a);
        total[g].b = fma(k.b, load(q + g * c.padded + d + 16), total[g].b);
      }
    };
    int64_t d = 0;
    for (; d + 32 <= c.dim; d += 32) step(key + d, d);
    if (d < c.dim) {
      T tail[32] = {};
      std::memcpy(tail, key + d, size_t(c.dim - d) * sizeof(T));
      step(tail, d);
    }
    for (int g = 0; g < G; ++g) lanes[g][t] = add(total[g].a, total[g].b);
  }
  for (int g = 0; g < G; ++g) {
    int t = 0;
    for (; t + 16 <= tokens; t += 16) sums<16>(lanes[g] + t, scores[g] + t);
    for (; t < tokens; ++t) scores[g][t] = sum(lanes[g][t]);
    for (t = 0; t < tokens; ++t) scores[g][t] *= c.scale;
  }
}

// Adds weighted values to the heads' outputs `[G, padded_value]`, which are first scaled.
template <class T, int G>
WEFT_TARGET void add_values(const Decode& c, const T* values, const int64_t* slots, int tokens,
                            const float (*weights)[kTokens], const float* scales, float* out) {
  for (int64_t d = 0; d < c.value_dim; d += 32) {
    Pair total[G];
    for (int g = 0; g < G; ++g) {
      float* at = out + g * c.padded_value + d;
      total[g] = {mul(load(at), all(scales[g])), mul(load(at + 16), all(scales[g]))};
    }
    const int64_t rest = c.value_dim - d < 32 ? c.value_dim - d : 32;
    T tail[32] = {};
    for (int t = 0; t < tokens; ++t) {
      const T* value = values + slots[t] * c.value_slot + d;
      if (rest < 32) value = static_cast<const T*>(std::memcpy(tail, value, size_t(rest) * sizeof(T)));
      const Pair v = load32(value);
      for (int g = 0; g < G; ++g) {
        const F weight = all(weights[g][t]);
        total[g].a = fma(v.a, weight, total[g].a), total[g].b = fma(v.b, weight, total[g].b);
      }
    }
    for (int g = 0; g < G; ++g) {
      float* at = out + g * c.padded_value + d;
      save(at, total[g].a), save(at + 16, total[g].b);
    }
  }
}

// Multiplies by the powers of two of cached f8 vectors.
template <int G>
WEFT_FN void scale_by_exponents(const int8_t* exponents, const Decode& c, const int64_t* slots, int tokens,
                                float (*scores)[kTokens]) {
  for (int t = 0; t < tokens; ++t)
    for (int g = 0; g < G; ++g)
      scores[g][t] *= float_of(uint32_t(127 + exponents[slots[t] * c.kv_heads]) << 23) * kOfFloat8;
}

// Up to four query heads of one key-value head in one part of a sequence. q: widened.
template <class T, int G>
WEFT_TARGET void attend_heads(const Decode& c, int64_t sequence, int64_t kv, int64_t begin, int64_t end, const float* q,
                              float* out, float* sums, float* tops) {
  const T* keys = static_cast<const T*>(c.keys) + kv * c.key_head;
  const T* values = static_cast<const T*>(c.values) + kv * c.value_head;
  const int32_t* pages = c.pages + sequence * c.page_stride;
  std::fill(out, out + G * c.padded_value, 0.0f);
  std::fill(sums, sums + G, 0.0f);
  std::fill(tops, tops + G, -INFINITY);
  int64_t all_slots[kPart];
  for (int64_t at = begin, page = begin / c.page_size; at < end; ++page) {
    const int64_t offset = (int64_t(pages[page]) - page) * c.page_size, last = std::min(end, (page + 1) * c.page_size);
    for (; at < last; ++at) all_slots[at - begin] = offset + at;
  }
  for (int64_t first = begin; first < end; first += kTokens) {
    const int tokens = end - first < kTokens ? int(end - first) : kTokens;
    alignas(64) float scores[G][kTokens];
    const int64_t* slots = all_slots + (first - begin);
    scores_of<T, G>(c, keys, values, slots, tokens, end - first, q, scores);
    if constexpr (std::is_same_v<T, f8>) scale_by_exponents<G>(c.key_exponents + kv, c, slots, tokens, scores);
    float scales[G];
    for (int g = 0; g < G; ++g) {
      std::fill(scores[g] + tokens, scores[g] + kTokens, -INFINITY);
      F tops16 = all(tops[g]);
      for (int t = 0; t < kTokens; t += 16) tops16 = max(load(scores[g] + t), tops16);  // NaN is in the sums
      const float top = greatest(tops16);
      alignas(64) float scale[16];
      save(scale, exponential(all(tops[g] - top)));
      F total = all(0.0f);
      for (int t = 0; t < kTokens; t += 16) {
        const F weight = exponential(sub(load(scores[g] + t), all(top)));
        save(scores[g] + t, weight);
        total = add(total, weight);
      }
      scales[g] = scale[0], sums[g] = sums[g] * scale[0] + sum(total), tops[g] = top;
    }
    if constexpr (std::is_same_v<T, f8>) scale_by_exponents<G>(c.value_exponents + kv, c, slots, tokens, scores);
    add_values<T, G>(c, values, slots, tokens, scores, scales, out);
  }
}

// K: type of the cache; a state has its lanes.
template <class T, class K>
WEFT_TARGET void attend_t(const Decode& c, const Part& part, float* state) {
  const int64_t heads = c.heads / c.kv_heads, first = part.kv * heads;
  float* q = state + heads * (c.padded_value + 2);  // the state's scratch
  const T* from = static_cast<const T*>(c.q) + part.sequence * c.q_row + first * c.q_head;
  for (int64_t g = 0; g < heads; ++g) {
    if constexpr (std::is_same_v<K, f8>)
      widen_in_order(from + g * c.q_head, c.dim, q + g * c.padded);
    else
      widen_row(from + g * c.q_head, c.dim, q + g * c.padded);
  }
  float *sums = state + heads * c.padded_value, *tops = sums + heads;
  for (int64_t g = 0; g < heads; g += 4) {
    const auto run = [&](auto count) WEFT_TARGET {
      attend_heads<K, decltype(count)::value>(c, part.sequence, part.kv, part.begin, part.end, q + g * c.padded,
                                              state + g * c.padded_value, sums + g, tops + g);
    };
    if (heads - g == 1) run(Count<1>());
    if (heads - g == 2) run(Count<2>());
    if (heads - g == 3) run(Count<3>());
    if (heads - g >= 4) run(Count<4>());
  }
}

// Merges the states of a head's parts, `stride` floats apart, in order. g: the head's index among those of a state.
template <class T>
WEFT_TARGET void merge_t(const Decode& c, int64_t sequence, int64_t head, const float* states, int64_t stride,
                         int64_t parts) {
  const int64_t heads = c.heads / c.kv_heads, g = head % heads;
  T* out = static_cast<T*>(c.out) + (sequence * c.heads + head) * c.value_dim;
  float* lse = c.lse ? c.lse + sequence * c.heads + head : nullptr;
  if (!parts) {
    std::memset(static_cast<void*>(out), 0, size_t(c.value_dim) * sizeof(T));
    if (lse) *lse = -INFINITY;
    return;
  }
  const float* sums = states + heads * c.padded_value + g;
  float top = sums[heads], total = 0.0f;
  for (int64_t i = 1; i < parts; ++i) {
    const float each = sums[i * stride + heads];
    top = each > top || each != each ? each : top;
  }
  const auto weight = [&](int64_t i) WEFT_TARGET { return exponential(all(sums[i * stride + heads] - top)); };
  for (int64_t i = 0; i < parts; ++i) {
    alignas(64) float factor[16];
    save(factor, weight(i));
    total += factor[0] * sums[i * stride];
  }
  if (lse) *lse = top + float(std::log(double(total)));
  for (int64_t d = 0; d < c.value_dim; d += 32) {
    Pair found = {all(0.0f), all(0.0f)};
    for (int64_t i = 0; i < parts; ++i) {
      const float* part = states + i * stride + g * c.padded_value + d;
      const F factor = weight(i);
      found.a = fma(load(part), factor, found.a), found.b = fma(load(part + 16), factor, found.b);
    }
    found = {div(found.a, all(total)), div(found.b, all(total))};
    const int64_t left = c.value_dim - d;
    if (c.cache_dtype != DType::f8) {
      store_some(out + d, found, left);
    } else {
      store_some16(out + d, found.a, left);
      if (left > 16) store_some16(out + d + 16, found.b, left - 16);
    }
  }
}

inline void attend(const Decode& c, const Part& part, float* state) {
  by_type(c.dtype, [&](auto t) {
    using T = decltype(t);
    c.cache_dtype == DType::f8 ? attend_t<T, f8>(c, part, state) : attend_t<T, T>(c, part, state);
  });
}

inline void merge(const Decode& c, int64_t sequence, int64_t head, const float* states, int64_t stride, int64_t parts) {
  by_type(c.dtype, [&](auto t) { merge_t<decltype(t)>(c, sequence, head, states, stride, parts); });
}
