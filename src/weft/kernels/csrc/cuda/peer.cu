// Python's door to the peer-memory exchange: arenas shared by CUDA IPC, checks, launches.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "peer.cuh"

namespace ffi = tvm::ffi;
using ffi::TensorView;
using Sizes = ffi::Array<int64_t>;

namespace weft {
namespace {

void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) TVM_FFI_THROW(WeftCallError) << what << ": " << cudaGetErrorString(code);
}

struct GroupMemory {
  std::vector<int> ranks;
  int me = 0;
  char* inbox[kMaxRanks] = {};
  State* state = nullptr;
};

// A rank's arena: for each group kRotations inboxes, then a State for each group.
struct World {
  char* base = nullptr;
  std::vector<char*> mapped;  // of each rank; [rank] is base
  std::vector<GroupMemory> groups;
  int64_t inbox_bytes = 0, limit_ns = 0;
  int rank = 0;
  uint32_t *error_host = nullptr, *error_device = nullptr;
};

World& world_of(int64_t handle) { return *reinterpret_cast<World*>(handle); }

int64_t group_bytes(int64_t inbox_bytes) { return kRotations * inbox_bytes; }
int64_t state_offset(int64_t groups, int64_t inbox_bytes) { return groups * group_bytes(inbox_bytes); }

}  // namespace

// Allocates this rank's arena on the current device, sentinels in place.
int64_t create(int64_t rank, ffi::Array<ffi::Array<int64_t>> groups, int64_t inbox_bytes, int64_t limit_ns) {
  auto w = std::make_unique<World>();
  w->rank = int(rank);
  constexpr int64_t kStep = int64_t(kUnit) * 2 * 840;  // lanes of 1 to 8 ranks, and half of them, are whole units
  w->inbox_bytes = (inbox_bytes + kStep - 1) / kStep * kStep;
  w->limit_ns = limit_ns;
  for (const auto& group : groups) {
    GroupMemory g;
    for (const int64_t r : group) {
      if (r == rank) g.me = int(g.ranks.size());
      g.ranks.push_back(int(r));
    }
    if (g.ranks.size() > kMaxRanks) TVM_FFI_THROW(WeftCallError) << "at most 8 ranks share peer memory";
    w->groups.push_back(std::move(g));
  }
  const int64_t states = state_offset(int64_t(w->groups.size()), w->inbox_bytes);
  check(cudaMalloc(&w->base, size_t(states + int64_t(w->groups.size() * sizeof(State)))), "no memory for the arena");
  check(cudaMemset(w->base, 0xff, size_t(states)), "fill");
  check(cudaMemset(w->base + states, 0, w->groups.size() * sizeof(State)), "fill");
  check(cudaHostAlloc(&w->error_host, sizeof(uint32_t), cudaHostAllocMapped), "no host memory");
  *w->error_host = 0;
  check(cudaHostGetDevicePointer(&w->error_device, w->error_host, 0), "map");
  check(cudaDeviceSynchronize(), "fill");
  return reinterpret_cast<int64_t>(w.release());
}

// What other ranks need to map this rank's arena: 64 bytes in a CPU tensor.
void export_handle(int64_t handle, TensorView out) {
  cudaIpcMemHandle_t ipc;
  check(cudaIpcGetMemHandle(&ipc, world_of(handle).base), "export");
  std::memcpy(out.data_ptr(), &ipc, sizeof ipc);
}

// handles: [ranks, 64] bytes on the CPU, of every rank in order.
void connect(int64_t handle, TensorView handles) {
  World& w = world_of(handle);
  for (int64_t r = 0; r < handles.size(0); ++r) {
    void* base = w.base;
    if (r != w.rank) {
      cudaIpcMemHandle_t ipc;
      std::memcpy(&ipc, static_cast<const char*>(handles.data_ptr()) + r * int64_t(sizeof ipc), sizeof ipc);
      check(cudaIpcOpenMemHandle(&base, ipc, cudaIpcMemLazyEnablePeerAccess), "map a peer's arena");
    }
    w.mapped.push_back(static_cast<char*>(base));
  }
  for (size_t g = 0; g < w.groups.size(); ++g) {
    GroupMemory& group = w.groups[g];
    for (size_t i = 0; i < group.ranks.size(); ++i)
      group.inbox[i] = w.mapped[size_t(group.ranks[i])] + int64_t(g) * group_bytes(w.inbox_bytes);
    group.state = reinterpret_cast<State*>(w.base + state_offset(int64_t(w.groups.size()), w.inbox_bytes)) + g;
  }
}

