// Threads as ranks make the same random calls, with random delays, and check every element of every result.
//
// stress RANKS CALLS SEED DELAYS [FAULT [LAST_PHASE]]: delays 1: ranks dawdle before they publish and after they wait.
// The others are as planted.h has them. Exits with 1, and a line that says why, where a result is wrong.
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <mutex>

#include "planted.h"

// All ranks use one mapping: a race detector knows places by address.
static void* one_mapping(void* where, size_t bytes, int protection, int flags, int fd, off_t offset) {
  static std::mutex mutex;
  static void* base = nullptr;
  std::lock_guard<std::mutex> hold(mutex);
  return base ? base : base = mmap(where, bytes, protection, flags, fd, offset);
}
static int keep_mapping(void*, size_t) { return 0; }
#define mmap one_mapping
#define munmap keep_mapping
#include "calls.h"
#undef mmap
#undef munmap

using namespace weft;

namespace {

constexpr int64_t kMost = 1024;  // elements of an input
constexpr float kUntouched = -1;

struct Dawdle : NoProbe {
  Random random{0};
  bool on = false;
  void pause() {
    if (!on || random.below(8)) return;
    const uint32_t how = random.below(256);
    if (how < 200)
      for (uint32_t i = random.below(1000); i; --i) pause_cpu();
    else if (how < 252)
      sched_yield();
    else
      usleep(random.below(100));
  }
  void publish(int, uint32_t) { pause(); }
  void wait(int, int, uint32_t) { pause(); }
};

// An integer, so that sums are exact.
float value(uint32_t call, int rank, int64_t i) {
  return float((call * 7 + uint32_t(rank) * 31 + uint32_t(i) * 3) & 63);
}

Shape draw(Random& random, int groups) {
  Shape s;
  const uint32_t kind = random.below(17);
  s.kind = kind < 6    ? Kind::sum
           : kind < 8  ? Kind::scatter
           : kind < 10 ? Kind::gather
           : kind < 12 ? Kind::exchange
           : kind < 15 ? Kind::any
           : kind < 16 ? Kind::barrier
                       : Kind::merge;
  s.group = random.below(2) ? 0 : int(random.below(uint32_t(groups)));
  s.count = random.below(random.below(16) && s.kind != Kind::merge ? 40 : uint32_t(kMost) + 1);
  if (s.kind == Kind::merge) s.count /= 8;
  s.two_shot = (s.kind == Kind::sum || s.kind == Kind::any) && random.below(2);
  s.seed = random();
  const uint32_t where = random.below(4);  // all, none, or some of the inputs lie in the arena
  s.in_arena = where == 0 ? 0 : where == 1 ? random() : ~0u;
  s.over_input = s.kind == Kind::sum && random.below(4) == 0;
  return s;
}

struct Test {
  Layout layout;
  int fd;
  uint32_t calls, seed;
  bool delays;
  std::atomic<bool> failed{false};

  void fail(const char* what, uint32_t call, const Shape& s, int rank, int64_t i, float got, float wanted) {
    if (!failed.exchange(true))
      std::fprintf(stderr, "%s: call %u, kind %d, two shots %d, rank %d, element %ld: %g, not %g\n", what, call,
                   int(s.kind), s.two_shot, rank, long(i), double(got), double(wanted));
    std::exit(1);
  }

  // Of each row one rank holds something, or none: the result is what it holds. The others' outputs are not read.
  template <class E>
  void merge(E& exchange, const Shape& s, const Ranks& ranks, int me, uint32_t call) {
    const int n = int(ranks.size());
    const int64_t own_heads = 1 + s.seed % 2, dim = 1 + s.seed % 19, rows = s.count * own_heads * n;
    Merging m(s, n, own_heads, dim, call * 2 + 1);
    const auto holder = [&](int64_t row) { return int((s.seed / 64 + uint32_t(row) * 7u) % uint32_t(n + 1)); };
    for (int64_t row = 0; row < rows; ++row) {
      m.lse[size_t(row)] = holder(row) == me ? float(row % 5) : -INFINITY;
      for (int64_t d = 0; d < dim; ++d)
        m.out[size_t(row * dim + d)] = holder(row) == me ? value(call, ranks[size_t(me)], row * dim + d) : NAN;
    }
    exchange.run(m.call);
    for (int64_t i = 0; i < s.count * own_heads; ++i) {
      const int64_t row = i / own_heads * own_heads * n + me * own_heads + i % own_heads;
      const int from = holder(row);
      for (int64_t d = 0; d < dim; ++d) {
        const float got = m.own[size_t(i * dim + d)];
        const float wanted = from < n ? value(call, ranks[size_t(from)], row * dim + d) : 0;
        if (got != wanted) fail("wrong result", call, s, ranks[size_t(me)], i * dim + d, got, wanted);
      }
    }
  }

