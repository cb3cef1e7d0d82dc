// Bindings of the exchange over peer memory: arenas shared by CUDA IPC, checks, launches.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernel.cuh"
#include "merge.cuh"

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
  int64_t offset = 0;        // of its inboxes, in every rank's arena
  uint32_t inbox_units = 0;  // of one rotation
  char* inbox[kMaxRanks] = {};
  State* state = nullptr;
};

using Kernels = void (*)(Call);
using Merges = void (*)(Merge);

// A rank's arena: a State for each of its groups, then their inboxes.
struct World {
  char* base = nullptr;
  std::vector<char*> mapped;  // of each rank; [rank] is base
  std::vector<GroupMemory> groups;
  int64_t limit_cycles = 0;
  int rank = 0;
  bool imported = false;  // from other processes
  bool plain = false;     // the device runs the plain form of the kernels: ptx.cuh
  uint32_t *error_host = nullptr, *error_device = nullptr;
  std::map<std::tuple<const void*, int, int>, int>
      resident;  // blocks of a kernel, by threads and cluster
};

template <class T, bool kWhole, int N, Algorithm kHow>
Kernels kernel_then(Epilogue then) {
  if (then == Epilogue::kNone) return exchange<T, kWhole, N, kHow, Epilogue::kNone>;
  if constexpr (kWhole)  // other rows are rare, and their kernels slow to compile: one does both
    if (then == Epilogue::kNorm) return exchange<T, kWhole, N, kHow, Epilogue::kNorm>;
  return exchange<T, kWhole, N, kHow, Epilogue::kQuantise>;
}
template <class T, bool kWhole, int N>
Kernels kernel_of(Algorithm how, Epilogue then) {
  if (how == Algorithm::kCopy)
    return exchange<float, kWhole, N, Algorithm::kCopy, Epilogue::kNone>;  // for all types
  if constexpr (N > 2)
    if (how == Algorithm::kTwoShot) return kernel_then<T, kWhole, N, Algorithm::kTwoShot>(then);
  return kernel_then<T, kWhole, N, Algorithm::kOneShot>(then);
}
template <class T>
Kernels kernel_for(bool whole, int ranks, Algorithm how, Epilogue then) {
  return !whole       ? kernel_of<T, false, kMaxRanks>(how, then)
         : ranks <= 2 ? kernel_of<T, true, 2>(how, then)
         : ranks <= 4 ? kernel_of<T, true, 4>(how, then)
                      : kernel_of<T, true, kMaxRanks>(how, then);
}

template <class T>
Merges merge_for(int ranks) {
  return ranks <= 2 ? merge<T, 2> : ranks <= 4 ? merge<T, 4> : merge<T, kMaxRanks>;
}

// Loads all kernels now: the first launch may come within a graph's capture, where loading is not allowed. Each asks
// for as much of L1 as can be shared memory, like GEMMs, which keep weights there before the exchange has ended, and
// a multiprocessor does not run two kernels at a time that ask for different shares.
template <class T>
void load() {
  const auto one = [](auto kernel) {
    const auto* which = reinterpret_cast<const void*>(kernel);
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, which), "load");
    check(cudaFuncSetAttribute(which, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          "load");
  };
  for (const int ranks : {2, 4, kMaxRanks}) one(merge_for<T>(ranks));
  for (const int ranks : {2, 4, kMaxRanks})
    for (const bool whole : {false, true})
      for (const Algorithm how : {Algorithm::kCopy, Algorithm::kOneShot, Algorithm::kTwoShot})
        for (const Epilogue then : {Epilogue::kNone, Epilogue::kNorm, Epilogue::kQuantise})
          one(kernel_for<T>(whole, ranks, how, then));
}

// True if this device runs the plain form: the target of its code decides, not the device.
bool plain_here() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(merge_for<float>(2))), "load");
  return attributes.ptxVersion < 90;
}

World& world_of(int64_t handle) { return *reinterpret_cast<World*>(handle); }

void place_groups(World& w) {
  for (size_t g = 0; g < w.groups.size(); ++g) {
    GroupMemory& group = w.groups[g];
    for (size_t i = 0; i < group.ranks.size(); ++i) group.inbox[i] = w.mapped[size_t(group.ranks[i])] + group.offset;
    group.state = reinterpret_cast<State*>(w.base) + g;
  }
}

