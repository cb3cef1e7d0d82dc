// The protocol that keeps the ranks of a group in step: one counter for each rank and group, its phase, and nothing
// else.
//
// Invariant: peers read what a rank wrote in phase p only after they have waited for p and before they publish p + 1. A
// rank overwrites it only after it has waited for p + 1. So two buffers, by the phase's parity, are enough.
//
// Memory order: `publish` releases all that its rank stored before it, and `Waiter::wait` acquires it, so plain loads
// and stores around them are ordered between ranks. Both are also sequentially consistent with `Line::sleepers`: either
// the publisher sees the sleeper or the sleeper sees the phase, so no wake-up is lost.
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace weft {

// A rank's note of its call, which it publishes with the call's first phase; kept by the phase's parity, as slots are.
struct Note {
  uint32_t signature;  // of the call: all ranks must make the same
  uint32_t chunks;     // of this rank's data
  int64_t x, out;      // where its input and its result lie in the shared arena; -1: they do not
};

struct alignas(64) Line {
  std::atomic<uint32_t> phase;
  std::atomic<uint32_t> sleepers;
  Note notes[2];
};
static_assert(sizeof(Line) == 64 && std::atomic<uint32_t>::is_always_lock_free);

struct PeerLostError : std::runtime_error {
  explicit PeerLostError(int lost) : std::runtime_error(std::to_string(lost)) {}
};
struct TimeoutError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct CallError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while the word holds `value`, at most `ns`. Orders no memory: the caller loads the word again. This is not the
// private form of the call, since the word is shared between processes.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t value, long ns) {
  const timespec limit{0, ns};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, nullptr, 0);
}
inline void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

// Publishes that this rank has reached a phase. Release: a rank that waits for the phase sees what this rank stored
// before it; stores past the cache need stream_fence before. Sequentially consistent: `sleepers` is loaded after the
// store.
inline void publish(Line& mine, uint32_t phase) {
  mine.phase.store(phase, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst)) futex_wake_all(&mine.phase);
}

// Phases wrap around: only their difference counts, and it never exceeds two.
inline bool reached(uint32_t phase, uint32_t wanted) { return int32_t(phase - wanted) >= 0; }

// How a rank waits: it spins, yields its core for a while, then sleeps in short slices, between which it checks whether
// a rank is gone. A time limit ends the yields, not their number: on a busy core each may take milliseconds.
struct Waiter {
  int spins = 0;
  double yield_s = 0.002, timeout_s = 60;
  std::atomic<int32_t>* lost = nullptr;   // shared: 1 + the first rank known to be gone
  std::atomic<uint32_t>* left = nullptr;  // shared: bit r: rank r has left: lost only to a rank that waits for it
  std::vector<pollfd> peers;              // a pidfd of each other process, -1 if it has none
  void (*interrupt)() = nullptr;          // may throw: lets Ctrl-C end a wait

  // Returns once `rank` has published the phase. Acquire: what that rank stored before is then visible. Throws
  // PeerLostError, TimeoutError, or the exception of `interrupt`.
  void wait(Line& line, uint32_t wanted, int rank) {
    for (int i = 0; i < spins; ++i) {
      if (reached(line.phase.load(std::memory_order_acquire), wanted)) return;
      pause_cpu();
    }
    for (const double until = now_s() + yield_s; now_s() < until; sched_yield())
      if (reached(line.phase.load(std::memory_order_acquire), wanted)) return;
    sleep(line, wanted, rank);
  }

  // Throws if a rank is known, or now seen, to be gone. Relaxed: no later read depends on it.
  void look_around() {
    mark_the_dead();
    check_lost();
  }

  void check_lost() const {
    if (const int32_t gone = lost->load(std::memory_order_relaxed)) throw PeerLostError(gone - 1);
  }

 private:
  static constexpr long kSliceNs = 20'000'000;

  // Counts itself among the sleepers before it loads the phase, both sequentially consistent: see publish.
  void sleep(Line& line, uint32_t wanted, int rank) {
    struct Asleep {
      std::atomic<uint32_t>& count;
      explicit Asleep(std::atomic<uint32_t>& c) : count(c) { count.fetch_add(1, std::memory_order_seq_cst); }
      ~Asleep() { count.fetch_sub(1, std::memory_order_relaxed); }
    } asleep(line.sleepers);
    const double deadline = now_s() + timeout_s;
    for (;;) {
      const uint32_t phase = line.phase.load(std::memory_order_seq_cst);
      if (reached(phase, wanted)) return;
      futex_wait(&line.phase, phase, kSliceNs);
      if (reached(line.phase.load(std::memory_order_seq_cst), wanted)) return;
      look_for_the_dead(line, wanted, rank);
      if (interrupt) interrupt();
      if (now_s() > deadline) throw TimeoutError(std::to_string(rank));
    }
  }

  void look_for_the_dead(Line& line, uint32_t wanted, int rank) {
    const uint32_t gone = mark_the_dead();
    // It may have published the phase before it ended.
    if (reached(line.phase.load(std::memory_order_seq_cst), wanted)) return;
    if (gone >> rank & 1) lose(rank);
    check_lost();
  }

  // Ranks that left do not count as lost, unless a rank waits for them: gives their bits.
  uint32_t mark_the_dead() {
    const int ended = ::poll(peers.data(), peers.size(), 0);
    const uint32_t gone = left->load(std::memory_order_seq_cst);  // after the poll: a rank leaves before it ends
    for (size_t r = 0; ended > 0 && r < peers.size(); ++r)
      if (peers[r].fd >= 0 && (peers[r].revents & POLLIN) && !(gone >> r & 1)) lose(int(r));
    return gone;
  }

  void lose(int rank) {
    int32_t none = 0;
    lost->compare_exchange_strong(none, rank + 1);
  }
};

}  // namespace weft
