// Bindings of a step's small ops: embeddings, rotary tables, the choice of experts. Part of model.cc.

namespace weft::model {
namespace {

template <class Function>
void of_type(DType dtype, const Function& function) {
  dtype == DType::f32 ? function(float()) : dtype == DType::bf16 ? function(bf16()) : function(f16());
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The greatest of x [count] that is not taken, by its place. count: at least 1 of them is not.
int64_t greatest(const float* x, const char* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (!taken[i] && (best < 0 || greater(x[i], x[best]))) best = i;
  return best;
}

// Takes the experts that are in none of the best groups.
void take_groups(const float* ranked, char* taken, int64_t experts, int64_t groups, int64_t top, int64_t best) {
  const int64_t size = experts / groups;
  std::vector<float> sums(size_t(groups), 0.0f);
  std::vector<char> held(size_t(size_t(std::max(groups, size))), 0);
  for (int64_t g = 0; g < groups; ++g) {
    std::fill(held.begin(), held.end(), 0);
    for (int64_t i = 0; i < best; ++i) {
      const int64_t at = greatest(ranked + g * size, held.data(), size);
      sums[size_t(g)] += ranked[g * size + at], held[size_t(at)] = 1;
    }
  }
  std::fill(held.begin(), held.end(), 0);
  std::fill_n(taken, experts, 1);
  for (int64_t i = 0; i < top; ++i) {
    const int64_t g = greatest(sums.data(), held.data(), groups);
    held[size_t(g)] = 1, std::fill_n(taken + g * size, size, 0);
  }
}

// Scales rows of out [T, …, inner] by the sigmoids of score [T, 1].
void scale_rows(TensorView out, TensorView score) {
  const DType dtype = dtype_of(out);
  check_tensor(score, dtype, 2, "a score of the rows' type");
  const int64_t tokens = score.size(0), size = tokens ? out.size(0) / tokens * out.size(1) : 0;
  check(score.size(1) == 1 && (tokens ? out.size(0) % tokens == 0 : out.size(0) == 0), "a score of each token");
  of_type(dtype, [&](auto type) {
    using T = decltype(type);
    T* row = static_cast<T*>(out.data_ptr());
    for (int64_t t = 0; t < tokens; ++t, row += size) {
      T factor;
      narrow(sigmoid(widen(static_cast<const T*>(score.data_ptr())[t * score.strides()[0]])), &factor);
      for (int64_t i = 0; i < size; ++i) narrow(widen(row[i]) * widen(factor), row + i);
    }
  });
}

}  // namespace

// Fills weight float32 and expert int32 [T, k] with the experts of logits [T, E], counted from `first`: see
// weft.engine.kernels.model_reference.choose. Of equals the first is chosen.
void choose(TensorView logits, MaybeTensor bias, TensorView weight, TensorView expert, bool softmax, int64_t groups,
            int64_t top_groups, int64_t group_best, bool renormalise, double scale, int64_t first, int64_t threads) {
  const DType dtype = dtype_of(logits);
  check_tensor(logits, dtype, 2, "logits of two dimensions"), check_tensor(weight, DType::f32, 2, "float32 weights");
  const int64_t rows = logits.size(0), experts = logits.size(1), k = weight.size(1);
  check(dtype != DType::f8 && weight.IsContiguous() && weight.size(0) == rows && k <= experts && groups > 0 &&
            experts % groups == 0 && expert.size(0) == rows && expert.size(1) == k,
        "matching shapes");
  if (bias.has_value()) {
    check_tensor(bias.value(), DType::f32, 1, "a float32 bias");
    check(bias.value().size(0) == experts, "a bias of each expert");
  }
  const auto* added = static_cast<const float*>(data_of(bias));
  int32_t* chosen = filled(expert, 2);
  over_rows(threads, rows, 4 * experts, [&](int64_t row) {
    static thread_local std::vector<float> values;
    static thread_local std::vector<char> flags;
    values.resize(size_t(2 * experts)), flags.assign(size_t(experts), 0);
    float *scores = values.data(), *ranked = scores + experts, sum = 0;
    of_type(dtype, [&](auto type) {
      const auto* x = static_cast<const decltype(type)*>(logits.data_ptr()) + row * logits.strides()[0];
      for (int64_t e = 0; e < experts; ++e) scores[e] = widen(x[e]);
    });
    const float top = scores[greatest(scores, flags.data(), experts)];
    for (int64_t e = 0; e < experts; ++e)
      sum += scores[e] = softmax ? std::exp(scores[e] - top) : sigmoid(scores[e]);
    for (int64_t e = 0; e < experts; ++e) {
      if (softmax) scores[e] /= sum;
      ranked[e] = scores[e] + (added ? added[e] : 0.0f);
    }
    if (groups > 1) take_groups(ranked, flags.data(), experts, groups, top_groups, group_best);
    float total = 0, *to = static_cast<float*>(weight.data_ptr()) + row * k;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t e = greatest(ranked, flags.data(), experts);
      flags[size_t(e)] = 1, chosen[row * k + i] = int32_t(e - first), total += to[i] = scores[e];
    }
    for (int64_t i = 0; i < k; ++i) to[i] = (renormalise ? to[i] / (total + 1e-20f) : to[i]) * float(scale);
  });
}

// Fills out [T, width] with rows of weight [held, width]: token - first, or zeros if it is elsewhere. first: -1 for 0,
// with all tokens held.
void embed(TensorView tokens, TensorView weight, TensorView out, int64_t first, int64_t) {
  const DType dtype = dtype_of(weight);
  check_tensor(weight, dtype, 2, "a weight of two dimensions"), check_tensor(out, dtype, 2, "rows of its type");
  const int64_t held = weight.size(0), bytes = weight.size(1) * bytes_of(dtype);
  check(out.IsContiguous() && out.size(1) == weight.size(1) && out.size(0) == tokens.size(0), "matching shapes");
  const int64_t* token = longs(tokens, 1);
  char* to = static_cast<char*>(out.data_ptr());
  for (int64_t t = 0; t < tokens.size(0); ++t, to += bytes) {
    const int64_t at = token[t] - std::max<int64_t>(0, first);
    const bool here = 0 <= at && at < held;
    check(here || first >= 0, "tokens of the vocabulary");
    if (here)
      std::memcpy(to, static_cast<const char*>(weight.data_ptr()) + at * weight.strides()[0] * bytes_of(dtype), size_t(bytes));
    else
      std::memset(to, 0, size_t(bytes));
  }
}

// Fills cos and sin [T, 1, 2 · n] for positions [T] and inverse [n]: see weft.engine.kernels.model_reference.cos_sin.
void cos_sin(TensorView positions, TensorView inverse, TensorView cos, TensorView sin, double factor, bool interleaved,
             int64_t threads) {
  const DType dtype = dtype_of(cos);
  for (const auto& x : {cos, sin}) check_tensor(x, dtype, 3, "tables of three dimensions");
  check_tensor(inverse, DType::f32, 1, "float32 frequencies");
  const int64_t rows = positions.size(0), n = inverse.size(0), step = interleaved ? 2 : 1, across = interleaved ? 1 : n;
  for (const auto& x : {cos, sin}) check(x.IsContiguous() && x.size(0) == rows && x.size(2) == 2 * n, "matching shapes");
  const int64_t* position = longs(positions, 1);
  over_rows(threads, rows, 16 * n, [&](int64_t row) {
    of_type(dtype, [&](auto type) {
      using T = decltype(type);
      T *c = static_cast<T*>(cos.data_ptr()) + 2 * n * row, *s = static_cast<T*>(sin.data_ptr()) + 2 * n * row;
      for (int64_t i = 0; i < n; ++i) {
        const float angle = float(position[row]) * static_cast<const float*>(inverse.data_ptr())[i];
        narrow(std::cos(angle) * float(factor), c + i * step), narrow(std::sin(angle) * float(factor), s + i * step);
        c[i * step + across] = c[i * step], s[i * step + across] = s[i * step];
      }
    });
  });
}

// Fills out [rows, both widths] with rows of left and right, next to each other.
void join(TensorView left, TensorView right, TensorView out, int64_t) {
  const DType dtype = dtype_of(out);
  for (const auto& x : {left, right, out}) check_tensor(x, dtype, 2, "rows of one type");
  const int64_t rows = out.size(0), bytes = bytes_of(dtype);
  check(out.IsContiguous() && left.size(0) == rows && right.size(0) == rows && left.size(1) + right.size(1) == out.size(1),
        "matching shapes");
  char* to = static_cast<char*>(out.data_ptr());
  for (int64_t row = 0; row < rows; ++row)
    for (const auto& x : {left, right}) {
      std::memcpy(to, static_cast<const char*>(x.data_ptr()) + row * x.strides()[0] * bytes, size_t(x.size(1) * bytes));
      to += x.size(1) * bytes;
    }
}

}  // namespace weft::model

TVM_FFI_DLL_EXPORT_TYPED_FUNC(choose, weft::model::choose)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(embed, weft::model::embed)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cos_sin, weft::model::cos_sin)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(join, weft::model::join)
