// The bindings of the model kernels: they check tensors, split the work into chunks, and name errors.
// Names differ from the other library: both may be loaded with global symbols.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <numeric>

#include "model.h"
#include "pool.h"
#include "record.h"

namespace ffi = tvm::ffi;
using ffi::TensorView;
using MaybeTensor = ffi::Optional<TensorView>;

namespace weft::model {
namespace {

constexpr int64_t kChunkBytes = 32 << 10;    // of weights that a thread reads at a time
constexpr int64_t kChunkElements = 4 << 10;  // of rows
constexpr int64_t kManyPairs = 8;            // up to these per expert, so do experts
constexpr int64_t kManyRows = 32;            // up to these, a product runs by kMaxRows at a time

const ModelKernels* kernels = &kernels_for("auto");

[[noreturn]] void refuse(const std::string& why) { throw ffi::Error("WeftCallError", why, ""); }

void check(bool fits, const char* what) {
  if (!fits) refuse(std::string("a model kernel requires ") + what);
}

DType dtype_of(TensorView x) {
  const DLDataType t = x.dtype();
  if (t.lanes == 1 && t.code == kDLFloat && t.bits == 32) return DType::f32;
  if (t.lanes == 1 && t.code == kDLBfloat && t.bits == 16) return DType::bf16;
  if (t.lanes == 1 && t.code == kDLFloat && t.bits == 16) return DType::f16;
  if (t.lanes == 1 && t.code == kDLFloat8_e4m3fn) return DType::f8;
  refuse("model kernels take float32, bfloat16, float16 or float8_e4m3fn");
}

// Checks the device, the type, the number of dimensions and that the last is dense.
void check_tensor(TensorView x, DType dtype, int dims, const char* name) {
  check(x.device().device_type == kDLCPU && x.ndim() == dims && dtype_of(x) == dtype, name);
  check(x.size(dims - 1) <= 1 || x.strides()[dims - 1] == 1, "dense last dimensions");
}

int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::f8 ? 1 : 2; }

// The powers of two [slots, heads] of cached vectors in f8 [slots, heads, dim]; null: they are not in f8.
int8_t* exponents_of(const MaybeTensor& exponents, TensorView vectors) {
  if (dtype_of(vectors) != DType::f8) return nullptr;
  check(exponents.has_value() && exponents.value().dtype().code == kDLInt && exponents.value().dtype().bits == 8 &&
            exponents.value().IsContiguous() && exponents.value().ndim() == 2 &&
            exponents.value().size(0) == vectors.size(0) && exponents.value().size(1) == vectors.size(1),
        "an exponent of each vector in float8");
  return static_cast<int8_t*>(exponents.value().data_ptr());
}

const void* data_of(const MaybeTensor& x) { return x.has_value() ? x.value().data_ptr() : nullptr; }

// Memory of the calling thread for each use, kept between calls unless it is large and the call needs much less.
template <int kUse = 0>
float* scratch(int64_t floats) {
  constexpr int64_t kKept = 16 << 20;
  static thread_local std::unique_ptr<char[]> memory;
  static thread_local int64_t held = 0;
  if (held < floats || held > std::max(kKept, 8 * floats)) {
    memory.reset();
    memory.reset(new char[size_t(floats) * 4 + 64]), held = floats;
  }
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}

int64_t padded(int64_t width) { return (width + 31) / 32 * 32; }

// Calls function(row) for each of these rows of `elements` elements.
template <class Function>
void over_rows(int64_t threads, int64_t rows, int64_t elements, const Function& function) {
  const int64_t size = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, elements));
  parallel(int(threads), (rows + size - 1) / size, [&](int64_t chunk) {
    for (int64_t row = chunk * size; row < std::min(rows, (chunk + 1) * size); ++row) function(row);
  });
}