// The launch of a call's kernels. early: blocks may start before the previous kernel ends.
class Launch {
 public:
  Launch(const World& w, int64_t blocks, int64_t threads, int64_t cluster, int64_t early, int64_t stream) {
    if (w.plain && (cluster > 1 || early))
      TVM_FFI_THROW(WeftCallError) << "the kernels for this GPU are the plain form, without clusters and early launch";
    config.gridDim = unsigned(blocks), config.blockDim = unsigned(threads) + kBookkeepers;
    config.stream = reinterpret_cast<cudaStream_t>(stream);
    config.attrs = attributes_;
    if (early) {
      cudaLaunchAttribute& attribute = attributes_[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      cudaLaunchAttribute& attribute = attributes_[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = unsigned(cluster), attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
  }
  Launch(const Launch&) = delete;
  cudaLaunchConfig_t config{};

 private:
  cudaLaunchAttribute attributes_[2];
};

// The number of blocks that the device holds at a time. All blocks that push and then wait must be among them: a block
// that starts only after another has ended might be the one that the other waits for, by way of a peer.
template <class Kernel>
int resident(World& w, const cudaLaunchConfig_t& config, Kernel kernel, int cluster) {
  const std::tuple key{reinterpret_cast<const void*>(kernel), int(config.blockDim.x), cluster};
  if (const auto known = w.resident.find(key); known != w.resident.end()) return known->second;
  int device = 0, processors = 1, blocks = 0;
  if (cluster > 1) {
    check(cudaOccupancyMaxActiveClusters(&blocks, kernel, &config), "occupancy");
  } else {
    check(cudaGetDevice(&device), "device");
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "device");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, int(config.blockDim.x), 0), "occupancy");
  }
  return w.resident[key] = blocks * (cluster > 1 ? cluster : processors);
}

}  // namespace

// Allocates this rank's arena on the current device, and fills it with sentinels. groups: those that this rank is in.
// Other ranks have other groups, but the same number. inboxes: bytes of one inbox of each group.
int64_t create(int64_t rank, ffi::Array<ffi::Array<int64_t>> groups, Sizes inboxes, int64_t limit_ns) {
  auto w = std::make_unique<World>();
  w->rank = int(rank);
  constexpr int64_t kLine = 128, kStep = kLine * 2 * 840;  // lanes of 1 to 8 ranks, and half of them: whole cache lines
  const int64_t of_states = (int64_t(groups.size() * sizeof(State)) + kLine - 1) / kLine * kLine;
  int64_t bytes = of_states;
  int device = 0, khz = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device), "device");
  w->limit_cycles = limit_ns / 1000000 * khz;
  for (const auto& group : groups) {
    GroupMemory g;
    for (const int64_t r : group) {
      if (r == rank) g.me = int(g.ranks.size());
      g.ranks.push_back(int(r));
    }
    if (g.ranks.size() > kMaxRanks) TVM_FFI_THROW(WeftCallError) << "at most 8 ranks share peer memory";
    const int64_t units = (inboxes[int64_t(w->groups.size())] + kStep - 1) / kStep * kStep / kUnit;
    if (units * kUnit / int64_t(g.ranks.size()) >> 32)
      TVM_FFI_THROW(WeftCallError) << "max_bytes must be less than 4 GiB";
    g.offset = bytes, g.inbox_units = uint32_t(units);
    bytes += kRotations * units * kUnitAndMark;
    w->groups.push_back(std::move(g));
  }
  load<float>(), load<__nv_bfloat16>(), load<__half>();
  w->plain = plain_here();
  check(cudaMalloc(&w->base, size_t(bytes)), "no memory for the arena");
  check(cudaMemset(w->base, 0xff, size_t(bytes)), "fill");
  check(cudaMemset(w->base, 0, size_t(of_states)), "fill");
  check(cudaHostAlloc(&w->error_host, sizeof(uint32_t), cudaHostAllocMapped), "no host memory");
  *w->error_host = 0;
  check(cudaHostGetDevicePointer(&w->error_device, w->error_host, 0), "map");
  check(cudaDeviceSynchronize(), "fill");
  return reinterpret_cast<int64_t>(w.release());
}

// The handle with which other ranks map this rank's arena: 64 bytes in a CPU tensor.
void export_handle(int64_t handle, TensorView out) {
  cudaIpcMemHandle_t ipc;
  check(cudaIpcGetMemHandle(&ipc, world_of(handle).base), "export");
  std::memcpy(out.data_ptr(), &ipc, sizeof ipc);
}

// handles: [ranks, 64] bytes on the CPU, of all ranks in order.
void connect(int64_t handle, TensorView handles) {
  World& w = world_of(handle);
  w.imported = true;
  for (int64_t r = 0; r < handles.size(0); ++r) {
    void* base = w.base;
    if (r != w.rank) {
      cudaIpcMemHandle_t ipc;
      std::memcpy(&ipc, static_cast<const char*>(handles.data_ptr()) + r * int64_t(sizeof ipc), sizeof ipc);
      check(cudaIpcOpenMemHandle(&base, ipc, cudaIpcMemLazyEnablePeerAccess), "map a peer's arena");
    }
    w.mapped.push_back(static_cast<char*>(base));
  }
  place_groups(w);
}

