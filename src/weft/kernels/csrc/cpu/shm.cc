// The bindings of the shared-memory exchange: they check tensors, allocate results, and name errors.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <optional>

#include "merge.h"
#include "plan.h"

namespace ffi = tvm::ffi;
using ffi::TensorView;
using Sizes = ffi::Array<int64_t>;

namespace weft {
namespace {

constexpr int kMaxDims = 8;

struct World {
  std::unique_ptr<Exchange<>> exchange;
  const Rows* rows;
  std::vector<std::unique_ptr<Plan>> plans;
  std::vector<Part> parts;  // of the current call
};

// A tensor's memory. It keeps the segment mapped, so that tensors outlive their transport.
struct PoolBlock {
  std::shared_ptr<Arena> arena;
  void AllocData(DLTensor* tensor) { tensor->data = arena->pool().take(int64_t(ffi::GetDataSize(*tensor))); }
  void FreeData(DLTensor* tensor) { arena->pool().give(tensor->data); }
};

World& world_of(int64_t handle) { return *reinterpret_cast<World*>(handle); }

ffi::Tensor new_tensor(World& w, ffi::ShapeView shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(PoolBlock{w.exchange->shared_arena()}, shape, dtype, DLDevice{kDLCPU, 0});
}

// The errors of a call, by the names that build.py registers. They carry no back-trace of native code: a process's
// first one costs more than half a second, while the other ranks wait.
template <class F>
auto guarded(F&& run) -> decltype(run()) {
  try {
    return run();
  } catch (const PeerLostError& lost) {
    throw ffi::Error("WeftPeerLost", lost.what(), "");
  } catch (const TimeoutError& late) {
    throw ffi::Error("WeftTimeout", late.what(), "");
  } catch (const std::runtime_error& error) {
    throw ffi::Error("WeftCallError", error.what(), "");
  } catch (const std::invalid_argument& error) {
    throw ffi::Error("WeftCallError", error.what(), "");
  }
}

void interrupt() {
  if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
}

int64_t width_of(TensorView x) {
  int64_t n = 1;
  for (int i = 1; i < x.ndim(); ++i) n *= x.size(i);
  return n;
}

// Sums need to know the element type; other exchanges move bytes.
DType summable(DLDataType t) {
  if (t.lanes == 1) {
    if (t.code == kDLFloat && t.bits == 32) return DType::f32;
    if (t.code == kDLBfloat && t.bits == 16) return DType::bf16;
    if (t.code == kDLFloat && t.bits == 16) return DType::f16;
    if (t.code == kDLFloat && t.bits == 64) return DType::f64;
  }
  // tvm-ffi has no name for complex numbers.
  const std::string name =
      t.code == kDLComplex ? "complex" + std::to_string(t.bits) : std::string(ffi::DLDataTypeToString(t));
  throw CallError("sums take float32, bfloat16, float16 or float64, not " + name);
}

// Signature of an epilogue's call: ranks with another eps make another call.
uint32_t eps_signature(uint32_t signature, double eps) {
  uint64_t bits;
  std::memcpy(&bits, &eps, sizeof bits);
  return mix(signature, bits);
}

// A call of a plan on a tensor, checked.
struct Setup {
  World& w;
  const Plan& plan;
  TensorView x;
  int64_t rows, width;
  Call call;

  Setup(World& world, int64_t id, TensorView input, bool norm)
      : w(world), plan(*world.plans[size_t(id - 1)]), x(input), width(width_of(input)) {
    if (x.ndim() < 1 || x.ndim() > kMaxDims || x.device().device_type != kDLCPU)
      throw CallError("a collective takes a CPU tensor of one to eight dimensions");
    if (!x.IsContiguous()) throw CallError("a collective takes a contiguous tensor");
    rows = x.size(0);
    if (rows != plan.input_rows(rows))
      throw CallError("a tensor of " + std::to_string(rows) + " rows where the sizes say " +
                      std::to_string(plan.input_rows(rows)));
    const DLDataType t = x.dtype();
    call.element = (t.bits * t.lanes + 7) / 8;
    if (plan.sums()) call.dtype = summable(t);
    call.x = static_cast<const char*>(x.data_ptr());
    plan.lay_out(call, w.parts, rows, width, norm, w.exchange->tuning);
    call.signature = mix(call.signature, uint64_t(t.code) << 8 | t.bits);
  }