// Calls function(product, begin, end) for ranges of the outputs of each product. bytes: of one output's weights.
template <class Function>
void over_outputs(int64_t threads, int64_t products, int64_t outputs, int64_t bytes, const Function& function) {
  const int64_t blocks = kChunkBytes / std::max<int64_t>(1, kChunk * bytes);
  const int64_t size = std::min(kMaxChunk, std::max<int64_t>(1, blocks) * kChunk), parts = (outputs + size - 1) / size;
  parallel(int(threads), products * parts, [&](int64_t chunk) {
    const int64_t begin = chunk % parts * size;
    function(chunk / parts, begin, std::min(outputs, begin + size));
  });
}

// Rows [gate, up] of `inner` elements each, next to each other.
Gated gate_of(DType dtype, int64_t inner, const void* x, void* out, double limit, double alpha) {
  return {dtype, inner, 2 * inner, x, out, limit == limit, alpha == alpha, float(limit), float(alpha)};
}

// Checks the types of rows, weight and output, and sets the scales of f8.
void set_types(Product* c, DType out, const MaybeTensor& x_scales, const MaybeTensor& scales, int64_t outputs,
               int64_t unit_rows, int64_t columns) {
  const bool f8 = c->weight_dtype == DType::f8;
  check(out != DType::f8 && (c->dtype == (f8 && x_scales.has_value() ? DType::f8 : out)) &&
            (f8 || c->weight_dtype == out),
        "rows, weights and outputs of one type, or weights in float8");
  if (!f8) return;
  check(scales.has_value() && unit_rows > 0 && columns > 0 && columns % 32 == 0 && columns <= kMaxColumns,
        "scales of float8 weights for multiples of 32 columns");
  const int64_t blocks = (c->inputs + columns - 1) / columns;
  const auto set = [&](TensorView x, int64_t count, const float** data, int64_t* stride) {
    const int last = x.ndim() - 1;
    check(dtype_of(x) == DType::f32 && x.IsContiguous() && last > 0 && x.size(last) == blocks &&
              (count < 0 || x.size(last - 1) == count),
          "whole float32 scales");
    *data = static_cast<const float*>(x.data_ptr()), *stride = blocks;
  };
  set(scales.value(), (outputs + unit_rows - 1) / unit_rows, &c->scales, &c->scale_stride);
  if (x_scales.has_value()) set(x_scales.value(), -1, &c->x_scales, &c->x_scale_stride);
  c->unit_rows = unit_rows, c->columns = columns;
}

// Checks if a product of more than `threshold` rows runs by panels.
bool by_panels(DType weight, int64_t rows, int64_t threshold) {
  return kernels->many_rows && weight == DType::bf16 && rows > threshold;
}

// Calls function(product, begin, end) for panels of the outputs of products like c; smaller ones keep all threads at work.
// Their sizes differ by 32 at most: 576 outputs for two threads are 128, 160, 128 and 160.
template <class Function>
void over_panels(int64_t threads, int64_t products, int64_t outputs, const Product& c, const Function& function) {
  const int64_t each = c.wide ? 8 : 2;  // panels of a thread: they cost nothing where rows are packed
  const int64_t shares = threads > 1 ? (each * threads + products - 1) / products : 1;
  const int64_t blocks = (outputs + 31) / 32, size = kernels->panel_outputs(c.inputs) / 32;
  const int64_t parts = std::max(std::min(shares, blocks), (blocks + size - 1) / size);
  parallel(int(threads), products * parts, [&](int64_t chunk) {
    const auto border = [&](int64_t part) { return std::min(outputs, part * blocks / parts * 32); };
    function(chunk / parts, border(chunk % parts), border(chunk % parts + 1));
  });
}

void compute_panel(const Linear& c, int64_t begin, int64_t end) {
  kernels->many_rows(c, begin, end, scratch<1>(kernels->panel_floats(c, end - begin)));
}

// Computes outputs begin … end − 1 of c.
void compute(const Linear& c, int64_t begin, int64_t end, decltype(ModelKernels::product) product = kernels->product) {
  alignas(64) float found[kMaxRows * kMaxChunk];
  product(c, begin, end, found);
  kernels->finish(c, begin, end, found);
}

}  // namespace

