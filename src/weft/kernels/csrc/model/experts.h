// Part of model.cc: grouped experts of few rows. A step reads the weights of each chosen expert once, for all its rows.
#pragma once

namespace weft::model {
namespace {

// Pairs first … first + rows − 1, tokens of one expert.
struct ExpertRows {
  int64_t expert, first, rows;
};

// Pairs of a token and an expert, in the order of experts.
struct Pairs {
  std::vector<int32_t> tokens, of_choices;  // token of each pair; pair of each choice [tokens, choices], or -1
  std::vector<ExpertRows> groups;
  std::vector<int32_t> ends;

  template <class Integer>
  void sort(const Integer* chosen, int64_t rows, int64_t choices, int64_t stride, int64_t experts) {
    ends.assign(size_t(experts) + 1, 0), of_choices.assign(size_t(rows * choices), -1), groups.clear();
    const auto each = [&](const auto& function) {
      for (int64_t i = 0; i < rows * choices; ++i)
        if (const int64_t e = int64_t(chosen[i / choices * stride + i % choices]); 0 <= e && e < experts)
          function(i, size_t(e));
    };
    each([&](int64_t, size_t e) { ++ends[e + 1]; });
    for (size_t e = 0; e < size_t(experts); ++e) {
      for (int64_t i = 0; i < ends[e + 1]; i += kMaxRows)
        groups.push_back({int64_t(e), ends[e] + i, std::min<int64_t>(kMaxRows, ends[e + 1] - i)});
      ends[e + 1] += ends[e];
    }
    tokens.resize(size_t(ends.back()));
    each([&](int64_t i, size_t e) {
      tokens[size_t(ends[e])] = int32_t(i / choices), of_choices[size_t(i)] = ends[e]++;
    });
  }
};

}  // namespace

// Fills out [T, width], or adds to it, with Σ of weight [T, choices] · down(gated(gate_up(x [T, width]))) over the experts
// of `chosen` [T, choices] with weights gate_up [E, 2 · inner, width] and down [E, width, inner]. See `gated`.
void experts(TensorView x, TensorView weight, TensorView chosen, TensorView gate_up, TensorView down,
             MaybeTensor gate_up_bias, MaybeTensor down_bias, TensorView out, double limit, double alpha, bool add,
             int64_t threads) {
  const DType dtype = dtype_of(x);
  check_tensor(x, dtype, 2, "rows of two dimensions"), check_tensor(out, dtype, 2, "an output of the rows' type");
  check_tensor(gate_up, dtype, 3, "weights of the rows' type"),
      check_tensor(down, dtype, 3, "weights of the rows' type");
  const int64_t rows = x.size(0), width = x.size(1), held = down.size(0), inner = down.size(2),
                choices = chosen.size(1);
  check(gate_up.size(0) == held && gate_up.size(1) == 2 * inner && gate_up.size(2) == width && down.size(1) == width &&
            out.size(0) == rows && out.size(1) == width && weight.ndim() == 2 && weight.size(0) == rows &&
            weight.size(1) == choices && chosen.ndim() == 2 && chosen.size(0) == rows,
        "matching shapes");
  check(dtype_of(weight) == DType::f32 && weight.IsContiguous() && chosen.dtype().code == kDLInt &&
            (choices <= 1 || chosen.strides()[1] == 1),
        "contiguous float32 weights and dense integers");
  const auto check_bias = [&](const MaybeTensor& bias, int64_t size) {
    if (!bias.has_value()) return;
    check_tensor(bias.value(), dtype, 2, "biases of the rows' type");
    check(bias.value().size(0) == held && bias.value().size(1) == size && bias.value().IsContiguous(), "whole biases");
  };
  check_bias(gate_up_bias, 2 * inner), check_bias(down_bias, width);
  static thread_local Pairs own;
  if (chosen.dtype().bits == 64)
    own.sort(static_cast<const int64_t*>(chosen.data_ptr()), rows, choices, chosen.strides()[0], held);
  else
    own.sort(static_cast<const int32_t*>(chosen.data_ptr()), rows, choices, chosen.strides()[0], held);
  const auto& groups = own.groups;
  const auto* tokens = own.tokens.data();
  const auto pairs = int64_t(own.tokens.size()), element = int64_t(dtype == DType::f32 ? 4 : 2);
  float* wide = scratch(pairs * (padded(width) + 3 * padded(inner) + padded(inner) + padded(width)));
  float *both = wide + pairs * padded(width), *hidden = both + pairs * 2 * padded(inner);
  float *wide_hidden = hidden + pairs * padded(inner), *values = wide_hidden + pairs * padded(inner);
  // A group's rows of `from` [*, inputs], or those that `index` has, times its expert's weight, to rows of `to`.
  const auto product = [&](int64_t group, TensorView w, const MaybeTensor& bias, const void* from, int64_t stride,
                           const int32_t* index, float* wide_rows, float* to) {
    const ExpertRows& part = groups[size_t(group)];
    const auto at = [&](const void* p, int64_t i) {
      return const_cast<char*>(static_cast<const char*>(p)) + i * element;
    };
    Linear c;
    c.dtype = dtype, c.rows = part.rows, c.inputs = w.size(2), c.padded = padded(c.inputs);
    c.x = index ? from : at(from, part.first * stride), c.x_stride = stride,
    c.from = index ? index + part.first : nullptr;
    c.wide = wide_rows + part.first * c.padded;
    c.weight = at(w.data_ptr(), part.expert * w.strides()[0]), c.weight_stride = w.strides()[1];
    c.bias = bias.has_value() ? at(bias.value().data_ptr(), part.expert * w.size(1)) : nullptr;
    c.out = at(to, part.first * w.size(1)), c.out_stride = w.size(1);
    return c;
  };
  const auto up = [&](int64_t group) {
    return product(group, gate_up, gate_up_bias, x.data_ptr(), x.strides()[0], tokens, wide, both);
  };
  const auto last = [&](int64_t group) {
    return product(group, down, down_bias, hidden, inner, nullptr, wide_hidden, values);
  };
  const Gated gate = gate_of(dtype, inner, both, hidden, limit, alpha);
  const auto count = int64_t(groups.size());
  parallel(int(threads), count, [&](int64_t i) { kernels->widen_rows(up(i), const_cast<float*>(up(i).wide)); });
  over_outputs(threads, count, 2 * inner, width * element,
               [&](int64_t i, int64_t begin, int64_t end) { compute(up(i), begin, end); });
  parallel(int(threads), count, [&](int64_t i) {
    const ExpertRows& part = groups[size_t(i)];
    for (int64_t row = part.first; row < part.first + part.rows; ++row) kernels->gated(gate, row);
    kernels->widen_rows(last(i), const_cast<float*>(last(i).wide));
  });
  over_outputs(threads, count, width, inner * element,
               [&](int64_t i, int64_t begin, int64_t end) { compute(last(i), begin, end); });
  Combine sum{dtype, dtype, choices, width, out.strides()[0]};
  sum.weights = static_cast<const float*>(weight.data_ptr()), sum.pairs = own.of_choices.data();
  sum.values = values, sum.out = out.data_ptr(), sum.add = add;
  over_rows(threads, rows, width * choices, [&](int64_t row) { kernels->combine(sum, row); });
}

}  // namespace weft::model