  // Memory for `copies` results one after the other; more than one get a dimension of their own.
  ffi::Tensor result(int64_t copies) {
    int64_t shape[2 + kMaxDims] = {copies, plan.result_rows(rows)};
    const size_t dims = size_t(x.ndim());
    for (size_t i = 1; i < dims; ++i) shape[i + 1] = x.size(int(i));
    return new_tensor(w, copies == 1 ? ffi::ShapeView(shape + 1, dims) : ffi::ShapeView(shape, dims + 1), x.dtype());
  }
};

}  // namespace

// groups: all groups of the world, the same list on all ranks. pidfds: of each rank's process, -1 for none.
// tuning: the numbers of Tuning, in order.
int64_t create(int64_t fd, int64_t world, int64_t rank, ffi::Array<ffi::Array<int64_t>> groups, int64_t slot_bytes,
               int64_t blocks, int64_t block_bytes, Sizes pidfds, int64_t spins, double timeout_s, Sizes tuning,
               ffi::String isa) {
  return guarded([&] {
    Layout layout;
    layout.world = int(world);
    layout.slot_bytes = slot_bytes;
    layout.blocks = blocks;
    layout.block_bytes = block_bytes;
    for (const auto& group : groups) layout.groups.emplace_back(group.begin(), group.end());
    if (world > kMaxRanks || int(layout.groups.size()) > kMaxGroups)
      throw CallError("at most 16 ranks and 64 groups share an arena");
    auto arena = std::make_shared<Arena>(int(fd), layout, int(rank));
    Waiter waiter;
    waiter.spins = int(spins);
    waiter.timeout_s = timeout_s;
    waiter.lost = &arena->header().lost;
    waiter.interrupt = interrupt;
    for (const int64_t pidfd : pidfds) waiter.peers.push_back(pollfd{int(pidfd), POLLIN, 0});
    auto w = std::make_unique<World>();
    w->rows = &rows_for(std::string(isa));
    w->exchange = std::make_unique<Exchange<>>(arena, *w->rows, std::move(waiter));
    w->exchange->tuning = Tuning{tuning[0], tuning[1], tuning[2], tuning[3], tuning[4]};
    return reinterpret_cast<int64_t>(w.release());
  });
}

// Bytes of the segment of such a world; it is sparse.
int64_t arena_bytes(int64_t world, int64_t groups, int64_t slot_bytes, int64_t blocks, int64_t block_bytes) {
  Layout layout;
  layout.world = int(world);
  layout.slot_bytes = slot_bytes;
  layout.blocks = blocks;
  layout.block_bytes = block_bytes;
  layout.groups.resize(size_t(groups));
  return layout.bytes();
}

void destroy(int64_t handle) { delete &world_of(handle); }

ffi::String isa(int64_t handle) { return world_of(handle).rows->isa; }

// A tensor in this rank's part of the arena. like: gives the dtype.
ffi::Tensor empty(int64_t handle, Sizes shape, TensorView like) {
  return guarded([&] {
    const std::vector<int64_t> sizes(shape.begin(), shape.end());
    return new_tensor(world_of(handle), ffi::ShapeView(sizes.data(), sizes.size()), like.dtype());
  });
}

// Maximum number of blocks of this rank's pool in use at once.
int64_t peak_blocks(int64_t handle) { return int64_t(world_of(handle).exchange->arena().pool().peak()); }

// For benchmarks: the reads, sums and writes of a collective, from tensors at known places in the arena, without
// synchronisation. The rest of a collective's time is its protocol.
int64_t offset_of(int64_t handle, TensorView x) { return world_of(handle).exchange->arena().offset(x.data_ptr()); }

void direct_sum(int64_t handle, TensorView out, Sizes offsets, int64_t begin, int64_t count) {
  guarded([&] {
    World& w = world_of(handle);
    const int64_t element = (out.dtype().bits + 7) / 8;
    const void* from[kMaxRanks];
    for (size_t i = 0; i < offsets.size(); ++i) from[i] = w.exchange->arena().at(offsets[i] + begin * element);
    char* to = static_cast<char*>(out.data_ptr()) + begin * element;
    if (offsets.size() == 1)
      std::memcpy(to, from[0], size_t(count * element));
    else
      w.rows->reduce(summable(out.dtype()), to, from, int(offsets.size()), count,
                     count * element >= w.exchange->tuning.stream_out_bytes);
  });
}

// Checks whether a rank is gone.
void check(int64_t handle) {
  guarded([&] { world_of(handle).exchange->waiter().look_around(); });
}

void barrier(int64_t handle, int64_t group) {
  guarded([&] { world_of(handle).exchange->barrier(int(group)); });
}

// A collective's plan, by the number, from 1 on, that names it in calls; see Plan.
int64_t prepare(int64_t handle, int64_t group, bool permute, bool sums, Sizes parts) {
  return guarded([&] {
    World& w = world_of(handle);
    const Ranks& ranks = w.exchange->arena().layout().groups[size_t(group)];
    const auto me = std::find(ranks.begin(), ranks.end(), w.exchange->arena().rank());
    if (me == ranks.end()) throw CallError("this rank is not in the group");
    w.plans.push_back(std::make_unique<Plan>(int(group), int(me - ranks.begin()), permute, sums,
                                             std::vector<int64_t>(parts.begin(), parts.end())));
    return int64_t(w.plans.size());
  });
}

// Forgets all plans but these. Numbers of kept plans stay.
void forget(int64_t handle, Sizes kept) {
  auto& plans = world_of(handle).plans;
  if (kept.empty()) return plans.clear();
  for (size_t i = 0; i < plans.size(); ++i)
    if (std::find(kept.begin(), kept.end(), int64_t(i) + 1) == kept.end()) plans[i].reset();
}

ffi::Tensor run(Setup&& s) {
  ffi::Tensor out = s.result(1);
  s.call.out = static_cast<char*>(out.data_ptr());
  s.w.exchange->run(s.call);
  return out;
}

ffi::Tensor exchange(int64_t handle, int64_t plan, TensorView x) {
  return guarded([&] { return run(Setup(world_of(handle), plan, x, false)); });
}

// A sum that each rank's caller normalises with this eps.
ffi::Tensor exchange_for_norm(int64_t handle, int64_t plan, TensorView x, double eps) {
  return guarded([&] {
    Setup s(world_of(handle), plan, x, false);
    s.call.signature = eps_signature(s.call.signature, eps);
    return run(std::move(s));
  });
}

// The result lies over the input: no other memory is allocated where peers can see it.
void exchange_in_place(int64_t handle, int64_t plan, TensorView x) {
  guarded([&] {
    Setup s(world_of(handle), plan, x, false);
    if (!s.plan.in_place()) throw CallError("its result has other rows than its input, or at other places");
    s.call.out = static_cast<char*>(x.data_ptr());
    if (!s.call.two_shot || s.w.exchange->arena().pool().holds(x.data_ptr())) return s.w.exchange->run(s.call);
    const ffi::Tensor shared = s.result(1);  // in two shots peers read this rank's share of the result
    s.call.shared = static_cast<char*>(shared.data_ptr());
    s.w.exchange->run(s.call);
  });
}

// Fills own [tokens, heads / ranks, dim] and own_lse with this rank's heads of out [tokens, heads, dim] and lse, merged
// over the group; see MergeCall. tag: the same on all ranks. Checked by the caller: the shapes, that dim is dense in out, and own and own_lse
// whole.
void merge(int64_t handle, int64_t group, TensorView out, TensorView lse, TensorView own, TensorView own_lse,
           int64_t tag) {
  guarded([&] {
    const DLDataType t = out.dtype();
    const auto stride = [](TensorView x, size_t i) { return x.strides()[i]; };
    MergeCall c;
    c.group = int(group);
    c.dtype = summable(t);
    if (c.dtype == DType::f64) throw CallError("merges take float32, bfloat16 or float16, not float64");
    c.element = (t.bits + 7) / 8;
    c.tokens = out.size(0), c.heads = out.size(1), c.dim = out.size(2);
    c.out = static_cast<const char*>(out.data_ptr());
    c.out_token = stride(out, 0) * c.element, c.out_head = stride(out, 1) * c.element;
    c.lse = static_cast<const float*>(lse.data_ptr());
    c.lse_token = stride(lse, 0), c.lse_head = stride(lse, 1);
    c.own = static_cast<char*>(own.data_ptr());
    c.own_lse = static_cast<float*>(own_lse.data_ptr());
    for (const int64_t said : {int64_t(3), c.tokens, c.heads, c.dim, int64_t(t.code) << 8 | t.bits, tag})
      c.signature = mix(c.signature, uint64_t(said));
    world_of(handle).exchange->run(c);
  });
}

// Returns [2, rows, …]: the residual with the result added, and its RMSNorm.
ffi::Tensor exchange_norm(int64_t handle, int64_t plan, TensorView x, TensorView residual, TensorView weight,
                          double eps) {
  return guarded([&] {
    Setup s(world_of(handle), plan, x, true);
    const auto same = [&](TensorView t) {
      return t.dtype().code == x.dtype().code && t.dtype().bits == x.dtype().bits && t.IsContiguous();
    };
    if (!same(residual) || !same(weight) || weight.ndim() != 1 || weight.size(0) != s.width || residual.ndim() < 1 ||
        residual.size(0) != s.plan.result_rows(s.rows) || width_of(residual) != s.width)
      throw CallError("residual [rows, width] and weight [width] must be contiguous, of the input's dtype and width");
    const ffi::Tensor delta = s.result(1);
    ffi::Tensor both = s.result(2);
    Finish f;
    f.residual = residual.data_ptr();
    f.weight = weight.data_ptr();
    f.residual_out = both.data_ptr();
    f.normed = static_cast<char*>(both.data_ptr()) + s.call.bytes;
    f.width = s.width;
    f.eps = eps;
    s.call.out = static_cast<char*>(delta.data_ptr());
    s.call.finish = &f;
    s.call.row = std::max<int64_t>(1, s.width);
    s.call.signature = eps_signature(s.call.signature, eps);
    s.w.exchange->run(s.call);
    return both;
  });
}

}  // namespace weft

TVM_FFI_DLL_EXPORT_TYPED_FUNC(create, weft::create)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(arena_bytes, weft::arena_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(destroy, weft::destroy)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa, weft::isa)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(empty, weft::empty)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peak_blocks, weft::peak_blocks)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(offset_of, weft::offset_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(direct_sum, weft::direct_sum)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, weft::check)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(barrier, weft::barrier)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, weft::prepare)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forget, weft::forget)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(exchange, weft::exchange)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(exchange_in_place, weft::exchange_in_place)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(exchange_for_norm, weft::exchange_for_norm)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(exchange_norm, weft::exchange_norm)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, weft::merge)