// Chooses the kernels of an instruction set, or "auto", for all threads; returns its name.
ffi::String use(ffi::String isa) {
  try {
    kernels = &kernels_for(std::string(isa));
  } catch (const std::invalid_argument& error) {
    refuse(error.what());
  }
  return kernels->isa;
}

// The name of the instruction set that runs.
ffi::String isa() { return kernels->isa; }

namespace {

void multiply(TensorView x, TensorView weight, const MaybeTensor& bias, TensorView out, const MaybeTensor& x_scales,
              const MaybeTensor& scales, int64_t unit_rows, int64_t columns, int64_t threads) {
  Linear c;
  c.dtype = dtype_of(x), c.weight_dtype = dtype_of(weight), c.out_dtype = dtype_of(out);
  check_tensor(x, c.dtype, 2, "rows"), check_tensor(weight, c.weight_dtype, 2, "a weight of two dimensions");
  check_tensor(out, c.out_dtype, 2, "an output of two dimensions");
  c.inputs = x.size(1), c.padded = padded(c.inputs);
  const int64_t rows = x.size(0), outputs = weight.size(0);
  set_types(&c, c.out_dtype, x_scales, scales, outputs, unit_rows, columns);
  check(weight.size(1) == c.inputs && out.size(0) == rows && out.size(1) == outputs, "matching shapes");
  if (bias.has_value()) {
    check_tensor(bias.value(), c.out_dtype, 1, "a bias of the rows' type");
    check(bias.value().size(0) == outputs, "a bias of the weight's outputs");
  }
  c.weight = weight.data_ptr(), c.bias = data_of(bias), c.weight_stride = weight.strides()[0];
  c.out_stride = out.strides()[0];
  c.from = nullptr, c.x_stride = x.strides()[0];
  if (by_panels(c.weight_dtype, rows, kManyRows)) {
    c.rows = rows, c.x = x.data_ptr(), c.out = out.data_ptr(), c.wide = nullptr;
    if (kernels->packs_rows(c)) {
      const int64_t blocks = (rows + 31) / 32;
      c.wide = scratch(blocks * 16 * c.padded);
      parallel(int(threads), blocks, [&](int64_t i) { kernels->pack_block(c, i * 32); });
    }
    return over_panels(threads, 1, outputs, c,
                       [&](int64_t, int64_t begin, int64_t end) { compute_panel(c, begin, end); });
  }
  float* wide = scratch(rows * c.padded);
  const auto of = [&](int64_t block) {
    const int64_t first = block * kMaxRows;
    Linear each = c;
    each.rows = std::min(kMaxRows, rows - first), each.wide = wide + first * c.padded;
    each.x = static_cast<char*>(x.data_ptr()) + first * c.x_stride * bytes_of(c.dtype);
    each.out = static_cast<char*>(out.data_ptr()) + first * c.out_stride * bytes_of(c.out_dtype);
    if (x_scales.has_value()) each.x_scales += first * c.x_scale_stride;
    return each;
  };
  const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;  // they use the same weights in a cache
  parallel(int(threads), blocks, [&](int64_t i) { kernels->widen_rows(of(i), const_cast<float*>(of(i).wide)); });
  over_outputs(threads, 1, outputs, c.inputs * bytes_of(c.weight_dtype), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < blocks; ++i) compute(of(i), begin, end);
  });
}

}  // namespace

// Fills out [rows, outputs] with x [rows, inputs] weightᵀ [inputs, outputs] + bias [outputs].
void linear(TensorView x, TensorView weight, MaybeTensor bias, TensorView out, int64_t threads) {
  multiply(x, weight, bias, out, MaybeTensor(), MaybeTensor(), 0, 0, threads);
}

