// What every thread of a kernel knows of its call, and how it waits for units.
//
// Data is its own flag. Every rank owns an inbox for each group, filled with a sentinel; peers store into it; the one
// thread that wants a 16-byte unit polls it until none of its words is the sentinel, and puts the sentinel back; units.cuh
// says what becomes of data that holds it. Two inboxes take turns. That is safe because every call brings every rank a
// unit from every other, an empty-lane flag where there is no data: a peer stores into an inbox again two calls later, and
// gets there only by what this rank sent in the call between, a later kernel.
#pragma once

#include "call.h"
#include "units.cuh"

namespace weft {

constexpr int kInFlight = 4;      // polls of a thread, at least, where it has so many units to wait for
constexpr int kBookkeepers = 32;  // threads of the bookkeeping warp, beside a block's workers: see kernel.cuh

// kCopy: nothing is summed. kOneShot: sources push to every reader, which sums. kTwoShot: each part of a segment goes to
// its owner, which sums it and pushes the sum.
enum class Algorithm { kCopy, kOneShot, kTwoShot };

// What follows a sum. kNorm: residual add and RMSNorm. kQuantise: the same, and its rows in eight bits beside them,
// where they are asked for.
enum class Epilogue { kNone, kNorm, kQuantise };

// N: at least as many as ranks. kWhole: rows are whole units, aligned.
template <class Type, bool kWholeRows, int kRanks, Algorithm kHow, Epilogue kThen>
struct Context {
  using T = Type;
  using E = Elements<T>;
  static constexpr bool kWhole = kWholeRows, kNorm = kThen != Epilogue::kNone, kQuantise = kThen == Epilogue::kQuantise;
  static constexpr int N = kRanks;
  static constexpr Algorithm kAlgorithm = kHow;
  // Whether a warp's threads go on together after a wait: see `await`.
  static constexpr bool kTogether = kNorm || kAlgorithm == Algorithm::kTwoShot;

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

  // Where in an inbox unit u of the lane of rank `of` lies. In two shots the sums lie behind all lanes, as in the result.
  __device__ int64_t lane(uint32_t of, uint32_t u) const {
    return rotation + int64_t(of) * lane_bytes + int64_t(u) * kUnit;
  }
  __device__ int64_t sum_place(uint32_t u) const { return lane(uint32_t(c.n), u); }
  // Where the mark of the unit that lies there lies.
  __device__ int64_t mark(int64_t unit) const {
    return rotation + int64_t(c.inbox_units) * kUnit + (unit - rotation) / kUnit;
  }

  __device__ static bool has(Blocks b) { return int(blockIdx.x) >= b.first && int(blockIdx.x) < b.first + b.count; }
  __device__ static uint32_t workers() { return blockDim.x - kBookkeepers; }
  __device__ static uint32_t start(Blocks b) { return (blockIdx.x - b.first) * workers() + threadIdx.x; }
  __device__ static uint32_t step(Blocks b) { return b.count * workers(); }
  // Of the units that a warp's threads have at a time. Loops that wait end for whole warps.
  __device__ static uint32_t first_of_warp(uint32_t u) { return u - threadIdx.x % 32; }
};

// After many polls in vain: when this wait began (`began`, or now if that is 0), or -1 to give up, since another thread
// did, or the time is over. Not inlined: it is rarely run, and the code around it would no longer lie together.
// The error is relaxed at system scope: it orders nothing, and the host reads it whenever it looks.
__device__ __noinline__ inline int64_t wait_on(uint32_t* error, int64_t began, int64_t limit, int rank) {
  const int64_t now = clock64();
  if (!began) return now;
  if (!*reinterpret_cast<volatile uint32_t*>(error) && now - began <= limit) return began;
  atomicCAS_system(error, 0u, uint32_t(rank + 1));
  return -1;
}

// Polls P places until those with their bit in `wanted` have arrived, all loads in flight at once, and empties them.
// rank(i): who is waited for. kWholeWarp: a warp leaves the loop as one. If it falls apart there, what its threads do
// together next takes half a microsecond more; if they go on alone, to leave one by one is quicker.
// Memory order: polls are relaxed at system scope, and a unit's words order nothing but themselves. The sentinel is put
// back by a plain store: the source stores there again only after a later kernel of this rank has sent it something,
// which the end of this kernel comes before.
template <bool kWholeWarp, class K, int P, class Rank>
__device__ void await(const K& k, Unit (&got)[P], uint32_t wanted, char* (&place)[P], Rank rank) {
#pragma unroll
  for (int i = 0; i < P; ++i) asm volatile("" : "+l"(place[i]));  // the compiler would work them out again, each time
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

// Gives what `await` got the bits with which it was sent, where these are to arrive as they were.
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

// Waits for the flags of those who send nothing to this rank.
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
