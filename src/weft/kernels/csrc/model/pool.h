// Threads of a rank that carry out one job at a time. The caller works too, and waits only for chunks that a thread has
// claimed: a thread that the system does not run delays nothing. Idle threads spin shortly, then sleep.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace weft::model {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  using Work = void (*)(const void* job, int64_t chunk);

  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
  }
  ~Pool() {
    stop_.store(true);
    wake();
    for (auto& worker : workers_) worker.join();
  }
  int threads() const { return int(workers_.size()) + 1; }

  // Carries out chunks 0 … chunks − 1, at most 2^31, in any order.
  void run(Work work, const void* job, int64_t chunks) {
    work_.store(work, std::memory_order_relaxed);
    job_.store(job, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    state_.store(uint64_t(++epoch_) << 32 | uint64_t(chunks));
    if (sleepers_.load() > 0) wake();
    while (claim()) {
    }
    // A thread with a chunk may have lost its core: this one is of more use to others then.
    for (int spins = 0; done_.load(std::memory_order_acquire) < chunks; ++spins)
      spins < kSpins ? relax() : void(sched_yield());
  }

 private:
  // Carries out one chunk; false: no chunk is left. The state is the job's number and the number of unclaimed chunks. A
  // claim succeeds only in the state in which the job was read, and no job ends before its claimed chunks.
  bool claim() {
    uint64_t state = state_.load(std::memory_order_acquire);
    while (const auto left = uint32_t(state)) {
      const Work work = work_.load(std::memory_order_relaxed);
      const void* job = job_.load(std::memory_order_relaxed);
      const bool claimed =
          state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel, std::memory_order_acquire);
      if (!claimed) continue;
      work(job, left - 1);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  void serve() {
    pthread_setname_np(pthread_self(), "weft-rows");
    using Clock = std::chrono::steady_clock;
    auto idle = Clock::now();
    for (int spins = 0; !stop_.load(std::memory_order_relaxed); ++spins) {
      if (claim()) {
        while (claim()) {
        }
        idle = Clock::now(), spins = 0;
      }
      relax();
      if (spins % 64 || Clock::now() - idle < kSpin) continue;
      const uint32_t seen = wakes_.load();
      sleepers_.fetch_add(1);
      if (!uint32_t(state_.load()) && !stop_.load()) futex(FUTEX_WAIT_PRIVATE, seen);
      sleepers_.fetch_sub(1);
      idle = Clock::now();
    }
  }

  void wake() {
    wakes_.fetch_add(1);
    futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }
  void futex(int what, uint32_t value) { syscall(SYS_futex, &wakes_, what, value, nullptr, nullptr, 0); }

  static constexpr std::chrono::microseconds kSpin{100};  // the time between two kernels of a step
  static constexpr int kSpins = 2000;                     // as long
  std::vector<std::thread> workers_;
  uint32_t epoch_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> wakes_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<Work> work_{nullptr};
  std::atomic<const void*> job_{nullptr};
};

// The calling thread's pool: ranks may be threads of a process.
inline std::unique_ptr<Pool>& own_pool() {
  static thread_local std::unique_ptr<Pool> pool;
  return pool;
}

inline Pool& pool_of(int threads) {
  // A forked child has none of its parent's threads, and must not wait for them.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { (void)own_pool().release(); });
  (void)registered;
  auto& pool = own_pool();
  if (!pool || pool->threads() != threads) pool = std::make_unique<Pool>(threads);
  return *pool;
}

// Calls function(chunk) for each chunk, in any order, by up to `threads` threads.
template <class Function>
void parallel(int threads, int64_t chunks, const Function& function) {
  if (threads <= 1 || chunks <= 1) {
    for (int64_t i = 0; i < chunks; ++i) function(i);
    return;
  }
  pool_of(threads).run([](const void* job, int64_t chunk) { (*static_cast<const Function*>(job))(chunk); }, &function,
                       chunks);
}

}  // namespace weft::model
