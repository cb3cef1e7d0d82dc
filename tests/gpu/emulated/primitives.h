// Stands in for `ptx.cuh`: what the kernels need of the machine, with the same names and at least the same order.
#pragma once

#include "runtime.h"

#define WEFT_PTX_CUH

#include "call.h"

namespace weft {

inline void sync_named(int barrier, uint32_t threads) { emulated::meet(barrier, threads, true); }
inline void arrive_named(int barrier, uint32_t threads) { emulated::meet(barrier, threads, false); }
inline void wait_for_kernel_before() {}
inline void let_next_kernel_begin() {}
inline Unit load_polled(const char* p) {
  Unit u;
  emulated::check_access(p, sizeof(Unit));
  emulated::yield();
  for (int i = 0; i < 4; ++i) u.w[i] = __atomic_load_n(reinterpret_cast<const uint32_t*>(p) + i, __ATOMIC_ACQUIRE);
  return u;
}
inline void store_published(char* p, const Unit& u) {
  emulated::check_access(p, sizeof(Unit));
  for (int i = 0; i < 4; ++i) __atomic_store_n(reinterpret_cast<uint32_t*>(p) + i, u.w[i], __ATOMIC_RELEASE);
}
inline uint32_t load_polled_mark(const char* p) {
  emulated::check_access(p, 1);
  emulated::yield();
  return __atomic_load_n(reinterpret_cast<const uint8_t*>(p), __ATOMIC_ACQUIRE);
}
inline void store_published(char* p, uint8_t mark) {
  emulated::check_access(p, 1);
  __atomic_store_n(reinterpret_cast<uint8_t*>(p), mark, __ATOMIC_RELEASE);
}
inline uint32_t min_of(uint32_t w, uint32_t limit) { return std::min(w, limit); }
inline void sync_cluster() {
  emulated::take_hopper();
  emulated::Cluster& cluster = *emulated::here.cluster;
  const uint32_t turn = cluster.turn;
  if (++cluster.here == cluster.threads) {
    cluster.here = 0, ++cluster.turn;
  } else {
    while (cluster.turn == turn) emulated::yield();
  }
}
inline char* in_block(uint32_t block, void* place) {
  return emulated::here.cluster->anchors[block] + (static_cast<char*>(place) - &emulated::anchor);
}

// A barrier in shared memory: from the lowest bit on its phase, arrivals of a phase, arrivals still to come, and bytes
// still to come, which may be fewer than none.
struct Barrier {
  uint64_t phase : 1, arrivals : 15, pending : 16;
  int64_t bytes : 32;
};
inline void change(uint64_t* word, uint32_t arrived, int64_t bytes) {
  for (uint64_t before = __atomic_load_n(word, __ATOMIC_ACQUIRE);;) {
    Barrier b = emulated::value_of<Barrier>(before);
    if (b.pending < arrived) emulated::fail("more arrivals at a barrier than it is for");
    b.pending -= arrived, b.bytes += bytes;
    if (!b.pending && !b.bytes) b.phase ^= 1, b.pending = b.arrivals;
    if (__atomic_compare_exchange_n(word, &before, emulated::bits(b), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      return;
  }
}
inline void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  Barrier b{};
  b.arrivals = b.pending = arrivals;
  __atomic_store_n(barrier, emulated::bits(b), __ATOMIC_RELEASE);
}
inline void arrive_at(uint64_t* barrier) { change(barrier, 1, 0); }
inline void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  emulated::take_hopper();
  change(barrier, 1, bytes);
}
inline bool has_passed(uint64_t* barrier, uint32_t parity) {
  emulated::yield();
  return emulated::value_of<Barrier>(__atomic_load_n(barrier, __ATOMIC_ACQUIRE)).phase != parity;
}
inline void store_in_block(uint32_t block, float* place, float value, uint64_t* barrier) {
  emulated::take_hopper();
  __atomic_store_n(reinterpret_cast<uint32_t*>(in_block(block, place)), __float_as_uint(value), __ATOMIC_RELEASE);
  change(reinterpret_cast<uint64_t*>(in_block(block, barrier)), 0, -int64_t(sizeof value));
}

}  // namespace weft
