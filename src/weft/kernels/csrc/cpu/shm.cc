// Python's door to the shared-memory exchange: checks the tensors, lays out the parts of each call, allocates results.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <numeric>

#include "exchange.h"

namespace ffi = tvm::ffi;
using ffi::TensorView;
using Sizes = ffi::Array<int64_t>;

namespace weft {
namespace {

constexpr int kMaxDims = 8;

enum Kind : uint32_t { kAllReduce = 1, kReduceScatter, kAllGather, kAllToAll, kBroadcast, kGatherMixed, kScatterMixed };

struct World {
  std::unique_ptr<Exchange<>> exchange;
  const Rows* rows;
  std::vector<Part> parts;  // of the call under way
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

// The errors of a call as Python sees them, by the names that build.py registers. They carry no back-trace of native
// code: the first one of a process would take more than half a second, in which the other ranks wait.
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

int64_t elements(TensorView x) {
  int64_t n = 1;
  for (int i = 0; i < x.ndim(); ++i) n *= x.size(i);
  return n;
}
int64_t width_of(TensorView x) {
  int64_t n = 1;
  for (int i = 1; i < x.ndim(); ++i) n *= x.size(i);
  return n;
}

// Sums need to know the numbers; what is only moved is bytes.
DType summable(DLDataType t) {
  if (t.lanes == 1) {
    if (t.code == kDLFloat && t.bits == 32) return DType::f32;
    if (t.code == kDLBfloat && t.bits == 16) return DType::bf16;
    if (t.code == kDLFloat && t.bits == 16) return DType::f16;
    if (t.code == kDLFloat && t.bits == 64) return DType::f64;
  }
  throw CallError("sums take float32, bfloat16, float16 or float64, not " + std::string(ffi::DLDataTypeToString(t)));
}

uint32_t mix(uint32_t hash, uint64_t value) {
  const uint64_t mixed = (hash ^ value) * 0x9e3779b97f4a7c15ull;
  return uint32_t(mixed >> 32) | 1;
}

struct Setup {
  World& w;
  Call call;
  const Ranks& ranks;
  int me, n;
  uint32_t all;

  Setup(World& world, int64_t group, Kind kind, TensorView x, bool sums)
      : w(world), ranks(world.exchange->arena().layout().groups[size_t(group)]) {
    n = int(ranks.size());
    all = uint32_t((uint64_t(1) << n) - 1);
    me = int(std::find(ranks.begin(), ranks.end(), w.exchange->arena().rank()) - ranks.begin());
    if (x.ndim() < 1 || x.ndim() > kMaxDims || x.device().device_type != kDLCPU)
      throw CallError("a collective takes a CPU tensor of one to eight dimensions");
    if (!x.IsContiguous()) throw CallError("a collective takes a contiguous tensor");
    call.group = int(group);
    call.sums = sums;
    const DLDataType t = x.dtype();
    call.element = (t.bits * t.lanes + 7) / 8;
    if (sums) call.dtype = summable(t);
    call.x = static_cast<const char*>(x.data_ptr());
    call.signature = mix(mix(kind, uint64_t(t.code) << 8 | t.bits), uint64_t(width_of(x)));
    w.parts.clear();
    call.parts = &w.parts;
  }

  void sign(uint64_t value) { call.signature = mix(call.signature, value); }

  void expect_rows(TensorView x, int64_t rows) const {
    if (x.size(0) != rows)
      throw CallError("a tensor of " + std::to_string(x.size(0)) + " rows where the sizes say " + std::to_string(rows));
  }

