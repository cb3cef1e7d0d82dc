// Stands in for CUDA, so that the kernels run on a CPU: a fiber a CUDA thread, an OS thread a block.
//
// A fiber runs until it polls, or waits for its warp or its block; then the next one has its turn. Blocks run side by
// side, as do the ranks' streams. What a warp does together must find all its lanes there, in the same place: else the
// program ends. Nothing here is fast, or like a GPU in what it costs; what programs may observe is like one.
#pragma once

#include <sched.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __CUDACC__

using std::max;
using std::min;

// --- blocks and their threads ----------------------------------------------------------------------------------------

namespace emulated {

struct Index {
  unsigned x = 0, y = 1, z = 1;
};

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s\n", what);
  std::abort();
}

constexpr size_t kStack = 64 << 10;
constexpr int kMaxThreads = 512, kProcessors = 16;  // blocks that run at a time, for all that the launch knows

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStack]};
  jmp_buf at;
  bool begun = false, done = false;
};

// What the lanes of a warp bring to something that they do together; two such things may overlap.
struct Warp {
  int line = 0, here = 0;
  uint32_t turn = 0;
  uint64_t values[2][32];
};

struct Meeting {
  uint32_t here = 0, turn = 0;
};

// Of a cluster: each block's shared memory, as the address of one variable there.
struct Cluster {
  std::atomic<uint32_t> here{0}, turn{0};
  uint32_t threads = 0;
  std::vector<std::atomic<char*>> anchors;
  explicit Cluster(size_t blocks) : anchors(blocks) {}
};

struct Block {
  Cluster* cluster = nullptr;
  Fiber* running = nullptr;
  jmp_buf scheduler;
  std::array<Warp, kMaxThreads / 32> warps;
  std::array<Meeting, 16> meetings;
  std::vector<Fiber> fibers;
  const std::function<void()>* kernel = nullptr;
};
inline thread_local Block here;
inline thread_local char anchor;

}  // namespace emulated

inline thread_local emulated::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

inline void yield() {
  Fiber* self = here.running;
  if (!_setjmp(self->at)) _longjmp(here.scheduler, 1);
}

inline void enter() {
  (*here.kernel)();
  here.running->done = true;
  _longjmp(here.scheduler, 1);
}

// Runs a block to its end, on this OS thread.
inline void run_block(const std::function<void()>& kernel, Index block, Index blocks, unsigned threads, Cluster* cluster,
                      unsigned rank_in_cluster) {
  blockIdx = block, gridDim = blocks, blockDim = {threads};
  here.cluster = cluster, here.kernel = &kernel;
  here.warps = {}, here.meetings = {};
  cluster->anchors[rank_in_cluster] = &anchor;
  if (here.fibers.size() < threads) here.fibers.resize(threads);
  for (unsigned t = 0; t < threads; ++t) here.fibers[t].begun = here.fibers[t].done = false;
  for (unsigned left = threads; left;) {
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = here.fibers[t];
      if (fiber.done) continue;
      here.running = &fiber, threadIdx.x = t;
      if (!_setjmp(here.scheduler)) {
        if (fiber.begun) _longjmp(fiber.at, 1);
        fiber.begun = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = fiber.stack.get(), context.uc_stack.ss_size = kStack, context.uc_link = nullptr;
        makecontext(&context, enter, 0);
        setcontext(&context);
      }
      left -= here.fibers[t].done;
    }
    sched_yield();
  }
}

// What every lane of this warp brings, once all are here. line: of the call; all lanes' must be the same.
inline const uint64_t* together(uint64_t value, int line) {
  const unsigned lane = threadIdx.x % 32;
  Warp& warp = here.warps[threadIdx.x / 32];
  const uint32_t turn = warp.turn;
  uint64_t* const values = warp.values[turn % 2];
  if (!warp.here) warp.line = line;
  if (warp.line != line) fail("the lanes of a warp are apart");
  values[lane] = value;
  if (++warp.here == 32) {
    warp.here = 0, ++warp.turn;
  } else {
    while (warp.turn == turn) yield();
  }
  return values;
}

inline void meet(int barrier, uint32_t threads, bool wait) {
  Meeting& meeting = here.meetings[size_t(barrier)];
  const uint32_t turn = meeting.turn;
  if (++meeting.here == threads) {
    meeting.here = 0, ++meeting.turn;
  } else if (wait) {
    while (meeting.turn == turn) yield();
  }
}

template <class T>
uint64_t bits(T value) {
  uint64_t all = 0;
  std::memcpy(&all, &value, sizeof value);
  return all;
}
template <class T>
T value_of(uint64_t all) {
  T value;
  std::memcpy(&value, &all, sizeof value);
  return value;
}

}  // namespace emulated

#define EMULATED_LANES(value) emulated::together(emulated::bits(value), __LINE__)

