// Compares the row kernels of every instruction set of this CPU with the scalar ones, bit by bit.
//
// Arguments: rounds, fault, instruction set (all of this CPU). Prints the names of what it compared; exits with 1, and a line that says where, at the first difference. What is
// computed over a whole row (the norm) may differ by rounding: vectors add in another order. A NaN is any NaN.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "planted.h"
#include "rows.h"

using namespace weft;

namespace {

uint64_t state = 1;
uint32_t random32() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return uint32_t(state >> 32);
}

constexpr size_t kWidth[] = {4, 2, 2, 8};
const char* const kNames[] = {"f32", "bf16", "f16", "f64"};

double value(DType dtype, const unsigned char* p) {
  uint16_t half;
  float single;
  double twice;
  std::memcpy(&half, p, 2);
  switch (dtype) {
    case DType::bf16:
      return double(widen(bf16{half}));
    case DType::f16:
      return double(widen(f16{half}));
    case DType::f32:
      std::memcpy(&single, p, 4);
      return double(single);
    default:
      std::memcpy(&twice, p, 8);
      return twice;
  }
}

// Elements of any bits (NaN, infinite, subnormal, huge, tiny), or, if tame, ordinary ones. It starts at an odd element.
struct Elements {
  DType dtype;
  std::vector<unsigned char> bytes;
  Elements(DType type, size_t count, bool tame) : dtype(type), bytes((count + 1) * width()) {
    for (unsigned char& b : bytes) b = uint8_t(random32() >> 24);
    for (size_t i = 0; tame && i <= count; ++i) {
      const float x = (float(random32() >> 8) * 0x1p-23f - 1.0f) * (random32() % 8 ? 1.0f : 60.0f);
      unsigned char* p = bytes.data() + i * width();
      const double twice = double(x);
      if (dtype == DType::f32) std::memcpy(p, &x, 4);
      if (dtype == DType::bf16) narrow(x, reinterpret_cast<bf16*>(p));
      if (dtype == DType::f16) narrow(x, reinterpret_cast<f16*>(p));
      if (dtype == DType::f64) std::memcpy(p, &twice, 8);
    }
  }
  size_t width() const { return kWidth[int(dtype)]; }
  unsigned char* data() { return bytes.data() + width(); }
};

void fail(const Rows& rows, const char* what, DType dtype, int64_t count, int64_t at, double got, double wanted) {
  std::printf("%s: %s of %ld %s, element %ld: %g, not %g\n", rows.isa, what, long(count), kNames[int(dtype)], long(at),
              got, wanted);
  std::exit(1);
}

// tolerance 0: the same bits.
void expect(const Rows& rows, const char* what, DType dtype, int64_t count, const unsigned char* got,
            const unsigned char* wanted, double tolerance = 0) {
  const size_t width = kWidth[int(dtype)];
  for (int64_t i = 0; i < count; ++i, got += width, wanted += width) {
    if (std::memcmp(got, wanted, width) == 0) continue;
    const double a = value(dtype, got), b = value(dtype, wanted);
    if (std::isnan(a) && std::isnan(b)) continue;
    if (tolerance > 0 && std::abs(a - b) <= tolerance * std::max(std::abs(b), 1e-3)) continue;
    fail(rows, what, dtype, count, i, a, b);
  }
}

// A result with a margin on both sides that must stay as it is, at a place `shift` elements off a cache line.
struct Result {
  std::vector<unsigned char> bytes;
  size_t begin, end;
  Result(size_t wanted, size_t shift) : bytes(wanted + 256, 0xa5) {
    begin = 128 - (reinterpret_cast<uintptr_t>(bytes.data()) & 63) + shift;
    end = begin + wanted;
  }
  unsigned char* data() { return bytes.data() + begin; }
  bool margins() const {
    for (size_t i = 0; i < bytes.size(); ++i)
      if ((i < begin || i >= end) && bytes[i] != 0xa5) return false;
    return true;
  }
};

void sums(const Rows& rows, DType dtype, int64_t count, int n, bool tame) {
  const size_t width = kWidth[int(dtype)];
  std::vector<Elements> sources;
  std::vector<const void*> from;
  for (int k = 0; k < n; ++k) sources.emplace_back(dtype, size_t(count), tame);
  for (Elements& s : sources) from.push_back(s.data());
  Result wanted(size_t(count) * width, 0);
  rows_for("scalar").reduce(dtype, wanted.data(), from.data(), n, count, false);
  for (const bool stream : {false, true}) {
    Result got(size_t(count) * width, width * (random32() % 8));
    rows.reduce(dtype, got.data(), from.data(), n, count, stream);
    stream_fence();
    expect(rows, stream ? "streamed sum" : "sum", dtype, count, got.data(), wanted.data());
    if (!got.margins()) fail(rows, "writes past a sum", dtype, count, -1, 0, 0);
    // Over its first source, as a call in place does.
    std::vector<unsigned char> keep(sources[0].data(), sources[0].data() + size_t(count) * width);
    rows.reduce(dtype, sources[0].data(), from.data(), n, count, stream);
    stream_fence();
    expect(rows, "sum in place", dtype, count, sources[0].data(), wanted.data());
    std::memcpy(sources[0].data(), keep.data(), keep.size());
  }
}