  // Allocates the result and runs. finish: [residual, weight] or none.
  ffi::Tensor run(TensorView x, int64_t rows, const Finish* given = nullptr) {
    int64_t shape[2 + kMaxDims] = {2, rows};  // of residual and normed rows together; past the 2, of either
    const size_t dims = size_t(x.ndim());
    for (size_t i = 1; i < dims; ++i) shape[i + 1] = x.size(int(i));
    ffi::Tensor out = new_tensor(w, ffi::ShapeView(shape + 1, dims), x.dtype());
    call.out = static_cast<char*>(out.data_ptr());
    call.bytes = rows * width_of(x) * call.element;
    if (!given) {
      w.exchange->run(call);
      return out;
    }
    ffi::Tensor both = new_tensor(w, ffi::ShapeView(shape, dims + 1), x.dtype());
    Finish finish = *given;
    finish.width = width_of(x);
    finish.residual_out = both.data_ptr();
    finish.normed = static_cast<char*>(both.data_ptr()) + call.bytes;
    call.finish = &finish;
    call.row = std::max<int64_t>(1, finish.width);
    w.exchange->run(call);
    return both;
  }
};

// The i-th of n even shares of `rows` rows, each of `width` elements: [begin, end) in elements.
std::pair<int64_t, int64_t> share(int64_t rows, int64_t width, int i, int n) {
  const int64_t each = rows / n, more = rows % n;
  const int64_t begin = each * i + std::min<int64_t>(i, more);
  return {begin * width, (begin + each + (i < more)) * width};
}

int64_t sum(const Sizes& sizes) {
  int64_t total = 0;
  for (const int64_t n : sizes) {
    if (n < 0) throw CallError("a negative number of rows");
    total += n;
  }
  return total;
}

void expect_sizes(const Sizes& sizes, int64_t ranks) {
  if (int64_t(sizes.size()) != ranks)
    throw CallError(std::to_string(sizes.size()) + " sizes for " + std::to_string(ranks) + " ranks");
}

Finish finish_of(TensorView x, int64_t rows, TensorView residual, TensorView weight, double eps) {
  const auto same = [&](TensorView t) {
    return t.dtype().code == x.dtype().code && t.dtype().bits == x.dtype().bits && t.IsContiguous();
  };
  if (x.dtype().bits == 64) throw CallError("the norm epilogue takes float32, bfloat16 or float16, not float64");
  if (!same(residual) || !same(weight) || elements(weight) != width_of(x) || residual.size(0) != rows ||
      width_of(residual) != width_of(x))
    throw CallError("residual [rows, width] and weight [width] must be contiguous, of the input's dtype and width");
  Finish f;
  f.residual = residual.data_ptr();
  f.weight = weight.data_ptr();
  f.eps = float(eps);
  return f;
}

using MaybeNorm = std::optional<std::pair<TensorView, TensorView>>;

// The parts of an all_reduce. norm: whole rows go on to it.
void lay_out_all_reduce(Setup& s, TensorView x, bool norm) {
  World& w = s.w;
  const int64_t count = elements(x), width = width_of(x);
  s.sign(uint64_t(x.size(0)));
  s.sign(norm);
  s.call.two_hops = count * s.call.element > w.exchange->tuning.two_hop_bytes;
  if (!s.call.two_hops) {
    w.parts.push_back(Part{0, 0, count, s.all, s.all, 0, 0});
  } else {
    s.call.lanes = s.n;
    // Shares of whole rows where rows go on to the norm, else of cache lines.
    const int64_t unit = norm ? width : 64, units = (count + unit - 1) / unit;
    for (int i = 0; i < s.n; ++i) {
      const auto [begin, end] = share(units, unit, i, s.n);
      if (begin < count) w.parts.push_back(Part{begin, begin, std::min(end, count) - begin, s.all, s.all, i, i});
    }
  }
}

ffi::Tensor all_reduce_impl(int64_t handle, int64_t group, TensorView x, const MaybeNorm& norm, double eps) {
  Setup s(world_of(handle), group, kAllReduce, x, true);
  lay_out_all_reduce(s, x, norm.has_value());
  if (!norm) return s.run(x, x.size(0));
  const Finish f = finish_of(x, x.size(0), norm->first, norm->second, eps);
  return s.run(x, x.size(0), &f);
}

void all_reduce_in_place(int64_t handle, int64_t group, TensorView x) {
  World& w = world_of(handle);
  Setup s(w, group, kAllReduce, x, true);
  lay_out_all_reduce(s, x, false);
  const int64_t bytes = elements(x) * s.call.element;
  s.call.bytes = bytes;
  if (!s.call.two_hops || w.exchange->arena().pool().holds(x.data_ptr())) {
    s.call.out = static_cast<char*>(x.data_ptr());
    return w.exchange->run(s.call);
  }
  const ffi::Tensor shared = new_tensor(w, x.shape(), x.dtype());  // peers must see this rank's share
  s.call.out = static_cast<char*>(shared.data_ptr());
  w.exchange->run(s.call);
  std::memcpy(x.data_ptr(), shared.data_ptr(), size_t(bytes));
}

ffi::Tensor reduce_scatterv_impl(int64_t handle, int64_t group, TensorView x, const Sizes& sizes, const MaybeNorm& norm,
                                 double eps) {
  World& w = world_of(handle);
  Setup s(w, group, kReduceScatter, x, true);
  expect_sizes(sizes, s.n);
  s.expect_rows(x, sum(sizes));
  s.sign(norm.has_value());
  s.call.lanes = s.n;
  int64_t begin = 0;
  const int64_t width = width_of(x);
  for (int i = 0; i < s.n; ++i) {
    s.sign(uint64_t(sizes[i]));
    w.parts.push_back(Part{begin, 0, sizes[i] * width, s.all, 1u << i, i, i});
    begin += sizes[i] * width;
  }
  if (!norm) return s.run(x, sizes[s.me]);
  const Finish f = finish_of(x, sizes[s.me], norm->first, norm->second, eps);
  return s.run(x, sizes[s.me], &f);
}

// The ranks of a mixed edge, in the world: reduce group d holds ranks d·tp … d·tp + tp - 1.
ffi::Tensor all_reduce_all_gatherv_impl(int64_t handle, int64_t world, TensorView x, int64_t tp, const Sizes& sizes,
                                        const MaybeNorm& norm, double eps) {
  World& w = world_of(handle);
  Setup s(w, world, kGatherMixed, x, true);
  expect_sizes(sizes, s.n / tp);
  s.expect_rows(x, sizes[s.me / tp]);
  const int64_t width = width_of(x), rows = sum(sizes), total = rows * width * s.call.element;
  s.sign(norm.has_value());
  s.call.two_hops = total > w.exchange->tuning.two_hop_bytes;
  s.call.lanes = s.call.two_hops ? int(tp) : 1;
  int64_t at = 0;
  for (int d = 0; d < int(sizes.size()); ++d) {
    s.sign(uint64_t(sizes[d]));
    const uint32_t group = uint32_t(((uint64_t(1) << tp) - 1) << (d * tp));
    if (!s.call.two_hops) {
      w.parts.push_back(Part{0, at, sizes[d] * width, group, s.all, 0, 0});
    } else {
      for (int a = 0; a < int(tp); ++a) {
        const auto [begin, end] = share(sizes[d], width, a, int(tp));
        w.parts.push_back(Part{begin, at + begin, end - begin, group, s.all, int(d * tp + a), a});
      }
    }
    at += sizes[d] * width;
  }
  if (!norm) return s.run(x, rows);
  const Finish f = finish_of(x, rows, norm->first, norm->second, eps);
  return s.run(x, rows, &f);
}

ffi::Tensor reduce_scatterv_all_reduce_impl(int64_t handle, int64_t world, TensorView x, int64_t tp, const Sizes& sizes,
                                            const MaybeNorm& norm, double eps) {
  World& w = world_of(handle);
  Setup s(w, world, kScatterMixed, x, true);
  expect_sizes(sizes, s.n / tp);
  s.expect_rows(x, sum(sizes));
  const int64_t width = width_of(x), rows = sizes[s.me / tp];
  s.sign(norm.has_value());
  s.call.two_hops = tp > 1 && x.size(0) * width * s.call.element > w.exchange->tuning.two_hop_bytes;
  s.call.lanes = s.call.two_hops ? s.n : int(sizes.size());
  int64_t at = 0;
  for (int d = 0; d < int(sizes.size()); ++d) {
    s.sign(uint64_t(sizes[d]));
    const uint32_t group = uint32_t(((uint64_t(1) << tp) - 1) << (d * tp));
    if (!s.call.two_hops) {
      w.parts.push_back(Part{at, 0, sizes[d] * width, s.all, group, 0, d});
    } else {
      for (int a = 0; a < int(tp); ++a) {
        const auto [begin, end] = share(sizes[d], width, a, int(tp));
        w.parts.push_back(Part{at + begin, begin, end - begin, s.all, group, int(d * tp + a), int(d * tp + a)});
      }
    }
    at += sizes[d] * width;
  }
  if (!norm) return s.run(x, rows);
  const Finish f = finish_of(x, rows, norm->first, norm->second, eps);
  return s.run(x, rows, &f);
}

MaybeNorm norm_of(TensorView residual, TensorView weight) { return std::make_pair(residual, weight); }

}  // namespace

// groups: every group of the world, the same list on every rank. pidfds: of each rank's process, -1 for none.
// tuning: the numbers of Tuning, in order.
int64_t create(int64_t fd, int64_t world, int64_t rank, ffi::Array<ffi::Array<int64_t>> groups, int64_t slot_bytes,
               int64_t blocks, int64_t block_bytes, Sizes pidfds, int64_t spins, double timeout_s,
               Sizes tuning, ffi::String isa) {
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

// Bytes that the segment of such a world takes; sparse.
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

// The most blocks of this rank's pool that were in use at once.
int64_t peak_blocks(int64_t handle) { return int64_t(world_of(handle).exchange->arena().pool().peak()); }

// For benchmarks: the same reads, sums and writes as a collective's, from tensors at known places in the arena, with no
// word said between the ranks. What a collective takes beyond this is its protocol.
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

// Looks whether a rank is gone.
void check(int64_t handle) {
  guarded([&] { world_of(handle).exchange->waiter().look_around(); });
}

void barrier(int64_t handle, int64_t group) {
  guarded([&] { world_of(handle).exchange->barrier(int(group)); });
}

ffi::Tensor all_reduce(int64_t handle, int64_t group, TensorView x) {
  return guarded([&] { return all_reduce_impl(handle, group, x, {}, 0); });
}
void all_reduce_(int64_t handle, int64_t group, TensorView x) {
  guarded([&] { all_reduce_in_place(handle, group, x); });
}
ffi::Tensor all_reduce_norm(int64_t handle, int64_t group, TensorView x, TensorView residual, TensorView weight,
                            double eps) {
  return guarded([&] { return all_reduce_impl(handle, group, x, norm_of(residual, weight), eps); });
}
ffi::Tensor reduce_scatterv(int64_t handle, int64_t group, TensorView x, Sizes sizes) {
  return guarded([&] { return reduce_scatterv_impl(handle, group, x, sizes, {}, 0); });
}
ffi::Tensor reduce_scatterv_norm(int64_t handle, int64_t group, TensorView x, Sizes sizes, TensorView residual,
                                 TensorView weight, double eps) {
  return guarded([&] { return reduce_scatterv_impl(handle, group, x, sizes, norm_of(residual, weight), eps); });
}
ffi::Tensor all_reduce_all_gatherv(int64_t handle, int64_t world, TensorView x, int64_t tp, Sizes sizes) {
  return guarded([&] { return all_reduce_all_gatherv_impl(handle, world, x, tp, sizes, {}, 0); });
}
ffi::Tensor all_reduce_all_gatherv_norm(int64_t handle, int64_t world, TensorView x, int64_t tp, Sizes sizes,
                                        TensorView residual, TensorView weight, double eps) {
  return guarded(
      [&] { return all_reduce_all_gatherv_impl(handle, world, x, tp, sizes, norm_of(residual, weight), eps); });
}
ffi::Tensor reduce_scatterv_all_reduce(int64_t handle, int64_t world, TensorView x, int64_t tp, Sizes sizes) {
  return guarded([&] { return reduce_scatterv_all_reduce_impl(handle, world, x, tp, sizes, {}, 0); });
}
ffi::Tensor reduce_scatterv_all_reduce_norm(int64_t handle, int64_t world, TensorView x, int64_t tp, Sizes sizes,
                                            TensorView residual, TensorView weight, double eps) {
  return guarded(
      [&] { return reduce_scatterv_all_reduce_impl(handle, world, x, tp, sizes, norm_of(residual, weight), eps); });
}

ffi::Tensor all_gatherv(int64_t handle, int64_t group, TensorView x, Sizes sizes) {
  return guarded([&] {
    World& w = world_of(handle);
    Setup s(w, group, kAllGather, x, false);
    expect_sizes(sizes, s.n);
    s.expect_rows(x, sizes[s.me]);
    const int64_t width = width_of(x);
    int64_t at = 0;
    for (int i = 0; i < s.n; ++i) {
      s.sign(uint64_t(sizes[i]));
      w.parts.push_back(Part{0, at, sizes[i] * width, 1u << i, s.all, i, 0});
      at += sizes[i] * width;
    }
    return s.run(x, sum(sizes));
  });
}

ffi::Tensor all_to_allv(int64_t handle, int64_t group, TensorView x, Sizes send, Sizes receive) {
  return guarded([&] {
    World& w = world_of(handle);
    Setup s(w, group, kAllToAll, x, false);
    expect_sizes(send, s.n);
    expect_sizes(receive, s.n);
    s.expect_rows(x, sum(send));
    s.call.lanes = s.n;
    s.call.ragged = true;
    const int64_t width = width_of(x);
    int64_t from = 0, at = 0;
    for (int i = 0; i < s.n; ++i) {
      if (i == s.me) {
        if (send[i] != receive[i]) throw CallError("a rank sends itself other rows than it receives from itself");
        w.parts.push_back(Part{from, at, send[i] * width, 1u << i, 1u << i, i, i});
      } else {
        w.parts.push_back(Part{from, 0, send[i] * width, 1u << s.me, 1u << i, i, i});
        w.parts.push_back(Part{0, at, receive[i] * width, 1u << i, 1u << s.me, i, s.me});
      }
      from += send[i] * width;
      at += receive[i] * width;
    }
    return s.run(x, sum(receive));
  });
}

ffi::Tensor broadcast(int64_t handle, int64_t group, TensorView x, int64_t root) {
  return guarded([&] {
    World& w = world_of(handle);
    Setup s(w, group, kBroadcast, x, false);
    const int from = int(std::find(s.ranks.begin(), s.ranks.end(), int(root)) - s.ranks.begin());
    if (from == s.n) throw CallError("the root is not of the group");
    s.sign(uint64_t(root));
    s.sign(uint64_t(x.size(0)));
    w.parts.push_back(Part{0, 0, elements(x), 1u << from, s.all, from, 0});
    return s.run(x, x.size(0));
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
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce, weft::all_reduce)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce_, weft::all_reduce_)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce_norm, weft::all_reduce_norm)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reduce_scatterv, weft::reduce_scatterv)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reduce_scatterv_norm, weft::reduce_scatterv_norm)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce_all_gatherv, weft::all_reduce_all_gatherv)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce_all_gatherv_norm, weft::all_reduce_all_gatherv_norm)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reduce_scatterv_all_reduce, weft::reduce_scatterv_all_reduce)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reduce_scatterv_all_reduce_norm, weft::reduce_scatterv_all_reduce_norm)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_gatherv, weft::all_gatherv)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_to_allv, weft::all_to_allv)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(broadcast, weft::broadcast)