// The same of a weight in f8 with a scale for each block of unit_rows and columns. x: f8 with scales, or it is quantised.
void linear_float8(TensorView x, MaybeTensor x_scales, TensorView weight, TensorView scales, int64_t unit_rows,
                   int64_t columns, TensorView out, int64_t threads) {
  multiply(x, weight, MaybeTensor(), out, x_scales, scales, unit_rows, columns, threads);
}

// Fills out [rows, heads, columns] with x [rows, heads, depth] weight [heads, depth, columns], head by head.
void multiply_heads(TensorView x, TensorView weight, TensorView out, int64_t threads) {
  Linear c;
  c.dtype = c.weight_dtype = c.out_dtype = dtype_of(x);
  check_tensor(x, c.dtype, 3, "rows of three dimensions"), check_tensor(out, c.dtype, 3, "an output of the rows' type");
  const int64_t heads = x.size(1), columns = out.size(2), bytes = bytes_of(c.dtype);
  const bool transposed = weight.strides()[1] == 1;
  c.rows = x.size(0), c.inputs = x.size(2), c.padded = padded(c.inputs);
  check(c.dtype != DType::f8 && dtype_of(weight) == c.dtype && weight.ndim() == 3 && weight.size(0) == heads &&
            weight.size(1) == c.inputs && weight.size(2) == columns && out.size(0) == c.rows && out.size(1) == heads,
        "matching shapes and types");
  check(c.rows <= kMaxRows && (transposed || (c.padded <= kMaxDim && (columns <= 1 || weight.strides()[2] == 1))),
        "at most 16 rows, and weights that are dense in one dimension");
  c.x_stride = x.strides()[0], c.out_stride = out.strides()[0], c.from = nullptr, c.bias = nullptr;
  c.weight_stride = weight.strides()[transposed ? 2 : 1];
  float* wide = scratch(heads * c.rows * c.padded);
  const auto of = [&](int64_t head) {
    const auto at = [&](TensorView t, int64_t dim) {
      return static_cast<char*>(t.data_ptr()) + head * t.strides()[dim] * bytes;
    };
    Linear each = c;
    each.x = at(x, 1), each.weight = at(weight, 0), each.out = at(out, 1), each.wide = wide + head * c.rows * c.padded;
    return each;
  };
  if (transposed)
    parallel(int(threads), heads, [&](int64_t i) { kernels->widen_rows(of(i), const_cast<float*>(of(i).wide)); });
  over_outputs(threads, heads, columns, c.inputs * bytes, [&](int64_t i, int64_t begin, int64_t end) {
    compute(of(i), begin, end, transposed ? kernels->product : kernels->columns);
  });
}