void weighted_sums(const Rows& rows, DType dtype, int64_t count, int n, bool tame) {
  const size_t bytes = size_t(count) * kWidth[int(dtype)];
  std::vector<Elements> sources;
  std::vector<const void*> from;
  std::vector<float> weights;
  for (int k = 0; k < n; ++k) sources.emplace_back(dtype, size_t(count), tame);
  for (Elements& s : sources) {
    from.push_back(s.data());
    weights.push_back(float(random32() >> 8) * 0x1p-24f);
  }
  Result wanted(bytes, 0), got(bytes, kWidth[int(dtype)] * (random32() % 8));
  rows_for("scalar").weighted(dtype, wanted.data(), from.data(), weights.data(), n, count);
  rows.weighted(dtype, got.data(), from.data(), weights.data(), n, count);
  expect(rows, "weighted sum", dtype, count, got.data(), wanted.data());
  if (!got.margins()) fail(rows, "writes past a weighted sum", dtype, count, -1, 0, 0);
}

void norms(const Rows& rows, DType dtype, int64_t height, int64_t width, bool tame) {
  const size_t count = size_t(height * width), bytes = count * kWidth[int(dtype)];
  Elements delta(dtype, count, tame), residual(dtype, count, tame), weight(dtype, size_t(width), tame);
  Result residual_wanted(bytes, 0), normed_wanted(bytes, 0), residual_got(bytes, 0), normed_got(bytes, 0);
  const auto run = [&](const Rows& which, Result& r, Result& n) {
    which.add_norm(dtype, r.data(), n.data(), delta.data(), residual.data(), weight.data(), height, width, 1e-6);
  };
  run(rows_for("scalar"), residual_wanted, normed_wanted);
  run(rows, residual_got, normed_got);
  expect(rows, "residual", dtype, int64_t(count), residual_got.data(), residual_wanted.data());
  if (!residual_got.margins() || !normed_got.margins())
    fail(rows, "writes past a norm", dtype, int64_t(count), -1, 0, 0);
  // Of any bits only the residual is the same: in a sum of huge squares the order decides what overflows.
  if (!tame) return;
  const double tolerance = dtype == DType::f64    ? 1e-12
                           : dtype == DType::f32  ? 1e-5
                           : dtype == DType::bf16 ? 0x1p-6
                                                  : 0x1p-9;  // two roundings
  expect(rows, "norm", dtype, int64_t(count), normed_got.data(), normed_wanted.data(), tolerance);
}

// Every value there is, alone: what loads and stores do to it.
void conversions(const Rows& rows, DType dtype) {
  std::vector<uint16_t> all(1 << 16), got(1 << 16), wanted(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = uint16_t(i);
  const void* from[] = {all.data()};
  rows_for("scalar").reduce(dtype, wanted.data(), from, 1, 1 << 16, false);
  rows.reduce(dtype, got.data(), from, 1, 1 << 16, false);
  expect(rows, "conversion", dtype, 1 << 16, reinterpret_cast<unsigned char*>(got.data()),
         reinterpret_cast<unsigned char*>(wanted.data()));
  expect(rows, "round trip", dtype, 1 << 16, reinterpret_cast<unsigned char*>(got.data()),
         reinterpret_cast<unsigned char*>(all.data()));
}

void copies(const Rows& rows) {
  for (size_t bytes = 0; bytes < 700; ++bytes) {
    Elements from(DType::bf16, bytes, false);
    Result got(bytes, 0);
    rows.copy_stream(got.data(), from.data(), int64_t(bytes));
    stream_fence();
    if (std::memcmp(got.data(), from.data(), bytes) || !got.margins())
      fail(rows, "copy", DType::f32, int64_t(bytes), 0, 0, 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  planted::fault = argc > 2 ? std::atoi(argv[2]) : 0;
  const std::string only = argc > 3 ? argv[3] : "";
  for (const char* isa : {"scalar", "avx2", "avx512", "neon"}) {
    if (!only.empty() && only != isa) continue;
    const Rows* rows;
    try {
      rows = &rows_for(isa);
    } catch (const std::invalid_argument&) {
      continue;
    }
    copies(*rows);
    for (const DType dtype : {DType::bf16, DType::f16}) conversions(*rows, dtype);
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64})
      for (int round = 0; round < rounds; ++round)
        for (const bool tame : {false, true}) {
          for (int n = 1; n <= 6; ++n) {
            sums(*rows, dtype, round < 70 ? round : int64_t(random32() % 300), n, tame);
            sums(*rows, dtype, int64_t(random32() % 5000), n, tame);
            if (dtype != DType::f64) weighted_sums(*rows, dtype, int64_t(random32() % 300), n, tame);
          }
          norms(*rows, dtype, int64_t(random32() % 4), 1 + int64_t(random32() % 200), tame);
          norms(*rows, dtype, 2, 1 + round, tame);
        }
    std::printf("%s\n", isa);
  }
  return 0;
}
