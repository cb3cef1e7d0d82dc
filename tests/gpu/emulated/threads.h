// Stands in for CUDA: blocks, their threads and what these do together.
//
// A fiber runs until it polls, or waits for its warp or its block; then the next one has its turn. Blocks run side by
// side, as do the ranks' streams. What a warp does together must find all its lanes there, in the same place: else the
// program ends.
#pragma once

namespace emulated {

struct Index {
  unsigned x = 0, y = 1, z = 1;
};

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s\n", what);
  std::abort();
}

// Whether the GPU is one before Hopper, which runs the plain form of the kernels.
inline std::atomic<bool> plain{false};
inline void take_hopper() {
  if (plain) fail("a thing of Hopper's in the plain form");
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
  uint64_t values[2][32] = {};
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
  bool moved = false;  // a fiber did something else than look whether it may go on
  jmp_buf scheduler = {};
  std::array<Warp, kMaxThreads / 32> warps;
  std::array<Meeting, 16> meetings;
  std::vector<Fiber>* fibers = nullptr;  // never gone: a destructor would be looked for whenever `here` is used
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

// Of one block after another: each new stack would take calls of the kernel.
[[noreturn]] inline void enter() {
  for (;;) {
    (*here.kernel)();
    here.running->done = true;
    yield();
  }
}

// Runs a block to its end, on this OS thread.
inline void run_block(const std::function<void()>& kernel, Index block, Index blocks, unsigned threads,
                      Cluster* cluster, unsigned rank_in_cluster) {
  blockIdx = block, gridDim = blocks, blockDim = {threads};
  here.cluster = cluster, here.kernel = &kernel;
  here.warps = {}, here.meetings = {};
  cluster->anchors[rank_in_cluster] = &anchor;
  if (!here.fibers) here.fibers = new std::vector<Fiber>;
  std::vector<Fiber>& fibers = *here.fibers;
  if (fibers.size() < threads) fibers.resize(threads);
  for (unsigned t = 0; t < threads; ++t) fibers[t].done = false;
  for (unsigned left = threads, still = 0; left;) {
    here.moved = false;
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = fibers[t];
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
      left -= fibers[t].done;
    }
    still = here.moved ? 0 : still + 1;
    if (still < 4) {
      sched_yield();
    } else {
      usleep(100);
    }
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
  values[lane] = value, here.moved = true;
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
  here.moved = true;
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
#define __shfl_up_sync(mask, value, by)    \
  emulated::value_of<decltype(value + 0)>( \
      EMULATED_LANES(value)[threadIdx.x % 32 >= unsigned(by) ? threadIdx.x % 32 - (by) : threadIdx.x % 32])
inline uint32_t emulated_max(const uint64_t* lanes) { return uint32_t(*std::max_element(lanes, lanes + 32)); }
#define __reduce_max_sync(mask, value) emulated_max(EMULATED_LANES(value))
#define __syncwarp() EMULATED_LANES(0)
#define __syncthreads() emulated::meet(0, blockDim.x, true)

inline uint32_t atomicAdd(uint32_t* p, uint32_t value) { return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST); }
inline uint32_t atomicCAS_system(uint32_t* p, uint32_t expected, uint32_t value) {
  __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline int64_t clock64() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
