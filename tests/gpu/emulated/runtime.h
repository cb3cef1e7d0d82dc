// Stands in for CUDA's runtime: memory, streams, launches.
#pragma once

#include "threads.h"

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
// Ends the program unless an access of so many bytes at p is one of allocated memory, aligned.
inline void check_access(const char* p, size_t bytes) {
  static thread_local std::map<const char*, size_t> known;
  static thread_local uint64_t changes = 0;
  if (changes != memory().changes) {
    const std::lock_guard lock(memory().mutex);
    known = memory().sizes, changes = memory().changes;
  }
  auto after = known.upper_bound(p);
  const bool inside = after != known.begin() && (--after, p + bytes <= after->first + after->second);
  if (!inside || reinterpret_cast<uintptr_t>(p) % bytes) fail("an access beyond every arena, or not aligned");
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
struct cudaFuncAttributes {
  int ptxVersion;
};
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
enum { cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared };

namespace emulated {

inline unsigned cluster_of(const cudaLaunchConfig_t& config) {
  for (int i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) return config.attrs[i].val.clusterDim.x;
  return 1;
}

}  // namespace emulated

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
  *clusters = int(emulated::kProcessors / emulated::cluster_of(*config));
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = emulated::plain ? 80 : 90;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }
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
  const unsigned cluster = emulated::cluster_of(*config);
  if (config->numAttrs) emulated::take_hopper();
  if (!config->gridDim.x || config->gridDim.x % cluster || config->blockDim.x > emulated::kMaxThreads)
    emulated::fail("a launch that a GPU would refuse");
  emulated::stream(reinterpret_cast<int64_t>(config->stream))
      .launch({[kernel, given] { kernel(given); }, config->gridDim.x, config->blockDim.x, cluster});
  return cudaSuccess;
}
