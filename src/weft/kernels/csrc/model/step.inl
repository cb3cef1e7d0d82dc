// Bindings of a decode step that is recorded: its inputs, its samples, and the record. Part of model.cc.

namespace weft::model {
namespace {

const int32_t* ints_of(TensorView x, int dims) {
  check(x.ndim() == dims && x.dtype().code == kDLInt && x.dtype().bits == 32 && x.IsContiguous() &&
            x.device().device_type == kDLCPU,
        "contiguous int32");
  return static_cast<const int32_t*>(x.data_ptr());
}
int32_t* filled(TensorView x, int dims) { return const_cast<int32_t*>(ints_of(x, dims)); }

int64_t* longs(TensorView x, int dims) {
  check(x.ndim() == dims && x.dtype().code == kDLInt && x.dtype().bits == 64 && x.IsContiguous(), "contiguous int64");
  return static_cast<int64_t*>(x.data_ptr());
}

// As torch.argmax: a NaN is greater than all numbers, and the first of equals is greatest.
bool greater(float x, float than) { return x > than || (x != x && than == than); }

template <class T>
void best_of(const T* x, int64_t count, float first, float* out) {
  constexpr int64_t kBlock = 256, kLanes = 16;
  float best = widen(x[0]);
  int64_t at = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    float top[kLanes], sum[kLanes] = {};  // the sum is NaN if a number is, or if infinities have both signs
    std::fill_n(top, kLanes, -INFINITY);
    int64_t i = begin;
    for (; i + kLanes <= std::min(count, begin + kBlock); i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const float value = widen(x[i + lane]);
        top[lane] = value > top[lane] ? value : top[lane], sum[lane] += value;
      }
    bool looks = i < std::min(count, begin + kBlock);
    for (int64_t lane = 0; lane < kLanes; ++lane) looks |= greater(top[lane], best) || sum[lane] != sum[lane];
    for (i = begin; looks && i < std::min(count, begin + kBlock); ++i)
      if (greater(widen(x[i]), best)) best = widen(x[i]), at = i;
  }
  out[0] = best, out[1] = first + float(at);
}

Recorder& recorder_of(int64_t handle) { return *reinterpret_cast<Recorder*>(handle); }

}  // namespace

// Fills out float32 [rows, 2] with the greatest of each row of x [rows, n], and its place + first.
void best(TensorView x, int64_t first, TensorView out, int64_t threads) {
  const DType dtype = dtype_of(x);
  check_tensor(x, dtype, 2, "rows of two dimensions"), check_tensor(out, DType::f32, 2, "float32 results");
  check(out.size(0) == x.size(0) && out.size(1) == 2 && out.IsContiguous() && x.size(1) > 0, "matching shapes");
  parallel(int(threads), x.size(0), [&](int64_t row) {
    float* to = static_cast<float*>(out.data_ptr()) + 2 * row;
    const auto in = [&](auto type) {
      best_of(static_cast<const decltype(type)*>(x.data_ptr()) + row * x.strides()[0], x.size(1), float(first), to);
    };
    dtype == DType::f32 ? in(float()) : dtype == DType::bf16 ? in(bf16()) : in(f16());
  });
}

// See weft.engine.kernels.triton.decode_step.step_in.
void step_in(TensorView rows, TensorView places, TensorView drafts, TensorView live, TensorView last_token,
             TensorView length, TensorView entries, TensorView steps, TensorView pieces, TensorView tokens,
             TensorView positions, TensorView lengths, TensorView found, TensorView slots, int64_t page_size, int64_t) {
  const int64_t capacity = rows.size(0), width = entries.size(1);
  const int32_t *row_of = ints_of(rows, 1), *place = ints_of(places, 1), *draft = ints_of(drafts, 1);
  const int32_t *last = ints_of(last_token, 1), *held = ints_of(length, 1);
  const int32_t *tables = ints_of(entries, 2), *piece = ints_of(pieces, 2), count = *ints_of(live, 1);
  check(tokens.size(0) == capacity && positions.size(0) == capacity && lengths.size(0) == capacity &&
            found.size(0) == capacity && found.size(1) == width && slots.size(2) == capacity && count <= capacity,
        "matching shapes");
  *filled(steps, 1) += 1;
  for (int64_t i = 0; i < capacity; ++i) {
    const bool real = i < count;
    const int64_t row = real ? row_of[i] : 0, position = real ? held[row] + place[i] : 0, page = position / page_size;
    longs(tokens, 1)[i] = real ? std::max(0, place[i] ? draft[i] : last[row]) : 0;
    longs(positions, 1)[i] = position;
    filled(lengths, 1)[i] = real ? int32_t(position + 1) : 0;
    for (const int32_t* p = piece; p < piece + 5 * pieces.size(0); p += 5) {
      const int32_t* table = tables + row * width + p[2];
      int64_t *slot = longs(slots, 3) + 2 * p[0] * capacity + i, end = std::min<int64_t>(p[3], page + 1);
      if (p[1]) {
        slot[0] = real ? table[0] : -1, slot[capacity] = real ? table[1] : -1;
        continue;
      }
      if (real && end > p[4]) std::copy(table + p[4], table + end, filled(found, 2) + i * width + p[2] + p[4]);
      const int32_t own = real && page < p[3] ? table[page] : -1;
      if (p[4] == 0) slot[0] = own < 0 ? -1 : own * page_size + position % page_size;
    }
  }
}