void destroy(int64_t handle) {
  World& w = world_of(handle);
  cudaDeviceSynchronize();
  for (size_t r = 0; r < w.mapped.size(); ++r)
    if (int(r) != w.rank) cudaIpcCloseMemHandle(w.mapped[r]);
  cudaFree(w.base);
  cudaFreeHost(w.error_host);
  delete &w;
}

// 0, or 1 + the place in its group of the rank that a kernel waited for in vain.
int64_t error(int64_t handle) { return *reinterpret_cast<volatile uint32_t*>(world_of(handle).error_host); }

// Forgets the error: for tests, which go on after one.
void clear_error(int64_t handle) { *reinterpret_cast<volatile uint32_t*>(world_of(handle).error_host) = 0; }

// Bytes of an inbox as laid out: one hop gives each of the group's ranks an even share of them, two hops half to sums.
int64_t inbox_bytes(int64_t handle) { return world_of(handle).inbox_bytes; }

// edge: {segments, span, scatter, root, exchange}. counts, received: rows; device_counts: int32 [segments] on the device,
// or empty. residual, residual_out, weight: empty without an epilogue. stream: a cudaStream_t.
void run(int64_t handle, int64_t group, Sizes edge, TensorView x, TensorView out, Sizes counts, Sizes received,
         TensorView device_counts, TensorView residual, TensorView residual_out, TensorView weight, double eps,
         int64_t two_hops, int64_t blocks, int64_t stream) {
  World& w = world_of(handle);
  const GroupMemory& g = w.groups[size_t(group)];
  Call c;
  c.edge = Edge{int(edge[0]), int(edge[1]), int(edge[2]), int(edge[3]), int(edge[4])};
  c.n = int(g.ranks.size()), c.me = g.me;
  c.x = static_cast<const char*>(x.data_ptr()), c.out = static_cast<char*>(out.data_ptr());
  const DLDataType t = x.dtype();
  int64_t width = 1;
  for (int i = 1; i < x.ndim(); ++i) width *= x.size(i);
  c.row_bytes = width * t.bits / 8;
  if (weight.size(0)) {
    c.residual = static_cast<const char*>(residual.data_ptr());
    c.residual_out = static_cast<char*>(residual_out.data_ptr());
    c.weight = static_cast<const char*>(weight.data_ptr());
    c.eps = float(eps);
    if ((c.row_bytes + kUnit - 1) / kUnit > kMaxUnitsHeld * kThreads)
      TVM_FFI_THROW(WeftCallError) << "the norm epilogue takes rows of at most " << kMaxUnitsHeld * kThreads * kUnit << " bytes";
  }
  if (device_counts.size(0))
    c.device_counts = static_cast<const int32_t*>(device_counts.data_ptr());
  c.x_rows = x.size(0), c.out_rows = out.size(0);
  for (size_t i = 0; i < counts.size(); ++i) c.counts[i] = int32_t(counts[i]);
  for (size_t i = 0; i < received.size(); ++i) c.received[i] = int32_t(received[i]);
  for (int i = 0; i < c.n; ++i) c.inbox[i] = g.inbox[i];
  c.inbox_units = w.inbox_bytes / kUnit;
  c.state = g.state, c.error = w.error_device, c.limit_ns = w.limit_ns, c.two_hops = int(two_hops);
  const auto at = reinterpret_cast<cudaStream_t>(stream);
  const auto aligned = [](const char* p) { return reinterpret_cast<uintptr_t>(p) % kUnit == 0; };
  const bool whole = c.row_bytes % kUnit == 0 && aligned(c.x) && aligned(c.out) && aligned(c.residual) &&
                     aligned(c.residual_out) && aligned(c.weight);
  const auto launch = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (whole)
      exchange<T, true><<<int(blocks), kThreads, 0, at>>>(c);
    else
      exchange<T, false><<<int(blocks), kThreads, 0, at>>>(c);
  };
  if (t.code == kDLFloat && t.bits == 32)
    launch(static_cast<float*>(nullptr));
  else if (t.code == kDLBfloat && t.bits == 16)
    launch(static_cast<__nv_bfloat16*>(nullptr));
  else if (t.code == kDLFloat && t.bits == 16)
    launch(static_cast<__half*>(nullptr));
  else
    TVM_FFI_THROW(WeftCallError) << "peer memory takes float32, bfloat16 or float16, not " << ffi::DLDataTypeToString(t);
  check(cudaGetLastError(), "launch");
}

}  // namespace weft

TVM_FFI_DLL_EXPORT_TYPED_FUNC(create, weft::create)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(export_handle, weft::export_handle)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(connect, weft::connect)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(destroy, weft::destroy)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(error, weft::error)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clear_error, weft::clear_error)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(inbox_bytes, weft::inbox_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, weft::run)