// Fills out [B, heads, value dim] and lse [B, heads] with attention of q [B, heads, dim] to the first lengths [B] tokens
// in pages [B, W] of keys and values [slots, kv heads, dim], or to the last `window` of them if it is not 0.
void decode(TensorView q, TensorView keys, TensorView values, TensorView pages, TensorView lengths, TensorView out,
            MaybeTensor lse, double scale, int64_t window, int64_t page_size, MaybeTensor key_exponents,
            MaybeTensor value_exponents, int64_t threads) {
  Decode c;
  c.dtype = dtype_of(q), c.cache_dtype = key_exponents.has_value() ? DType::f8 : c.dtype;
  check_tensor(q, c.dtype, 3, "queries of three dimensions");
  check_tensor(keys, c.cache_dtype, 3, "keys of the queries' type"),
      check_tensor(values, c.cache_dtype, 3, "values so");
  c.key_exponents = exponents_of(key_exponents, keys), c.value_exponents = exponents_of(value_exponents, values);
  check_tensor(out, c.dtype, 3, "an output of the queries' type");
  const auto integers = [](TensorView x, int dims) {
    return x.ndim() == dims && x.dtype().code == kDLInt && x.dtype().bits == 32 && x.device().device_type == kDLCPU;
  };
  check(integers(pages, 2) && integers(lengths, 1) && lengths.IsContiguous() && out.IsContiguous(),
        "int32 pages and lengths, and a contiguous output");
  check(pages.size(1) <= 1 || pages.strides()[1] == 1, "dense pages");
  const int64_t sequences = q.size(0);
  c.heads = q.size(1), c.dim = q.size(2), c.kv_heads = keys.size(1), c.value_dim = values.size(2);
  check(keys.size(2) == c.dim && values.size(1) == c.kv_heads && c.kv_heads > 0 && c.heads % c.kv_heads == 0 &&
            out.size(0) == sequences && out.size(1) == c.heads && out.size(2) == c.value_dim &&
            pages.size(0) == sequences && lengths.size(0) == sequences,
        "matching shapes");
  c.padded = padded(c.dim), c.padded_value = padded(c.value_dim), c.page_size = page_size;
  c.page_stride = pages.strides()[0];
  c.q_row = q.strides()[0], c.q_head = q.strides()[1];
  c.key_slot = keys.strides()[0], c.key_head = keys.strides()[1];
  c.value_slot = values.strides()[0], c.value_head = values.strides()[1];
  c.q = q.data_ptr(), c.keys = keys.data_ptr(), c.values = values.data_ptr(), c.out = out.data_ptr();
  c.pages = static_cast<const int32_t*>(pages.data_ptr());
  c.lse = nullptr;
  if (lse.has_value()) {
    check(dtype_of(lse.value()) == DType::f32 && lse.value().IsContiguous() && lse.value().ndim() == 2 &&
              lse.value().size(0) == sequences && lse.value().size(1) == c.heads,
          "a contiguous float32 lse [B, heads]");
    c.lse = static_cast<float*>(lse.value().data_ptr());
  }
  c.scale = float(scale);
  const auto tokens = static_cast<const int32_t*>(lengths.data_ptr());
  static thread_local std::vector<Part> parts;
  static thread_local std::vector<int64_t> firsts;  // of each sequence's parts; a key-value head's follow each other
  parts.clear(), firsts.clear();
  for (int64_t b = 0; b < sequences; ++b) {
    firsts.push_back(int64_t(parts.size()));
    const int64_t end = std::max(0, tokens[b]), begin = window ? std::max<int64_t>(0, end - window) : 0;
    for (int64_t kv = 0; kv < c.kv_heads; ++kv)
      for (int64_t at = begin; at < end; at = (at / kPart + 1) * kPart)
        parts.push_back({b, kv, at, std::min(end, (at / kPart + 1) * kPart)});
  }
  firsts.push_back(int64_t(parts.size()));
  const int64_t group = c.heads / c.kv_heads, stride = group * (c.padded_value + 2 + c.padded);
  float* states = scratch(int64_t(parts.size()) * stride);
  const Part* all_parts = parts.data();
  const auto attend = [&](int64_t i) { kernels->attend(c, all_parts[i], states + i * stride); };
  parallel(int(threads), int64_t(parts.size()), attend);
  const int64_t* first_parts = firsts.data();
  over_rows(threads, sequences * c.heads, 8 * c.padded_value, [&](int64_t row) {
    const int64_t b = row / c.heads, head = row % c.heads, count = (first_parts[b + 1] - first_parts[b]) / c.kv_heads;
    kernels->merge(c, b, head, states + (first_parts[b] + head / group * count) * stride, stride, count);
  });
}