inline bool emulated_all(const uint64_t* lanes) {
  return std::all_of(lanes, lanes + 32, [](uint64_t v) { return v != 0; });
}
inline bool emulated_any(const uint64_t* lanes) {
  return std::any_of(lanes, lanes + 32, [](uint64_t v) { return v != 0; });
}
#define __all_sync(mask, value) emulated_all(EMULATED_LANES(uint64_t(bool(value))))
#define __any_sync(mask, value) emulated_any(EMULATED_LANES(uint64_t(bool(value))))
#define __shfl_sync(mask, value, from) emulated::value_of<decltype(value + 0)>(EMULATED_LANES(value)[(from) & 31])
#define __shfl_xor_sync(mask, value, bits) \
  emulated::value_of<decltype(value + 0)>(EMULATED_LANES(value)[(threadIdx.x % 32) ^ (bits)])
#define __shfl_up_sync(mask, value, by)                                           \
  emulated::value_of<decltype(value + 0)>(                                        \
      EMULATED_LANES(value)[threadIdx.x % 32 >= unsigned(by) ? threadIdx.x % 32 - (by) : threadIdx.x % 32])
inline uint32_t emulated_max(const uint64_t* lanes) { return uint32_t(*std::max_element(lanes, lanes + 32)); }
#define __reduce_max_sync(mask, value) emulated_max(EMULATED_LANES(value))
#define __syncthreads() emulated::meet(0, blockDim.x, true)

inline uint32_t atomicAdd(uint32_t* p, uint32_t value) { return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST); }
inline uint32_t atomicCAS_system(uint32_t* p, uint32_t expected, uint32_t value) {
  __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline int64_t clock64() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

// --- numbers -----------------------------------------------------------------------------------------------------------

struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct float2 {
  float x, y;
};
inline float __uint_as_float(uint32_t w) { return emulated::value_of<float>(w); }
inline uint32_t __float_as_uint(float f) { return uint32_t(emulated::bits(f)); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  const auto narrow = [](float f) {
    const uint32_t w = __float_as_uint(f);
    if (f != f) return __nv_bfloat16{uint16_t(w >> 16 | 0x40)};
    return __nv_bfloat16{uint16_t((w + 0x7fff + (w >> 16 & 1)) >> 16)};
  };
  return {narrow(a), narrow(b)};
}
using __half = _Float16;
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 h) { return {float(h.x), float(h.y)}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }

enum { __NV_SATFINITE, __NV_E4M3 };
inline uint8_t __nv_cvt_float_to_fp8(float f, int, int) {
  const uint8_t sign = uint8_t(__float_as_uint(f) >> 24 & 0x80);
  const float size = std::fabs(f);
  if (f != f) return sign | 0x7f;
  if (size >= 448) return sign | 0x7e;
  const int exponent = std::max(-6, size > 0 ? std::ilogb(size) : -6);  // below, the numbers lie 2^-9 apart
  const int steps = int(std::nearbyint(std::ldexp(size, 3 - exponent)));   // 8 to 16 of them, or fewer
  return sign | uint8_t(((exponent + 6) << 3) + steps);
}

// --- memory and streams --------------------------------------------------------------------------------------------------

namespace emulated {

// What is allocated.
struct Memory {
  std::mutex mutex;
  std::map<const char*, size_t> sizes;
  std::atomic<uint64_t> changes{0};
};
inline Memory& memory() {
  static Memory& found = *new Memory;
  return found;
}
// Ends the program unless a 16-byte access at p is one of allocated memory, aligned.
inline void check_access(const char* p) {
  static thread_local std::map<const char*, size_t> known;
  static thread_local uint64_t changes = 0;
  if (changes != memory().changes) {
    const std::lock_guard lock(memory().mutex);
    known = memory().sizes, changes = memory().changes;
  }
  auto after = known.upper_bound(p);
  const bool inside = after != known.begin() && (--after, p + 16 <= after->first + after->second);
  if (!inside || reinterpret_cast<uintptr_t>(p) % 16) fail("an access beyond every arena, or not aligned");
}

// OS threads that run blocks: as many as want to run at a time.
class Runners {
 public:
  void run(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    if (idle_ < jobs_.size()) std::thread([this] { serve(); }).detach();
    wake_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      --idle_;
      const auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  size_t idle_ = 0;
};

struct Launch {
  std::function<void()> kernel;
  unsigned blocks, threads, cluster;
};

// Kernels one after another.
class Stream {
 public:
  explicit Stream(Runners& runners) : runners_(runners) {}
  void launch(Launch launch) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(launch));
    if (waiting_.size() == 1) begin();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return waiting_.empty();
  }

 private:
  void begin() {  // with the lock held
    Launch& now = waiting_.front();
    left_ = now.blocks;
    clusters_.clear();
    for (unsigned b = 0; b < now.blocks; b += now.cluster) {
      clusters_.push_back(std::make_unique<Cluster>(now.cluster));
      clusters_.back()->threads = now.cluster * now.threads;
    }
    for (unsigned b = 0; b < now.blocks; ++b)
      runners_.run([this, &now, b] {
        run_block(now.kernel, {b}, {now.blocks}, now.threads, clusters_[b / now.cluster].get(), b % now.cluster);
        const std::lock_guard lock(mutex_);
        if (--left_) return;
        waiting_.pop_front();
        if (!waiting_.empty()) begin();
      });
  }
  Runners& runners_;
  std::mutex mutex_;
  std::deque<Launch> waiting_;
  std::vector<std::unique_ptr<Cluster>> clusters_;
  unsigned left_ = 0;
};