// The same for ranks that all live in this process, on one device or on peers: handles of all ranks in order.
void connect_here(int64_t handle, Sizes handles) {
  World& w = world_of(handle);
  for (const int64_t other : handles) w.mapped.push_back(world_of(other).base);
  place_groups(w);
}

void destroy(int64_t handle) {
  World& w = world_of(handle);
  cudaDeviceSynchronize();
  for (size_t r = 0; r < w.mapped.size() && w.imported; ++r)
    if (int(r) != w.rank) cudaIpcCloseMemHandle(w.mapped[r]);
  cudaFree(w.base);
  cudaFreeHost(w.error_host);
  delete &w;
}

// True if calls must request no clusters and no early launch.
int64_t plain(int64_t handle) { return world_of(handle).plain; }

// 0, or 1 + the place in its group of the rank for which a kernel's wait timed out.
int64_t error(int64_t handle) { return *reinterpret_cast<volatile uint32_t*>(world_of(handle).error_host); }

// Clears the error, for tests that continue after one.
void clear_error(int64_t handle) { *reinterpret_cast<volatile uint32_t*>(world_of(handle).error_host) = 0; }

// Python's arguments of `run`, field by field in the order of `Request` in weft/comm/peer.py, eight bytes each.
// `layout` gives Python the order, so that the two cannot differ unseen. Addresses are of this rank's device; 0: none.
//   direction, segments, span   the exchange; rows: of each segment, or in a permute that this rank sends to each rank;
//                               received: in a permute, from each; device_counts: int32 in device memory, in place of
//                               `rows`: of each segment, or in a permute the contents of `rows` and then `received`
//   x_rows, out_rows            capacities; row_bytes, width: bytes and elements of a row; dtype: see `run`, ignored
//                               if nothing is summed
//   residual … eps              the epilogue, if there is a weight; wide_weight: the weight is float32 with a dtype of
//                               16 bits; quantised, scales and quant_group: for rows in FP8, too: scales, float32, one
//                               for each group of quant_group columns of a row, a power of two up to 128
//   push, sum, write            blocks that do so; if push is 0, `write` blocks do all work. cluster: blocks that share a
//                               row to be normalised; threads: workers of a block; early: blocks may start before the
//                               previous kernel ends; stream: a cudaStream_t
// clang-format off
#define WEFT_REQUEST(FIELD, FIELDS)                                                                                      \
  FIELD(group) FIELD(direction) FIELD(segments) FIELD(span) FIELD(two_shot) FIELD(x) FIELD(x_rows) FIELD(out)             \
  FIELD(out_rows) FIELD(row_bytes) FIELD(width) FIELD(dtype) FIELD(device_counts) FIELD(residual) FIELD(residual_out)     \
  FIELD(weight) FIELD(wide_weight) FIELD(quantised) FIELD(scales) FIELD(quant_group) FIELD(push)           \
  FIELD(sum) FIELD(write) FIELD(cluster) FIELD(threads) FIELD(early) FIELD(stream) FIELDS(rows) FIELDS(received)
// clang-format on
struct Request {
#define FIELD(name) int64_t name;
#define FIELDS(name) int64_t name[kMaxRanks];
  WEFT_REQUEST(FIELD, FIELDS)
#undef FIELD
#undef FIELDS
  double eps;
};

// Python's arguments of `merge`. x, lse: this rank's outputs and log-sum-exps, token and head strides in bytes; out,
// out_lse: this rank's heads; live: null, or int32 in device memory.
// clang-format off
#define WEFT_MERGE_REQUEST(FIELD)                                                                                        \
  FIELD(group) FIELD(x) FIELD(x_token) FIELD(x_head) FIELD(lse) FIELD(lse_token) FIELD(lse_head) FIELD(out)               \
  FIELD(out_lse) FIELD(live) FIELD(tokens) FIELD(heads) FIELD(dim) FIELD(dtype) FIELD(blocks) FIELD(threads)              \
  FIELD(early) FIELD(stream)
// clang-format on
struct MergeRequest {
#define FIELD(name) int64_t name;
  WEFT_MERGE_REQUEST(FIELD)
#undef FIELD
};