// Fills out [rows, heads, value dim] and lse [rows, heads] with attention of q [rows, heads, dim], in bf16, to keys and
// values [slots, kv heads, dim] of the tokens in `slots` [T]; null: all. A row sees the first limits [rows] of them, or the
// last `window` of these if it is not 0. begin: number of the first token in its sequence.
void prompt(TensorView q, TensorView keys, TensorView values, MaybeTensor slots, TensorView limits, TensorView out,
            MaybeTensor lse, double scale, int64_t window, int64_t begin, int64_t threads) {
  Prompt c;
  for (const auto& x : {q, keys, values, out}) check_tensor(x, DType::bf16, 3, "three dimensions of bfloat16");
  c.rows = q.size(0), c.heads = q.size(1), c.dim = q.size(2), c.kv_heads = keys.size(1), c.value_dim = values.size(2);
  c.slots = slots.has_value() ? static_cast<const int32_t*>(slots.value().data_ptr()) : nullptr;
  c.skipped = begin % kSeen, c.tokens = c.skipped + (slots.has_value() ? slots.value().size(0) : keys.size(0));
  const auto integers = [](TensorView x) {
    return x.ndim() == 1 && x.dtype().code == kDLInt && x.dtype().bits == 32 && x.IsContiguous();
  };
  check(kernels->attend_rows && integers(limits) && (!slots.has_value() || integers(slots.value())),
        "AMX, and contiguous int32 limits and slots");
  check(keys.size(2) == c.dim && values.size(1) == c.kv_heads && c.kv_heads > 0 && c.heads % c.kv_heads == 0 &&
            out.size(0) == c.rows && out.size(1) == c.heads && out.size(2) == c.value_dim && limits.size(0) == c.rows &&
            (slots.has_value() || values.size(0) == keys.size(0)),
        "matching shapes");
  c.padded = padded(c.dim), c.padded_value = padded(c.value_dim), c.window = window ? window : INT32_MAX;
  c.q_row = q.strides()[0], c.q_head = q.strides()[1], c.out_row = out.strides()[0], c.out_head = out.strides()[1];
  c.key_slot = keys.strides()[0], c.key_head = keys.strides()[1];
  c.value_slot = values.strides()[0], c.value_head = values.strides()[1];
  c.q = q.data_ptr(), c.keys = keys.data_ptr(), c.values = values.data_ptr(), c.out = out.data_ptr();
  c.limits = static_cast<const int32_t*>(limits.data_ptr()), c.lse = nullptr, c.lse_row = 0, c.scale = float(scale);
  if (lse.has_value()) {
    check_tensor(lse.value(), DType::f32, 2, "float32 lse [rows, heads]");
    check(lse.value().size(0) == c.rows && lse.value().size(1) == c.heads, "matching shapes");
    c.lse = static_cast<float*>(lse.value().data_ptr()), c.lse_row = lse.value().strides()[0];
  }
  const int64_t blocks = (c.tokens + 31) / 32;
  float* packed = scratch(kernels->prompt_floats(c, true));
  parallel(int(threads), c.kv_heads * blocks,
           [&](int64_t i) { kernels->pack_tokens(c, i / blocks, i % blocks * 32, packed); });
  parallel(int(threads), c.heads * ((c.rows + 31) / 32), [&](int64_t i) {
    kernels->attend_rows(c, i % c.heads, i / c.heads * 32, packed, scratch<1>(kernels->prompt_floats(c, false)));
  });
}

// Fills out [rows, width] with the RMSNorm of x [rows, width] or, if delta is given, of total = x + delta. total, out:
// contiguous.
void norm(TensorView x, MaybeTensor delta, TensorView weight, double eps, MaybeTensor total, TensorView out,
          int64_t threads) {
  Norm c;
  c.dtype = dtype_of(x), c.weight_dtype = dtype_of(weight);
  check_tensor(x, c.dtype, 2, "rows of two dimensions"), check_tensor(out, c.dtype, 2, "an output of the rows' type");
  c.width = x.size(1), c.x_stride = x.strides()[0], c.delta_stride = 0;
  const auto whole = [&](TensorView y) {
    return y.ndim() == 2 && y.size(0) == x.size(0) && y.size(1) == c.width && dtype_of(y) == c.dtype;
  };
  check(whole(out) && out.IsContiguous() && weight.ndim() == 1 && weight.size(0) == c.width && weight.IsContiguous() &&
            (c.weight_dtype == c.dtype || c.weight_dtype == DType::f32),
        "matching shapes, and a weight of the rows' type or float32");
  if (delta.has_value()) {
    check(total.has_value() && whole(delta.value()) && whole(total.value()) && total.value().IsContiguous(),
          "a delta and a contiguous total of the rows' shape");
    check_tensor(delta.value(), c.dtype, 2, "a delta of the rows' type");
    c.delta_stride = delta.value().strides()[0];
  }
  c.x = x.data_ptr(), c.delta = data_of(delta), c.weight = weight.data_ptr(), c.out = out.data_ptr();
  c.total = const_cast<void*>(data_of(total)), c.eps = float(eps);
  over_rows(threads, x.size(0), c.width, [&](int64_t row) { kernels->norm(c, row); });
}

