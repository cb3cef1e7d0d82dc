// What it takes to hand bytes from one core to another through memory that the other has read before: one thread stores
// them by plain stores or past the cache, then the other reads them. The two ways take turns.
//
//     g++ -O2 -std=c++17 -pthread benchmarks/shared_lines.cc -o shared_lines && ./shared_lines 32768 524288
//
// Prints a line of JSON for each size and way: nanoseconds a line of 64 bytes, the 10th, 50th and 90th percentile.
#include <immintrin.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kTurns = 400;
struct alignas(64) Flag {
  std::atomic<int> turn{0};
} flags[2];

__attribute__((target("avx2"))) void copy(char* to, const char* from, size_t bytes, bool stream) {
  for (size_t i = 0; i < bytes; i += 32) {
    const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i));
    if (stream)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), x);
    else
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + i), x);
  }
  _mm_sfence();
}

char* pages(size_t bytes) {
  auto* p = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::memset(p, 1, bytes);
  return p;
}

// times[way][who]: who stores (0) or reads (1).
void play(int me, char* shared, size_t bytes, std::vector<double> (&times)[2][2]) {
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(me, &core);
  pthread_setaffinity_np(pthread_self(), sizeof core, &core);
  char* own = pages(bytes);
  int turn = 0;
  const auto meet = [&] {
    flags[me].turn.store(++turn, std::memory_order_release);
    while (flags[1 - me].turn.load(std::memory_order_acquire) < turn) _mm_pause();
  };
  for (int i = 0; i < kTurns; ++i)
    for (int way = 0; way < 2; ++way)
      for (int who = 0; who < 2; ++who) {
        meet();
        if (who != me) continue;
        const auto began = std::chrono::steady_clock::now();
        me ? copy(own, shared, bytes, false) : copy(shared, own, bytes, way == 1);
        const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
        times[way][me].push_back(took.count() * 64 / double(bytes));
      }
  meet();
  munmap(own, bytes);
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const size_t bytes = size_t(std::atol(argv[i])) / 64 * 64;
    char* shared = pages(bytes);
    std::vector<double> times[2][2];
    for (Flag& flag : flags) flag.turn = 0;
    std::thread reader(play, 1, shared, bytes, std::ref(times));
    play(0, shared, bytes, times);
    reader.join();
    munmap(shared, bytes);
    for (int way = 0; way < 2; ++way) {
      for (auto& of : times[way]) std::sort(of.begin(), of.end());
      const auto at = [&](int who, int percent) { return times[way][who][size_t(kTurns * percent / 100)]; };
      std::printf("{\"bytes\": %zu, \"stores\": \"%s\", \"store_ns\": [%.2f, %.2f, %.2f], \"read_ns\": [%.2f, %.2f, %.2f]}\n",
                  bytes, way ? "past the cache" : "plain", at(0, 10), at(0, 50), at(0, 90), at(1, 10), at(1, 50),
                  at(1, 90));
    }
  }
}
