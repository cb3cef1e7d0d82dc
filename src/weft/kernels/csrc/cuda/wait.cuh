// A thread's view of its call, and how it waits for units.
//
// Data is its own flag. Each rank owns an inbox for each group, filled with a sentinel, and peers store into it. The
// one thread that wants a 16-byte unit polls it until none of its words is the sentinel, and then puts the sentinel
// back. units.cuh says how data that equals the sentinel is sent. Two inboxes alternate. That is safe because each call
// brings each rank a unit from each other rank, an empty-lane flag where there is no data: a peer stores into an inbox
// again two calls later, which it reaches only after the data that this rank sent in the call between, a later kernel.
#pragma once

#include "call.h"
#include "units.cuh"

namespace weft {

constexpr int kInFlight = 4;      // minimum polls of a thread at a time, if it waits for that many units
constexpr int kBookkeepers = 32;  // threads of the bookkeeping warp, in addition to a block's workers: see kernel.cuh

// kCopy: nothing is summed. kOneShot: sources push to all readers, and each reader sums. kTwoShot: each part of a
// segment goes to its owner, which sums it and pushes the sum.
enum class Algorithm { kCopy, kOneShot, kTwoShot };

// The epilogue of a sum. kNorm: residual add and RMSNorm. kQuantise: the same, and also its rows in eight bits,
// if the call asks for them.
enum class Epilogue { kNone, kNorm, kQuantise };

// N: at least the number of ranks. kWhole: rows are whole units, aligned.
template <class Type, bool kWholeRows, int kRanks, Algorithm kHow, Epilogue kThen>
struct Context {
  using T = Type;
  using E = Elements<T>;
  static constexpr bool kWhole = kWholeRows, kNorm = kThen != Epilogue::kNone, kQuantise = kThen == Epilogue::kQuantise;
  static constexpr int N = kRanks;
  static constexpr Algorithm kAlgorithm = kHow;
  // True if a warp's threads continue as one after a wait: see `await`.
  static constexpr bool kWholeWarp = kNorm || kAlgorithm == Algorithm::kTwoShot;

  const Call& c;
  const Lanes& l;
  const uint32_t me = uint32_t(c.me), lane_bytes = c.lane_units[kAlgorithm == Algorithm::kTwoShot] * kUnit;
  const uint32_t row_units = c.row_units, row_bytes = kWhole ? row_units * kUnit : c.row_bytes;
  const bool scatters = c.exchange.direction == Direction::kScatter;
  int64_t rotation = 0;  // bytes from an inbox of the first rotation to this call's

  __device__ Unit load(const char* base, uint32_t unit) const {
    return load_local<kWhole>(base, unit, row_units, row_bytes);
  }
  __device__ void store(char* base, uint32_t unit, const Unit& u) const {
    store_local<kWhole>(base, unit, u, row_units, row_bytes);
  }

  // The place in an inbox of unit u of the lane of rank `of`. In two shots the sums lie behind all lanes, as in the
  // result.
  __device__ int64_t lane(uint32_t of, uint32_t u) const {
    return rotation + int64_t(of) * lane_bytes + int64_t(u) * kUnit;
  }
  __device__ int64_t sum_place(uint32_t u) const { return lane(uint32_t(c.n), u); }
  // The place of that unit's mark.
  __device__ int64_t mark(int64_t unit) const {
    return rotation + int64_t(c.inbox_units) * kUnit + (unit - rotation) / kUnit;
  }