// The fields of both requests, each with its offset, and their sizes; then the kernels' limits, which Python checks.
ffi::String layout() {
  std::string all;
#define FIELD(name) all += #name "@" + std::to_string(offsetof(Request, name)) + " ";
  WEFT_REQUEST(FIELD, FIELD)
#undef FIELD
  all += "eps@" + std::to_string(offsetof(Request, eps)) + " size " + std::to_string(sizeof(Request)) + ", ";
#define FIELD(name) all += #name "@" + std::to_string(offsetof(MergeRequest, name)) + " ";
  WEFT_MERGE_REQUEST(FIELD)
#undef FIELD
  return all + "size " + std::to_string(sizeof(MergeRequest)) + ", max_ranks " + std::to_string(kMaxRanks) +
         ", max_threads " + std::to_string(kWorkers) + ", unit_bytes " + std::to_string(kUnit) + ", max_normed_bytes " +
         std::to_string(kMaxSlices * kSliceUnits * kUnit) + ", too_many_rows " + std::to_string(kTooManyRows);
}

// request: address of a Request. dtype: 0 float32, 1 bfloat16, 2 float16.
void run(int64_t handle, int64_t request) {
  const Request& r = *reinterpret_cast<const Request*>(request);
  if (r.threads < 32 || r.threads > kWorkers || r.threads % 32)
    TVM_FFI_THROW(WeftCallError) << "a block has a multiple of 32 threads, up to " << kWorkers << ", not " << r.threads;
  World& w = world_of(handle);
  const GroupMemory& g = w.groups[size_t(r.group)];
  Call c;
  c.exchange = {Direction(r.direction), int(r.segments), int(r.span)};
  c.n = int(g.ranks.size()), c.me = g.me;
  const bool scatters = c.exchange.direction == Direction::kScatter, norm = r.weight != 0;
  const Epilogue then = !norm ? Epilogue::kNone : r.quantised ? Epilogue::kQuantise : Epilogue::kNorm;
  const int terms = c.exchange.direction == Direction::kPermute ? 1 : scatters ? c.n : c.exchange.span;
  const Algorithm how = r.two_shot ? Algorithm::kTwoShot : terms == 1 && !norm ? Algorithm::kCopy : Algorithm::kOneShot;
  const auto at = [](int64_t address) { return reinterpret_cast<char*>(address); };
  c.x = at(r.x), c.out = at(r.out);
  c.row_bytes = uint32_t(r.row_bytes), c.row_units = (c.row_bytes + kUnit - 1) / kUnit;
  if (norm) {
    c.residual = at(r.residual), c.residual_out = at(r.residual_out), c.weight = at(r.weight);
    c.wide_weight = r.wide_weight != 0;
    c.quantised = at(r.quantised), c.scales = reinterpret_cast<float*>(r.scales);
    c.eps = float(r.eps), c.inverse_width = 1.0f / float(r.width);
    while (1 << c.log2_quant_group < r.quant_group && c.quantised) ++c.log2_quant_group;
    if (c.quantised && (r.quant_group < 8 || r.quant_group > 128 || 1 << c.log2_quant_group != r.quant_group))
      TVM_FFI_THROW(WeftCallError) << "the epilogue quantises by groups of 8 to 128 columns, a power of two, not "
                                   << r.quant_group;
    if (c.row_units > kMaxSlices * kSliceUnits)
      TVM_FFI_THROW(WeftCallError)
          << "the epilogue takes rows of at most " << kMaxSlices * kSliceUnits * kUnit << " bytes";
  }
  c.device_counts = reinterpret_cast<const int32_t*>(r.device_counts);
  for (int i = 0; i < c.n; ++i) c.inbox[i] = g.inbox[i];
  c.inbox_units = g.inbox_units;
  c.lane_units[0] = c.inbox_units / c.n, c.lane_units[1] = c.inbox_units / (2 * c.n);
  if (c.device_counts) {
    const int64_t units = std::max(1u, c.row_units), in_a_lane = c.lane_units[r.two_shot != 0] / units;
    const int64_t in_sums = r.two_shot ? c.inbox_units / 2 / units : INT32_MAX;
    c.x_units = uint32_t(r.x_rows * c.row_units);
    c.max_rows = uint32_t(std::min<int64_t>(1 << 28, r.two_shot ? in_a_lane * c.exchange.span : in_a_lane));
    c.max_mine = uint32_t(scatters ? r.out_rows : r.x_rows);
    c.max_total = uint32_t(std::min(scatters ? r.x_rows : r.out_rows, in_sums));
  } else {
    lay_out(c, r.rows, r.received, r.two_shot != 0);
  }
  c.state = g.state, c.error = w.error_device, c.limit_cycles = w.limit_cycles;
  while (1 << c.log2_cluster < r.cluster) ++c.log2_cluster;
  const auto aligned = [](const char* p) { return reinterpret_cast<uintptr_t>(p) % kUnit == 0; };
  const bool whole = c.row_bytes % kUnit == 0 && aligned(c.x) && aligned(c.out) && aligned(c.residual) &&
                     aligned(c.residual_out) && aligned(c.weight) && aligned(c.quantised);
  const auto launch = [&](Kernels kernel) {
    Launch prepared(w, r.push + r.sum + r.write, r.threads, r.cluster, r.early, r.stream);
    cudaLaunchConfig_t& config = prepared.config;
    if (r.push) {
      const int push = int(r.push), sum = int(r.sum);
      c.push = Blocks{0, push}, c.sum = Blocks{push, sum}, c.write = Blocks{push + sum, int(r.write)};
    } else {
      config.gridDim = unsigned(std::min(int(r.write), resident(w, config, kernel, int(r.cluster))));
      c.push = c.sum = c.write = Blocks{0, int(config.gridDim.x)};
    }
    check(cudaLaunchKernelEx(&config, kernel, c), "launch");
  };
  if (r.dtype == 0)
    launch(kernel_for<float>(whole, c.n, how, then));
  else if (r.dtype == 1)
    launch(kernel_for<__nv_bfloat16>(whole, c.n, how, then));
  else
    launch(kernel_for<__half>(whole, c.n, how, then));
}