  void rank_main(int rank) {
    auto arena = std::make_shared<Arena>(fd, layout, rank);
    Waiter waiter;
    const int spins = 100;
    waiter.spins = spins;
    waiter.timeout_s = 100;
    waiter.lost = &arena->header().lost;
    Exchange<Dawdle> exchange(arena, rows_for("auto"), waiter);
    exchange.probe.random.state = uint64_t(seed) << 8 | uint64_t(rank);
    exchange.probe.on = delays;
    Random random{seed};
    const size_t room = kMost * kMaxRanks * sizeof(float);
    auto* home = static_cast<float*>(arena->pool().take(int64_t(room)));
    std::vector<float> away(kMost * kMaxRanks);
    for (uint32_t k = 0; k < calls; ++k) {
      const Shape s = draw(random, int(layout.groups.size()));
      exchange.tuning.zero_copy_bytes = random.below(2) ? 4 : 256;
      exchange.tuning.chunk_bytes = random.below(2) ? 256 : 2048;
#ifndef __SANITIZE_THREAD__  // which does not know streamed stores
      exchange.tuning.stream_slot_bytes = exchange.tuning.stream_out_bytes = random.below(2) ? 0 : 1 << 20;
#endif
      const Ranks& ranks = layout.groups[size_t(s.group)];
      const auto place = std::find(ranks.begin(), ranks.end(), rank);
      if (place == ranks.end()) continue;
      const int me = int(place - ranks.begin());
      exchange.waiter().spins = delays && exchange.probe.random.below(4) == 0 ? 0 : spins;
      exchange.waiter().yield_s = exchange.waiter().spins ? 50e-6 : 0;

      if (s.kind == Kind::merge) {
        merge(exchange, s, ranks, me, k);
        continue;
      }
      Parts parts(s, me, int(ranks.size()));
      const bool in_arena = s.in_arena >> me & 1;
      float* x = in_arena ? home : away.data();
      for (int64_t i = 0; i < parts.input; ++i) x[i] = value(k, rank, i);
      // In two shots peers read the result, so it must lie in the arena.
      const bool over_input = s.over_input && (in_arena || !s.two_shot);
      const int64_t bytes = parts.result * int64_t(sizeof(float));
      float* out = over_input ? x : static_cast<float*>(arena->pool().take(bytes));
      if (!over_input)
        for (int64_t i = 0; i < parts.result; ++i) out[i] = kUntouched;
      make(exchange, s, parts, x, out, k * 2 + 1);
      for (const Want& w : parts.wanted)
        for (int64_t i = 0; i < w.length; ++i) {
          float wanted = 0;
          for (size_t r = 0; r < ranks.size(); ++r)
            if (w.sources >> r & 1) wanted += value(k, ranks[r], w.x + i);
          if (out[w.out + i] != wanted) fail("wrong result", k, s, rank, w.out + i, out[w.out + i], wanted);
        }
      for (int64_t i = 0; !over_input && i < parts.input; ++i)
        if (x[i] != value(k, rank, i)) fail("changed input", k, s, rank, i, x[i], value(k, rank, i));
      if (!over_input) arena->pool().give(out);
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5 || argc > 7) return 2;
  if (argc > 5) planted::fault = std::atoi(argv[5]);
  if (argc > 6) planted::last_phase = uint32_t(std::atoll(argv[6]));
  Test test;
  const int world = std::atoi(argv[1]);
  test.calls = uint32_t(std::atoll(argv[2]));
  test.seed = uint32_t(std::atoi(argv[3]));
  test.delays = std::atoi(argv[4]);
  test.layout.world = world;
  test.layout.slot_bytes = 2048;
  test.layout.blocks = 2;
  test.layout.block_bytes = kMost * kMaxRanks * int64_t(sizeof(float));
  Ranks all;
  for (int r = 0; r < world; ++r) all.push_back(r);
  test.layout.groups = {all};
  for (int r = 0; r + 1 < world && world > 2; ++r) test.layout.groups.push_back({r, r + 1});
  if (world > 3) test.layout.groups.push_back({0, 1, 3});
  test.fd = shared_memory(test.layout);
  {
    Arena arena(test.fd, test.layout, 0);
    for (int r = 0; r < world; ++r)
      for (size_t g = 0; g < test.layout.groups.size(); ++g) arena.line(r, int(g)).phase = planted::last_phase;
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r)
    threads.emplace_back([&test, r] {
      try {
        test.rank_main(r);
      } catch (const std::exception& error) {  // what a rank says it calls may be overwritten as well
        std::fprintf(stderr, "wrong result: rank %d: %s\n", r, error.what());
        std::exit(1);
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::printf("%u calls of %d ranks\n", test.calls, world);
  return 0;
}