  __device__ static bool has(Blocks b) { return int(blockIdx.x) >= b.first && int(blockIdx.x) < b.first + b.count; }
  __device__ static uint32_t workers() { return blockDim.x - kBookkeepers; }
  __device__ static uint32_t start(Blocks b) { return (blockIdx.x - b.first) * workers() + threadIdx.x; }
  __device__ static uint32_t step(Blocks b) { return b.count * workers(); }
  // Number of units that a warp's threads have at a time. Loops that wait end for whole warps.
  __device__ static uint32_t first_of_warp(uint32_t u) { return u - threadIdx.x % 32; }
};

// After many polls without success: the time when this wait began (`began`, or now if that is 0), or -1 to give up,
// since another thread did, or the time is over. Not inlined: it is rarely run, and inlining would spread the code
// around it. The error is relaxed at system scope: it orders nothing, and the host may read it at any time.
__device__ __noinline__ inline int64_t wait_on(uint32_t* error, int64_t began, int64_t limit, int rank) {
  const int64_t now = clock64();
  if (!began) return now;
  if (!*reinterpret_cast<volatile uint32_t*>(error) && now - began <= limit) return began;
  atomicCAS_system(error, 0u, uint32_t(rank + 1));
  return -1;
}

// Polls P places until those with their bit in `wanted` have arrived, all loads in flight at once, and empties them.
// rank(i): the rank that is waited for. kWholeWarp: a warp leaves the loop as one. If its threads leave the loop one by
// one, their next common step costs half a microsecond more; if they continue alone, leaving one by one is faster.
// Memory order: polls are relaxed at system scope, and a unit's words order nothing but themselves. The sentinel is put
// back by a plain store: the source stores there again only after a later kernel of this rank has sent it data, and
// that kernel starts after the end of this one.
template <bool kWholeWarp, class K, int P, class Rank>
__device__ void await(const K& k, Unit (&got)[P], uint32_t wanted, char* (&place)[P], Rank rank) {
#pragma unroll
  for (int i = 0; i < P; ++i) asm volatile("" : "+l"(place[i]));  // the compiler would compute them again each time
  int64_t began = 0;
  for (uint32_t spins = 1;; ++spins) {
#pragma unroll
    for (int i = 0; i < P; ++i)
      if (wanted >> i & 1) got[i] = load_polled(place[i]);
    bool all = true;
#pragma unroll
    for (int i = 0; i < P; ++i) all &= !(wanted >> i & 1) | arrived(got[i]);
    if (kWholeWarp ? __all_sync(~0u, all) : all) break;
    if (spins % 1024 == 0) {
      int missing = 0;
#pragma unroll
      for (int i = P - 1; i >= 0; --i)
        if (wanted >> i & 1 && !arrived(got[i])) missing = rank(i);
      if (!all) began = wait_on(k.c.error, began, k.c.limit_cycles, missing);
      if (kWholeWarp ? __any_sync(~0u, began < 0) : began < 0) break;
    }
  }
#pragma unroll
  for (int i = 0; i < P; ++i)
    if (wanted >> i & 1) *reinterpret_cast<uint4*>(place[i]) = make_uint4(~0u, ~0u, ~0u, ~0u);
}

// The mark of a unit that has arrived with an escape; empties its place. Memory order: as `await`.
__device__ __noinline__ inline uint32_t await_mark(char* place, uint32_t* error, int64_t limit, int rank) {
  int64_t began = 0;
  for (uint32_t spins = 1;; ++spins) {
    const uint32_t mark = load_polled_mark(place);
    if (mark != kNoMark) {
      *place = char(kNoMark);
      return mark;
    }
    if (spins % 1024 == 0 && (began = wait_on(error, began, limit, rank)) < 0) return 0;
  }
}

// Restores the bits of the units that `await` got, if these must arrive as they were sent.
template <class K, int P, class Rank>
__device__ void restore(const K& k, Unit (&got)[P], uint32_t wanted, char* (&place)[P], Rank rank) {
  if constexpr (K::kAlgorithm != Algorithm::kCopy) return;
  bool marks = false;
#pragma unroll
  for (int i = 0; i < P; ++i) marks |= (wanted >> i & 1) & has_mark(got[i]);
  if (__builtin_expect(!marks, true)) return;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    if (!(wanted >> i & 1) || !has_mark(got[i])) continue;
    char* const inbox = k.c.inbox[k.me];
    const uint32_t mark = await_mark(inbox + k.mark(place[i] - inbox), k.c.error, k.c.limit_cycles, rank(i));
#pragma unroll
    for (int j = 0; j < 4; ++j) got[i].w[j] |= mark >> j & 1;  // the escape, made the sentinel
  }
}

// Waits for the flags of the ranks that send no data to this one.
template <class K>
__device__ void await_empty_lanes(const K& k) {
  const uint32_t r = k.start(k.c.write);
  if (r >= 32) return;
  const bool none = r < uint32_t(k.c.n) && r != k.me && k.l.receive[r] == 0;
  if (!__any_sync(~0u, none)) return;
  Unit flag[1];
  char* place[1] = {k.c.inbox[k.me] + k.lane(r, 0)};
  await<true>(k, flag, none, place, [&](int) { return int(r); });
}

}  // namespace weft