// Splits rows [queries, keys, values], normalises and rotates heads of queries and keys, writes keys and values to slots
// of the cache [slots, kv heads, dim], and fills q [rows, heads, dim]. Slot -1: written to slot `unused`.
void rope(TensorView qkv, TensorView cos, TensorView sin, TensorView slots, TensorView q, TensorView keys,
          TensorView values, MaybeTensor q_weight, MaybeTensor k_weight, double eps, bool interleaved, int64_t unused,
          MaybeTensor key_exponents, MaybeTensor value_exponents, int64_t threads) {
  Rope c;
  c.dtype = c.weight_dtype = dtype_of(qkv), c.cache_dtype = key_exponents.has_value() ? DType::f8 : c.dtype;
  const int64_t rows = qkv.size(0);
  check_tensor(qkv, c.dtype, 2, "rows of two dimensions"), check_tensor(cos, c.dtype, 2, "cosines of the rows' type");
  check_tensor(sin, c.dtype, 2, "sines of the rows' type"), check_tensor(q, c.dtype, 3, "queries of the rows' type");
  check_tensor(keys, c.cache_dtype, 3, "keys of the rows' type"), check_tensor(values, c.cache_dtype, 3, "values so");
  c.key_exponents = exponents_of(key_exponents, keys), c.value_exponents = exponents_of(value_exponents, values);
  c.heads = q.size(1), c.dim = q.size(2), c.kv_heads = keys.size(1), c.half = cos.size(1);
  check(c.dim <= kMaxDim && 2 * c.half <= c.dim && qkv.size(1) == (c.heads + 2 * c.kv_heads) * c.dim &&
            keys.size(2) == c.dim && values.size(1) == c.kv_heads && values.size(2) == c.dim && q.size(0) == rows &&
            q.IsContiguous() && cos.size(0) == rows && sin.size(0) == rows && sin.size(1) == c.half &&
            cos.strides()[0] == sin.strides()[0],
        "matching shapes");
  check(slots.ndim() == 1 && slots.size(0) == rows && slots.dtype().code == kDLInt && slots.dtype().bits == 64 &&
            slots.IsContiguous() && slots.device().device_type == kDLCPU,
        "int64 slots");
  for (const auto& weight : {q_weight, k_weight}) {
    if (!weight.has_value()) continue;
    c.weight_dtype = dtype_of(weight.value());
    check(weight.value().ndim() == 1 && weight.value().size(0) == c.dim && weight.value().IsContiguous() &&
              (c.weight_dtype == c.dtype || c.weight_dtype == DType::f32),
          "norms of the heads' size, of the rows' type or float32");
  }
  c.qkv_stride = qkv.strides()[0], c.table_stride = cos.strides()[0];
  c.key_slot = keys.strides()[0], c.key_head = keys.strides()[1];
  c.value_slot = values.strides()[0], c.value_head = values.strides()[1];
  c.qkv = qkv.data_ptr(), c.cos = cos.data_ptr(), c.sin = sin.data_ptr(), c.q = q.data_ptr();
  c.keys = keys.data_ptr(), c.values = values.data_ptr(), c.slots = static_cast<const int64_t*>(slots.data_ptr());
  c.q_weight = data_of(q_weight), c.k_weight = data_of(k_weight), c.eps = float(eps);
  c.interleaved = interleaved, c.unused = unused;
  // Rows without a slot write to the same one, which nobody reads.
  over_rows(threads, rows, qkv.size(1), [&](int64_t row) { kernels->rope(c, row); });
}