inline Stream& stream(int64_t number) {
  static Runners& runners = *new Runners;  // never gone: its threads run to the end
  static std::map<int64_t, std::unique_ptr<Stream>>& streams = *new std::map<int64_t, std::unique_ptr<Stream>>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& found = streams[number];
  if (!found) found = std::make_unique<Stream>(runners);
  return *found;
}

}  // namespace emulated

using cudaStream_t = struct CUstream*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorNotSupported = 801;
struct cudaIpcMemHandle_t {
  char bytes[64];
};
struct cudaFuncAttributes {};
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    emulated::Index clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  struct Size : emulated::Index {
    void operator=(unsigned n) { x = n; }
  } gridDim, blockDim;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  int numAttrs = 0;
};
enum { cudaDevAttrClockRate, cudaDevAttrMultiProcessorCount, cudaHostAllocMapped, cudaIpcMemLazyEnablePeerAccess };

inline const char* cudaGetErrorString(cudaError_t) { return "not emulated"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int which, int) {
  *value = which == cudaDevAttrClockRate ? 1000000 : emulated::kProcessors;  // kHz: a nanosecond a cycle
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t* config) {
  *clusters = int(emulated::kProcessors / config->attrs[1].val.clusterDim.x);
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
template <class T>
cudaError_t cudaMalloc(T** p, size_t size) {
  *p = static_cast<T*>(std::aligned_alloc(256, (size + 255) / 256 * 256));
  if (!*p) return cudaErrorNotSupported;
  emulated::Memory& memory = emulated::memory();
  const std::lock_guard lock(memory.mutex);
  memory.sizes[reinterpret_cast<char*>(*p)] = size, ++memory.changes;
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* p) {
  emulated::Memory& memory = emulated::memory();
  const std::lock_guard lock(memory.mutex);
  memory.sizes.erase(static_cast<char*>(p)), ++memory.changes;
  return std::free(p), cudaSuccess;
}
template <class T>
cudaError_t cudaHostAlloc(T** p, size_t size, int) {
  return cudaMalloc(p, size);
}
inline cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
template <class T>
cudaError_t cudaHostGetDevicePointer(T** device, void* host, int) {
  *device = static_cast<T*>(host);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* p, int value, size_t size) { return std::memset(p, value, size), cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
inline cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, int) { return cudaErrorNotSupported; }
inline cudaError_t cudaIpcCloseMemHandle(void*) { return cudaErrorNotSupported; }

template <class Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters), const Parameters& given) {
  const unsigned cluster = config->numAttrs > 1 ? config->attrs[1].val.clusterDim.x : 1;
  if (!config->gridDim.x || config->gridDim.x % cluster || config->blockDim.x > emulated::kMaxThreads)
    emulated::fail("a launch that a GPU would refuse");
  emulated::stream(reinterpret_cast<int64_t>(config->stream))
      .launch({[kernel, given] { kernel(given); }, config->gridDim.x, config->blockDim.x, cluster});
  return cudaSuccess;
}

// --- the kernel's ptx.cuh ------------------------------------------------------------------------------------------------

#define WEFT_PTX_CUH

#include "call.h"

namespace weft {

inline void meet(int barrier, uint32_t threads) { emulated::meet(barrier, threads, true); }
inline void arrive(int barrier, uint32_t threads) { emulated::meet(barrier, threads, false); }
inline void wait_for_kernel_before() {}
inline void let_next_kernel_begin() {}
inline Unit load_polled(const char* p) {
  Unit u;
  emulated::check_access(p);
  emulated::yield();
  for (int i = 0; i < 4; ++i) u.w[i] = __atomic_load_n(reinterpret_cast<const uint32_t*>(p) + i, __ATOMIC_ACQUIRE);
  return u;
}
inline void store_now(char* p, const Unit& u) {
  emulated::check_access(p);
  for (int i = 0; i < 4; ++i) __atomic_store_n(reinterpret_cast<uint32_t*>(p) + i, u.w[i], __ATOMIC_RELEASE);
}
inline uint32_t at_most(uint32_t w, uint32_t most) { return std::min(w, most); }
inline void meet_cluster() {
  emulated::Cluster& cluster = *emulated::here.cluster;
  const uint32_t turn = cluster.turn;
  if (++cluster.here == cluster.threads) {
    cluster.here = 0, ++cluster.turn;
  } else {
    while (cluster.turn == turn) emulated::yield();
  }
}
inline void store_in_block(uint32_t block, uint64_t* place, uint64_t value) {
  char* const there = emulated::here.cluster->anchors[block] + (reinterpret_cast<char*>(place) - &emulated::anchor);
  __atomic_store_n(reinterpret_cast<uint64_t*>(there), value, __ATOMIC_RELEASE);
}

}  // namespace weft
