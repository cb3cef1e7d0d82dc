// The row kernels over a vector type V. Included once for each instruction set, in its namespace.

// Sum of `n` sources in order, in float, rounded once. N: the number of sources if known when compiled, else 0.
template <class T, int N, bool kStream>
WEFT_TARGET void reduce_n(T* out, const T* const* sources, int n, int64_t count) {
  const int terms = N ? N : n;
  auto one = [&](int64_t i) WEFT_TARGET {
    float total = widen(sources[0][i]);
    for (int k = 1; k < terms; ++k) total += widen(sources[k][i]);
    narrow(total, out + i);
  };
  int64_t i = 0;
  if constexpr (kStream)
    for (; i < count && (reinterpret_cast<uintptr_t>(out + i) & 63); ++i) one(i);
#pragma GCC unroll 4
  for (; i + V::W <= count; i += V::W) {
    typename V::R total = V::load(sources[0] + i);
    for (int k = 1; k < terms; ++k) total = V::add(total, V::load(sources[k] + i));
    if constexpr (kStream)
      V::stream(out + i, total);
    else
      V::store(out + i, total);
  }
  for (; i < count; ++i) one(i);
}

template <class T, bool kStream>
WEFT_TARGET void reduce_t(void* out, const void* const* sources, int n, int64_t count) {
  const auto typed = reinterpret_cast<const T* const*>(sources);
  if (n == 2) return reduce_n<T, 2, kStream>(static_cast<T*>(out), typed, n, count);
  if (n == 4) return reduce_n<T, 4, kStream>(static_cast<T*>(out), typed, n, count);
  reduce_n<T, 0, kStream>(static_cast<T*>(out), typed, n, count);
}

WEFT_TARGET void reduce_f64(void* out, const void* const* sources, int n, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    double total = static_cast<const double*>(sources[0])[i];
    for (int k = 1; k < n; ++k) total += static_cast<const double*>(sources[k])[i];
    static_cast<double*>(out)[i] = total;
  }
}

WEFT_TARGET void reduce(DType dtype, void* out, const void* const* sources, int n, int64_t count, bool stream) {
  switch (dtype) {
    case DType::f32:
      return stream ? reduce_t<float, true>(out, sources, n, count) : reduce_t<float, false>(out, sources, n, count);
    case DType::bf16:
      return stream ? reduce_t<bf16, true>(out, sources, n, count) : reduce_t<bf16, false>(out, sources, n, count);
    case DType::f16:
      return stream ? reduce_t<f16, true>(out, sources, n, count) : reduce_t<f16, false>(out, sources, n, count);
    case DType::f64:
      return reduce_f64(out, sources, n, count);
    case DType::f8:  // products alone read it
      return;
  }
}

template <class T>
WEFT_TARGET void weighted_t(void* out, const void* const* sources, const float* weights, int n, int64_t count) {
  const auto from = reinterpret_cast<const T* const*>(sources);
  auto to = static_cast<T*>(out);
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + V::W <= count; i += V::W) {
    typename V::R total = V::mul(V::load(from[0] + i), V::all(weights[0]));
    for (int k = 1; k < n; ++k) total = V::add(total, V::mul(V::load(from[k] + i), V::all(weights[k])));
    V::store(to + i, total);
  }
  for (; i < count; ++i) {
    float total = widen(from[0][i]) * weights[0];
    for (int k = 1; k < n; ++k) total += widen(from[k][i]) * weights[k];
    narrow(total, to + i);
  }
}

WEFT_TARGET void weighted(DType dtype, void* out, const void* const* sources, const float* weights, int n,
                          int64_t count) {
  if (dtype == DType::f32) weighted_t<float>(out, sources, weights, n, count);
  if (dtype == DType::bf16) weighted_t<bf16>(out, sources, weights, n, count);
  if (dtype == DType::f16) weighted_t<f16>(out, sources, weights, n, count);
}

// residual_out = residual + delta; normed = weight · round(residual_out / √(mean(residual_out²) + eps)), row by row.
template <class T>
WEFT_TARGET void add_norm_t(T* residual_out, T* normed, const T* delta, const T* residual, const T* weight,
                            int64_t rows, int64_t width, float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t base = row * width;
    typename V::R squares = V::zero();
    float tail = 0.0f;
    int64_t i = 0;
#pragma GCC unroll 4
    for (; i + V::W <= width; i += V::W) {
      const typename V::R rounded = V::round(V::add(V::load(residual + base + i), V::load(delta + base + i)), delta);
      V::store_rounded(residual_out + base + i, rounded);
      squares = V::add(squares, V::mul(rounded, rounded));
    }
    for (; i < width; ++i) {
      narrow(widen(residual[base + i]) + widen(delta[base + i]), residual_out + base + i);
      const float rounded = widen(residual_out[base + i]);
      tail += rounded * rounded;
    }
    const float scale = 1.0f / __builtin_sqrtf((V::sum(squares) + tail) / float(width) + eps);
    const typename V::R scales = V::all(scale);
#pragma GCC unroll 4
    for (i = 0; i + V::W <= width; i += V::W) {
      const typename V::R scaled = V::round(V::mul(V::load(residual_out + base + i), scales), delta);
      V::store(normed + base + i, V::mul(scaled, V::load(weight + i)));
    }
    for (; i < width; ++i) {
      narrow(widen(residual_out[base + i]) * scale, normed + base + i);
      narrow(widen(normed[base + i]) * widen(weight[i]), normed + base + i);
    }
  }
}

WEFT_TARGET void add_norm_f64(double* residual_out, double* normed, const double* delta, const double* residual,
                              const double* weight, int64_t rows, int64_t width, double eps) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t base = row * width;
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double total = residual[base + i] + delta[base + i];
      residual_out[base + i] = total;
      squares += total * total;
    }
    const double scale = 1.0 / __builtin_sqrt(squares / double(width) + eps);
    for (int64_t i = 0; i < width; ++i) normed[base + i] = residual_out[base + i] * scale * weight[i];
  }
}

WEFT_TARGET void add_norm(DType dtype, void* residual_out, void* normed, const void* delta, const void* residual,
                          const void* weight, int64_t rows, int64_t width, double eps) {
  auto run = [&](auto* type) WEFT_TARGET {
    using T = std::remove_pointer_t<decltype(type)>;
    add_norm_t<T>(static_cast<T*>(residual_out), static_cast<T*>(normed), static_cast<const T*>(delta),
                  static_cast<const T*>(residual), static_cast<const T*>(weight), rows, width, float(eps));
  };
  if (dtype == DType::f32) run(static_cast<float*>(nullptr));
  if (dtype == DType::bf16) run(static_cast<bf16*>(nullptr));
  if (dtype == DType::f16) run(static_cast<f16*>(nullptr));
  if (dtype == DType::f64)
    add_norm_f64(static_cast<double*>(residual_out), static_cast<double*>(normed), static_cast<const double*>(delta),
                 static_cast<const double*>(residual), static_cast<const double*>(weight), rows, width, eps);
}

inline constexpr Rows kRows{WEFT_ISA_NAME, reduce, weighted, copy_stream, add_norm};