namespace {
void scale_rows(TensorView out, TensorView score);
}  // namespace

// Fills out [rows, inner] from x [rows, 2 · inner], gate first. limit, alpha: NaN for none. score: see `scale_rows`.
void gated(TensorView x, TensorView out, double limit, double alpha, MaybeTensor score, int64_t threads) {
  Gated c = gate_of(dtype_of(x), out.size(1), x.data_ptr(), out.data_ptr(), limit, alpha);
  check_tensor(x, c.dtype, 2, "rows of two dimensions"), check_tensor(out, c.dtype, 2, "an output of the rows' type");
  c.x_stride = x.strides()[0];
  check(x.size(1) == 2 * c.inner && out.size(0) == x.size(0) && out.IsContiguous(), "matching shapes");
  over_rows(threads, x.size(0), c.inner, [&](int64_t row) { kernels->gated(c, row); });
  if (score.has_value()) scale_rows(out, score.value());
}

// Fills values f8 [rows, width] and scales [rows, groups of columns] with x [rows, width].
void quantise(TensorView x, TensorView values, TensorView scales, int64_t columns, int64_t threads) {
  check_tensor(x, dtype_of(x), 2, "rows of two dimensions"), check_tensor(values, DType::f8, 2, "values in float8");
  const int64_t rows = x.size(0), width = x.size(1);
  check(0 < columns && columns <= kMaxColumns && dtype_of(x) != DType::f8 && values.size(0) == rows &&
            values.size(1) == width && values.IsContiguous() && dtype_of(scales) == DType::f32 && scales.ndim() == 2 &&
            scales.size(0) == rows && scales.size(1) == (width + columns - 1) / columns && scales.IsContiguous(),
        "contiguous values and float32 scales of the rows' shape");
  Quantise c{dtype_of(x), width, x.strides()[0], columns, x.data_ptr(), nullptr, nullptr};
  c.values = static_cast<f8*>(values.data_ptr()), c.scales = static_cast<float*>(scales.data_ptr());
  over_rows(threads, rows, 8 * width, [&](int64_t row) { kernels->quantise(c, row); });
}

// Reads floats by threads as fast as this CPU can, and returns their bits' parity: what reading memory costs.
int64_t read(TensorView x, int64_t threads) {
  check_tensor(x, DType::f32, 1, "floats");
  const auto from = static_cast<const char*>(x.data_ptr());
  const int64_t bytes = x.size(0) * 4, chunks = bytes / kChunkBytes;
  std::atomic<int64_t> total{0};
  parallel(int(threads), chunks, [&](int64_t chunk) {
    typedef int64_t Wide __attribute__((vector_size(64)));
    constexpr int64_t kStream = kChunkBytes / 4;
    Wide sums[4] = {};
    const char* words = from + chunk * kChunkBytes;
    for (int64_t i = 0; i < kStream; i += 64)
      for (int j = 0; j < 4; ++j) {
        __builtin_prefetch(words + kStream * j + i + (4 << 10));
        Wide some;
        std::memcpy(&some, words + kStream * j + i, 64);
        sums[j] ^= some;
      }
    total ^= (sums[0] ^ sums[1] ^ sums[2] ^ sums[3])[0];
  });
  return total.load();
}

}  // namespace weft::model

#include "experts.h"
#include "step.inl"
#include "small.inl"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(use, weft::model::use)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa, weft::model::isa)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, weft::model::linear)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_float8, weft::model::linear_float8)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply_heads, weft::model::multiply_heads)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(experts, weft::model::experts)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, weft::model::decode)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prompt, weft::model::prompt)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm, weft::model::norm)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope, weft::model::rope)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gated, weft::model::gated)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantise, weft::model::quantise)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read, weft::model::read)