// request: address of a MergeRequest; dtype as in `run`.
void merge_shards(int64_t handle, int64_t request) {
  const MergeRequest& r = *reinterpret_cast<const MergeRequest*>(request);
  World& w = world_of(handle);
  const GroupMemory& g = w.groups[size_t(r.group)];
  const int64_t row_bytes = r.dim * (r.dtype == 0 ? 4 : 2);
  if ((row_bytes | r.x | r.x_token | r.x_head | r.out) % kUnit)
    TVM_FFI_THROW(WeftCallError) << "merges take heads and strides of whole units of " << kUnit << " bytes";
  Merge c;
  c.n = int(g.ranks.size()), c.me = g.me;
  c.x = reinterpret_cast<const char*>(r.x), c.lse = reinterpret_cast<const float*>(r.lse);
  c.x_token = uint32_t(r.x_token / kUnit), c.x_head = uint32_t(r.x_head / kUnit);
  c.lse_token = uint32_t(r.lse_token / 4), c.lse_head = uint32_t(r.lse_head / 4);
  c.out = reinterpret_cast<char*>(r.out), c.out_lse = reinterpret_cast<float*>(r.out_lse);
  c.tokens = uint32_t(r.tokens), c.own_heads = uint32_t(r.heads / c.n);
  c.row_units = uint32_t(row_bytes / kUnit), c.pieces = (c.row_units + kPieceUnits - 1) / kPieceUnits;
  c.live = reinterpret_cast<const int32_t*>(r.live);
  c.team = 8;
  while (c.team < c.row_units && c.team < kPieceUnits) c.team *= 2;
  for (int i = 0; i < c.n; ++i) c.inbox[i] = g.inbox[i];
  c.inbox_units = g.inbox_units, c.lane_units = c.inbox_units / c.n;
  c.state = g.state, c.error = w.error_device, c.limit_cycles = w.limit_cycles;
  const int64_t pieces = int64_t(c.tokens) * c.own_heads * c.pieces;
  if (int64_t(c.tokens) * c.own_heads * c.row_units + pieces > c.lane_units)
    TVM_FFI_THROW(WeftCallError)
        << "a merge of so many tokens does not fit an inbox; give the transport more max_bytes";
  const Merges kernel = r.dtype == 0   ? merge_for<float>(c.n)
                        : r.dtype == 1 ? merge_for<__nv_bfloat16>(c.n)
                                       : merge_for<__half>(c.n);
  const int64_t wanted = std::max<int64_t>(1, (pieces * c.team + r.threads - 1) / r.threads);
  Launch prepared(w, std::min(wanted, r.blocks), r.threads, 1, r.early, r.stream);
  cudaLaunchConfig_t& config = prepared.config;
  config.gridDim = unsigned(std::min(int(config.gridDim.x), resident(w, config, kernel, 1)));
  check(cudaLaunchKernelEx(&config, kernel, c), "launch");
}

}  // namespace weft

TVM_FFI_DLL_EXPORT_TYPED_FUNC(create, weft::create)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(export_handle, weft::export_handle)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(connect, weft::connect)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(connect_here, weft::connect_here)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(destroy, weft::destroy)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plain, weft::plain)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(error, weft::error)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clear_error, weft::clear_error)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layout, weft::layout)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, weft::run)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, weft::merge_shards)