// See weft.engine.kernels.triton.decode_step.step_out.
void step_out(TensorView rows, TensorView live, TensorView decode_rows, TensorView candidates, TensorView lengths,
              TensorView last_token, TensorView length, TensorView tokens, TensorView steps, TensorView ring, int64_t) {
  const int64_t capacity = rows.size(0), count = *ints_of(live, 1), place = *ints_of(steps, 1) % ring.size(0);
  check_tensor(candidates, DType::f32, 3, "float32 candidates");
  check(candidates.size(1) == capacity && candidates.size(2) == 2 && candidates.IsContiguous() && count <= capacity &&
            lengths.size(0) == capacity && tokens.size(0) >= capacity && ring.size(1) >= capacity,
        "matching shapes");
  for (int64_t i = 0; i < capacity; ++i) {
    if (i >= count) {
      filled(tokens, 1)[i] = -1;
      continue;
    }
    const float* best = static_cast<const float*>(candidates.data_ptr()) + 2 * i;
    for (int64_t rank = 1; rank < candidates.size(0); ++rank) {
      const float* other = static_cast<const float*>(candidates.data_ptr()) + 2 * (rank * capacity + i);
      if (greater(other[0], best[0])) best = other;
    }
    const int64_t row = ints_of(rows, 1)[i];
    int32_t& last = filled(last_token, 1)[row];
    last = i < *ints_of(decode_rows, 1) && last < 0 ? -1 : int32_t(best[1]);
    filled(length, 1)[row] = ints_of(lengths, 1)[i];
    filled(tokens, 1)[i] = filled(ring, 2)[place * ring.size(1) + i] = last;
  }
}

int64_t recorder() { return reinterpret_cast<int64_t>(new Recorder); }
void forget_recorder(int64_t handle) { delete &recorder_of(handle); }

// Bytes of memory that the recorder holds.
int64_t recorder_bytes(int64_t handle) { return recorder_of(handle).memory->total(); }

// A tensor [elements] in the recorder's memory. like: gives the dtype.
ffi::Tensor recorder_empty(int64_t handle, int64_t elements, TensorView like) {
  const DLDevice cpu{kDLCPU, 0};
  return ffi::Tensor::FromNDAlloc(Piece{recorder_of(handle).memory}, ffi::ShapeView(&elements, 1), like.dtype(), cpu);
}

// Notes a call, and returns its number.
int64_t note(int64_t handle, ffi::Function function, ffi::Array<ffi::Any> arguments, MaybeTensor result) {
  auto& calls = recorder_of(handle).calls;
  calls.push_back(std::make_unique<RecordedCall>(std::move(function), arguments, result));
  return int64_t(calls.size()) - 1;
}

// Makes calls begin … end − 1 again.
void repeat(int64_t handle, int64_t begin, int64_t end) {
  const auto& calls = recorder_of(handle).calls;
  for (int64_t i = begin; i < end; ++i) calls[size_t(i)]->repeat();
}

}  // namespace weft::model

TVM_FFI_DLL_EXPORT_TYPED_FUNC(best, weft::model::best)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(step_in, weft::model::step_in)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(step_out, weft::model::step_out)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(recorder, weft::model::recorder)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forget_recorder, weft::model::forget_recorder)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(recorder_bytes, weft::model::recorder_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(recorder_empty, weft::model::recorder_empty)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(note, weft::model::note)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(repeat, weft::model::repeat)
