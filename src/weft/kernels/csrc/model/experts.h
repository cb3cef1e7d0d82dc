// Part of model.cc: grouped experts. A step reads the weights of each chosen expert once, for all its rows.
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
  std::vector<int32_t> ends, numbers;

  template <class Integer>
  void sort(const Integer* chosen, int64_t rows, int64_t choices, int64_t stride, int64_t experts, int64_t group_rows) {
    ends.assign(size_t(experts) + 1, 0), of_choices.assign(size_t(rows * choices), -1), groups.clear();
    const auto each = [&](const auto& function) {
      for (int64_t i = 0; i < rows * choices; ++i)
        if (const int64_t e = int64_t(chosen[i / choices * stride + i % choices]); 0 <= e && e < experts)
          function(i, size_t(e));
    };
    each([&](int64_t, size_t e) { ++ends[e + 1]; });
    for (size_t e = 0; e < size_t(experts); ++e) {
      for (int64_t i = 0; i < ends[e + 1]; i += group_rows)
        groups.push_back({int64_t(e), ends[e] + i, std::min<int64_t>(group_rows, ends[e + 1] - i)});
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
// of `chosen` [T, choices] with weights gate_up [E, 2 · inner, width] and down [E, width, inner], both contiguous. See
// `gated`, and `linear` for f8.
void experts(TensorView x, TensorView weight, TensorView chosen, TensorView gate_up, TensorView down,
             MaybeTensor gate_up_bias, MaybeTensor down_bias, TensorView out, double limit, double alpha, bool add,
             MaybeTensor x_scales, MaybeTensor gate_up_scales, MaybeTensor down_scales, int64_t up_rows,
             int64_t up_columns, int64_t down_rows, int64_t down_columns, int64_t threads) {
  const DType dtype = dtype_of(out), weight_dtype = dtype_of(down);
  const DType between = weight_dtype == DType::f8 ? DType::f32 : dtype;  // of values between the kernels
  check_tensor(x, dtype_of(x), 2, "rows of two dimensions"), check_tensor(out, dtype, 2, "an output of two dimensions");
  for (const auto& w : {gate_up, down}) check_tensor(w, weight_dtype, 3, "weights of one type");
  const int64_t rows = x.size(0), width = x.size(1), held = down.size(0), inner = down.size(2),
                choices = chosen.size(1);
  check(gate_up.size(0) == held && gate_up.size(1) == 2 * inner && gate_up.size(2) == width && down.size(1) == width &&
            out.size(0) == rows && out.size(1) == width && gate_up.IsContiguous() && down.IsContiguous() &&
            weight.ndim() == 2 && weight.size(0) == rows && weight.size(1) == choices && chosen.ndim() == 2 &&
            chosen.size(0) == rows,
        "matching shapes");
  check(dtype_of(weight) == DType::f32 && weight.IsContiguous() && chosen.dtype().code == kDLInt &&
            (choices <= 1 || chosen.strides()[1] == 1),
        "contiguous float32 weights and dense integers");
  const auto check_bias = [&](const MaybeTensor& bias, int64_t size) {
    if (!bias.has_value()) return;
    check_tensor(bias.value(), between, 2, "biases of the rows' type");
    check(bias.value().size(0) == held && bias.value().size(1) == size && bias.value().IsContiguous(), "whole biases");
  };
  check_bias(gate_up_bias, 2 * inner), check_bias(down_bias, width);
  const bool many = by_panels(weight_dtype, rows * choices, kManyPairs * held);
  const int64_t group_rows = many ? rows * choices : kMaxRows;
  static thread_local Pairs own;
  if (chosen.dtype().bits == 64)
    own.sort(static_cast<const int64_t*>(chosen.data_ptr()), rows, choices, chosen.strides()[0], held, group_rows);
  else
    own.sort(static_cast<const int32_t*>(chosen.data_ptr()), rows, choices, chosen.strides()[0], held, group_rows);
  const auto& groups = own.groups;
  const auto* tokens = own.tokens.data();
  const auto pairs = int64_t(own.tokens.size()), element = bytes_of(between);
  // Of many rows there are no wide copies, but each group's packed rows, and other values are in bf16.
  const int64_t in = padded(width), mid = padded(inner), units = many ? 1 : 2;
  const auto count = int64_t(groups.size());
  const int64_t packed = many ? (pairs + 31 * count) * std::max(in, mid) / 2 : pairs * in;
  float* wide = scratch(packed + pairs * (many ? (3 * mid + in) / 2 : in + 4 * mid));
  float *both = wide + packed, *hidden = both + pairs * mid * units;
  float *wide_hidden = hidden + pairs * mid * units / 2, *values = many ? wide_hidden : wide_hidden + pairs * mid;
  if (many) wide_hidden = wide;
  own.numbers.resize(size_t(pairs));
  std::iota(own.numbers.begin(), own.numbers.end(), 0);
  // The product of all pairs with w; `of` has a group's part of it.
  const auto product = [&](TensorView w, const MaybeTensor& bias, const float* wide_rows, float* to) {
    Linear c;
    c.weight_dtype = weight_dtype, c.out_dtype = between, c.inputs = w.size(2), c.padded = padded(c.inputs);
    c.wide = wide_rows, c.weight = w.data_ptr(), c.weight_stride = w.strides()[1];
    c.bias = data_of(bias), c.out = to, c.out_stride = w.size(1);
    return c;
  };
  Linear all_up = product(gate_up, gate_up_bias, wide, both), all_down = product(down, down_bias, wide_hidden, values);
  all_up.dtype = dtype_of(x), all_up.x = x.data_ptr(), all_up.x_stride = x.strides()[0], all_up.from = tokens;
  all_down.dtype = between, all_down.x = hidden, all_down.x_stride = inner, all_down.from = own.numbers.data();
  set_types(&all_up, dtype, x_scales, gate_up_scales, 2 * inner, up_rows, up_columns);
  set_types(&all_down, between, MaybeTensor(), down_scales, width, down_rows, down_columns);
  const auto of = [&](Linear c, int64_t group) {
    const auto [expert, first, count] = groups[size_t(group)];
    const auto at = [](const void* p, int64_t bytes) { return const_cast<char*>(static_cast<const char*>(p)) + bytes; };
    c.rows = count, c.from += first, c.out = at(c.out, first * c.out_stride * element);
    c.weight = at(c.weight, expert * c.out_stride * c.weight_stride * bytes_of(weight_dtype));
    if (!many)
      c.wide += first * c.padded;
    else
      c.wide = kernels->packs_rows(c) ? c.wide + (first + 31 * group) * c.padded / 2 : nullptr;
    if (c.bias) c.bias = at(c.bias, expert * c.out_stride * element);
    if (weight_dtype == DType::f8) c.scales += expert * ((c.out_stride - 1) / c.unit_rows + 1) * c.scale_stride;
    return c;
  };
  const auto widen = [&](const Linear& c) {
    if (!many) return kernels->widen_rows(c, const_cast<float*>(c.wide));
    for (int64_t row = 0; c.wide && row < c.rows; row += 32) kernels->pack_block(c, row);
  };
  const Gated gate = gate_of(between, inner, both, hidden, limit, alpha);
  const auto multiply = [&](const Linear& all, int64_t outputs) {
    if (many)
      over_panels(threads, count, outputs, all,
                  [&](int64_t i, int64_t begin, int64_t end) { compute_panel(of(all, i), begin, end); });
    else
      over_outputs(threads, count, outputs, all.inputs * bytes_of(weight_dtype),
                   [&](int64_t i, int64_t begin, int64_t end) { compute(of(all, i), begin, end); });
  };
  parallel(int(threads), count, [&](int64_t i) { widen(of(all_up, i)); });
  multiply(all_up, 2 * inner);
  if (many) over_rows(threads, pairs, inner, [&](int64_t row) { kernels->gated(gate, row); });
  parallel(int(threads), count, [&](int64_t i) {
    const ExpertRows& part = groups[size_t(i)];
    for (int64_t row = part.first; !many && row < part.first + part.rows; ++row) kernels->gated(gate, row);
    widen(of(all_down, i));
  });
  multiply(all_down, width);
  Combine sum{dtype, between, choices, width, out.strides()[0]};
  sum.weights = static_cast<const float*>(weight.data_ptr()), sum.pairs = own.of_choices.data();
  sum.values = values, sum.out = out.data_ptr(), sum.add = add;
  over_rows(threads, rows, width * choices, [&](int64_t row) { kernels->combine(sum, row); });
}

}  // namespace weft::model
