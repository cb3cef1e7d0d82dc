// Collectives over peer memory in one kernel: every edge, ragged, no barrier.
//
// Data is its own flag. Every rank owns an inbox for each group, filled with a sentinel; peers store into it; the one
// thread that wants a 16-byte unit polls it until none of its words is the sentinel, and puts the sentinel back. Two
// inboxes take turns. That is safe because every call brings every rank a unit from every other, a token where there is
// no data: a peer stores into an inbox again two calls later, and gets there only by what this rank sent in the call
// between, a later kernel.
//
// One hop: sources push to every reader, which sums in rank order. Two hops: sources push each part to its owner, which
// sums and pushes the sum. Counts may live in device memory: one captured graph then serves them all. In large calls
// some blocks push while others sum or write; those that push come first, so a call ends however few run at once.
//
// A small call is as slow as what it fetches for the first time: instructions and parameters too. So each way has a
// kernel of its own, parameters are read before the wait for the kernel before, and loops are rolled.
#pragma once

#include <cuda_fp8.h>

#include "call.h"
#include "units.cuh"

namespace weft {

constexpr int kInFlight = 4;
constexpr int kWorkers = 480, kKeepers = 32;  // threads of a block: the keepers keep its books, see `exchange`
constexpr int kMaxRuns = 128;                 // of 32 units, of a row to be normalised

// kGather: nothing is summed.
enum class Way { kGather, kSum, kTwoHops };

// Sums of squares that the blocks of a cluster tell each other, by turn and run: the row's number lies in the upper
// half, 0 for none yet, the sum in the lower.
using Runs = uint64_t[2][kMaxRuns];

// After many polls in vain: when this wait began (`began`, or now if that is 0), or -1 to give up, since another thread
// did, or the time is over. Not inlined: it is rarely run, and would only part what is.
__device__ __noinline__ int64_t wait_on(uint32_t* error, int64_t began, int64_t limit, int rank) {
  const int64_t now = clock64();
  if (!began) return now;
  if (!*reinterpret_cast<volatile uint32_t*>(error) && now - began <= limit) return began;
  atomicCAS_system(error, 0u, uint32_t(rank + 1));
  return -1;
}

// Whether counts in device memory fit the tensors and the inbox.
__device__ inline bool fit(const Call& c, uint32_t most, uint32_t mine, uint32_t all) {
  return most <= c.most_rows && mine <= c.most_mine && all <= c.most_in_all;
}

// N: at least as many as ranks.
template <class T, bool kWhole, int N, Way kWay, bool kNorm>
struct Kernel {
  using E = Elements<T>;
  const Call& c;
  const Lanes& l;
  const uint32_t me = uint32_t(c.me), lane_bytes = c.lane_units[kWay == Way::kTwoHops] * kUnit;
  const uint32_t row_units = c.row_units, row_bytes = kWhole ? row_units * kUnit : c.row_bytes;
  static constexpr bool kTogether = kNorm || kWay == Way::kTwoHops;
  int64_t rotation = 0;  // bytes from an inbox of the first rotation to this call's

  __device__ Unit load(const char* base, uint32_t unit) const {
    return load_local<kWhole>(base, unit, row_units, row_bytes);
  }
  __device__ void store(char* base, uint32_t unit, const Unit& u) const {
    store_local<kWhole>(base, unit, u, row_units, row_bytes);
  }

  // Where in an inbox unit u of the lane of rank `of` lies. Sums of the second hop lie behind all, as in the result.
  __device__ int64_t lane(uint32_t of, uint32_t u) const {
    return rotation + int64_t(of) * lane_bytes + int64_t(u) * kUnit;
  }
  __device__ int64_t sum_place(uint32_t u) const { return lane(c.n, u); }

  __device__ static bool has(Blocks b) { return int(blockIdx.x) >= b.first && int(blockIdx.x) < b.first + b.count; }
  __device__ static uint32_t workers() { return blockDim.x - kKeepers; }
  __device__ static uint32_t start(Blocks b) { return (blockIdx.x - b.first) * workers() + threadIdx.x; }
  __device__ static uint32_t step(Blocks b) { return b.count * workers(); }
  // Of the units that a warp's threads have at a time. Loops that wait end for whole warps.
  __device__ static uint32_t first_of_warp(uint32_t u) { return u - threadIdx.x % 32; }

  // --- waiting ------------------------------------------------------------------------------------------------

  // Polls K places until those with their bit in `wanted` have arrived, all loads in flight at once, and empties them.
  // rank(k): who is waited for. kWholeWarp: a warp leaves the loop as one. If it falls apart there, what its threads do
  // together next takes half a microsecond more; if they go on alone, to leave one by one is quicker.
  template <bool kWholeWarp, int K, class Rank>
  __device__ void await(Unit (&got)[K], uint32_t wanted, char* (&place)[K], Rank rank) const {
#pragma unroll
    for (int k = 0; k < K; ++k) asm volatile("" : "+l"(place[k]));  // the compiler would work them out again, each time
    int64_t began = 0;
    for (uint32_t spins = 1;; ++spins) {
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (wanted >> k & 1) got[k] = load_polled(place[k]);
      bool all = true;
#pragma unroll
      for (int k = 0; k < K; ++k) all &= !(wanted >> k & 1) | arrived(got[k]);
      if (kWholeWarp ? __all_sync(~0u, all) : all) break;
      if (spins % 1024 == 0) {
        int missing = 0;
#pragma unroll
        for (int k = K - 1; k >= 0; --k)
          if (wanted >> k & 1 && !arrived(got[k])) missing = rank(k);
        if (!all) began = wait_on(c.error, began, c.limit_cycles, missing);
        if (kWholeWarp ? __any_sync(~0u, began < 0) : began < 0) break;
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (wanted >> k & 1) *reinterpret_cast<uint4*>(place[k]) = make_uint4(~0u, ~0u, ~0u, ~0u);
  }

  // The sum, in rank order, over ranks first … last - 1 of their unit u; of this rank's own, it is x's unit `own` + u.
  // mine: else this thread only comes along with its warp.
  __device__ Unit sum(bool mine, int first, int last, uint32_t own, uint32_t u) const {
    const uint32_t ranks = mine ? (1u << last) - (1u << first) : 0, wanted = ranks & ~(1u << me);
    Unit got[N];
    char* place[N];
    place[0] = c.inbox[me] + lane(0, u);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i) place[i] = place[i - 1] + lane_bytes;
      got[i] = E::nothing();
      uint32_t self = me;
      asm volatile("" : "+r"(self));  // the compiler would make one load of all, to got[me] in local memory
      if (i == self && ranks >> i & 1) got[i] = load(c.x, own + u);
    }
    await<kTogether>(got, wanted, place, [](int i) { return i; });
    float total[E::count];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float f[E::count];
      E::widen(got[i], f);
#pragma unroll
      for (int k = 0; k < E::count; ++k) total[k] = i == 0 ? f[k] : total[k] + f[k];
    }
    return E::narrow(total);
  }

  // --- pushing ------------------------------------------------------------------------------------------------

  struct Send {
    uint32_t units[N], from[N];
    Unit first[N];  // what this thread sends first
  };
  __device__ void load_to_send(uint32_t u, Send& s) const {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (u < s.units[i]) s.first[i] = load(c.x, s.from[i] + u);
  }
  __device__ void begin_to_send(Send& s) const {
#pragma unroll
    for (int i = 0; i < N; ++i) s.units[i] = l.send[i], s.from[i] = l.from[i];
    load_to_send(start(c.push), s);
  }
  // One hop, counts in device memory: each thread reads them for itself, while the keepers lay out the rest.
  // segments: of each rank, four bits each.
  __device__ void begin_by_counts(uint32_t segments, Send& s) const {
    uint32_t rows[N], mine = 0, most = 0, all = 0, begin = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) rows[i] = i < c.n ? uint32_t(c.device_counts[segments >> 4 * i & 15]) : 0;
    if (!c.scatter) {  // from the first row on, however many there are
#pragma unroll
      for (int i = 0; i < N; ++i) s.units[i] = c.x_units, s.from[i] = 0;
      load_to_send(start(c.push), s);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i == 0 || (segments >> 4 * i & 15) != (segments >> 4 * (i - 1) & 15)) begin = all, all += rows[i];
      if (c.scatter) s.from[i] = begin * row_units;
      if (i == me) mine = rows[i];
      most = max(most, rows[i]);
    }
    const bool fits = fit(c, most, mine, all);
#pragma unroll
    for (int i = 0; i < N; ++i)
      s.units[i] = fits && i < c.n && i != me ? (c.scatter ? rows[i] : mine) * row_units : 0;
    if (c.scatter) load_to_send(start(c.push), s);
  }
  __device__ void push(Send& s) const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) most = max(most, s.units[i]);
    const uint32_t by = step(c.push);
#pragma unroll 1
    for (uint32_t u = start(c.push); u < most;) {
      const int64_t at = lane(me, u);
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (u < s.units[i]) store_far(c.inbox[i] + at, s.first[i]);
      u += by;
      if (u < most) load_to_send(u, s);
    }
  }
  // For those who get nothing.
  __device__ void push_tokens() const {
    const uint32_t r = start(c.push);
    if (r < c.n && r != me && l.send[r] == 0) store_far(c.inbox[r] + lane(me, 0), Unit{});
  }

  __device__ void await_tokens() const {
    const uint32_t r = start(c.write);
    if (r >= 32) return;
    const bool none = r < c.n && r != me && l.receive[r] == 0;
    if (!__any_sync(~0u, none)) return;
    Unit token[1];
    char* place[1] = {c.inbox[me] + lane(r, 0)};
    await<true>(token, none, place, [&](int) { return int(r); });
  }

  // --- summing and writing --------------------------------------------------------------------------------------

  // Two hops: sums this rank's part and pushes it to its readers, itself among them.
  __device__ void sum_part() const {
    const uint32_t units = l.part, from = l.part_from, to = l.part_to;
    const int group = c.me / c.span * c.span, end = group + c.span;
    const int first = c.scatter ? 0 : group, last = c.scatter ? c.n : end;
    const uint32_t readers = c.scatter ? (1u << end) - (1u << group) : (1u << c.n) - 1;
#pragma unroll 1
    for (uint32_t u = start(c.sum); first_of_warp(u) < units; u += step(c.sum)) {
      const Unit total = sum(u < units, first, last, from, u);
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (u < units && readers >> i & 1) store_far(c.inbox[i] + sum_place(to + u), total);
    }
  }

  // The rank in whose strip unit u of the result lies.
  __device__ int strip_of(uint32_t u) const {
    int rank = 0;
#pragma unroll
    for (int i = 1; i < N; ++i) rank += u >= l.begin[i];
    return rank;
  }
  // Where unit u of a rank's strip lies in this rank's inbox, where it is not summed first.
  __device__ char* place_of(uint32_t rank, uint32_t u, uint32_t begin) const {
    return c.inbox[me] + (kWay == Way::kTwoHops ? sum_place(begin + u) : lane(rank, u));
  }
  __device__ bool is_own(uint32_t rank) const { return kWay == Way::kGather && rank == me; }

  // A unit of the result. mine: as for `sum`.
  __device__ Unit value(bool mine, uint32_t unit) const {
    const int rank = strip_of(unit);
    const uint32_t begin = l.begin[rank], u = unit - begin;
    if constexpr (kWay == Way::kSum) return sum(mine, rank, c.scatter ? c.n : rank + c.span, l.from[me], u);
    Unit got[1];
    char* place[1] = {place_of(rank, u, begin)};
    if (mine && is_own(rank)) got[0] = load(c.x, l.from[me] + u);
    await<kTogether>(got, mine && !is_own(rank), place, [&](int) { return rank; });
    return got[0];
  }

  // All strips at once, since all arrive at once: what waited for one would find the others there.
  __device__ void write_strips() const {
    constexpr int kEach = N < kInFlight ? kInFlight / N : 1, kUnits = N * kEach;
    const uint32_t by = step(c.write), own = l.from[me];
    uint32_t begin[N], units[N], most = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) begin[i] = l.begin[i], units[i] = l.begin[i + 1] - begin[i], most = max(most, units[i]);
#pragma unroll 1
    for (uint32_t u = start(c.write); first_of_warp(u) < most; u += kEach * by) {
      Unit got[kUnits];
      char* place[kUnits];
      uint32_t wanted = 0;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        const uint32_t i = k % N, at = u + k / N * by;
        place[k] = place_of(i, at, begin[i]);
        if (at < units[i] && is_own(i)) got[k] = load(c.x, own + at);
        if (at < units[i] && !is_own(i)) wanted |= 1u << k;
      }
      await<true>(got, wanted, place, [](int k) { return k % N; });
#pragma unroll
      for (int k = 0; k < kUnits; ++k)
        if (const uint32_t i = k % N, at = u + k / N * by; at < units[i]) store(c.out, begin[i] + at, got[k]);
    }
  }

  __device__ void write() const {
    const uint32_t units = l.out, by = step(c.write);
    if constexpr (kWay != Way::kSum)
      if (units > by) return write_strips();
#pragma unroll 1
    for (uint32_t u = start(c.write); first_of_warp(u) < units; u += by) {
      const Unit result = value(u < units, u);
      if (u < units) store(c.out, u, result);
    }
  }

  // A cluster's blocks share a row; how many threads these have, and this one's place among them.
  __device__ uint32_t cluster() const { return 1u << c.log2_cluster; }
  __device__ uint32_t step_in_row() const { return workers() << c.log2_cluster; }
  __device__ uint32_t start_in_row() const { return (blockIdx.x & cluster() - 1) * workers() + threadIdx.x; }
  __device__ uint32_t rows_at_a_time() const { return c.write.count >> c.log2_cluster; }

  // The rows of a cluster, one a turn. With two hops the result's strips take turns, since all of them arrive at once.
  struct Rows {
    uint32_t turn, strips = 1, each = 0;  // each: rows of a strip, at most
  };
  __device__ Rows rows() const {
    Rows r{(blockIdx.x - c.write.first) >> c.log2_cluster};
    if constexpr (kWay == Way::kTwoHops) {
      r.strips = c.scatter ? c.span : c.n;
      r.each = (l.out / row_units + r.strips - 1) / r.strips;
    }
    return r;
  }
  // The row of this turn, or of the next that has one; one beyond the result if none has.
  __device__ uint32_t row_of(Rows& r) const {
    if constexpr (kWay == Way::kTwoHops) {
      for (; r.turn < r.strips * r.each; r.turn += rows_at_a_time())
        if (const uint32_t row = r.turn % r.strips * r.each + r.turn / r.strips; row * row_units < l.out) return row;
      return r.strips * r.each;
    }
    return r.turn;
  }

  // What the epilogue needs of a row besides its sum: this thread's unit k.
  struct Row {
    Unit residual, weight;
    float scale;  // of quantised rows
  };
  __device__ void load_first_row(Row& r) const {
    Rows all = rows();
    load_row(row_of(all), start_in_row(), r);
  }
  __device__ void load_row(uint32_t row, uint32_t k, Row& r) const {
    if (k >= row_units || row * row_units >= l.out) return;
    r.residual = load(c.residual, row * row_units + k);
    r.weight = load(c.weight, k);
    if (c.quantised) r.scale = *c.scale;
  }

  // Tells a warp's value to every block of the cluster that has part in the row, a lane each. The value is its own flag,
  // as it is between ranks: a barrier would wait until what was pushed has come to its readers.
  __device__ void share(uint64_t* place, float value, uint32_t row) const {
    const uint32_t block = threadIdx.x % 32;
    const uint64_t both = uint64_t(row) << 32 | __float_as_uint(value);
    if (block >= cluster() || block * workers() >= row_units) return;
    if (block == (blockIdx.x & cluster() - 1)) {
      *const_cast<volatile uint64_t*>(place) = both;
      return;
    }
    store_in_block(block, place, both);
  }
  __device__ static float over_warp(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
    return value;
  }
  // The sum of what was shared about a row in `used` runs: a warp's, which leaves the loop as one, as in `await`.
  __device__ static float shared_total(const uint64_t* runs, int used, uint32_t row) {
    const int lane = int(threadIdx.x % 32);
    uint64_t v[kMaxRuns / 32];
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kMaxRuns / 32; ++i) {
        v[i] = uint64_t(row) << 32;
        if (lane + 32 * i < used) v[i] = *reinterpret_cast<const volatile uint64_t*>(runs + lane + 32 * i);
        all &= v[i] >> 32 == row;
      }
    } while (!__all_sync(~0u, all));
    float total = 0;
#pragma unroll
    for (int i = 0; i < kMaxRuns / 32; ++i) total += __uint_as_float(uint32_t(v[i]));
    return over_warp(total);
  }

  __device__ static Unit normed(const Row& r, float scale) {
    float f[E::count], w[E::count];
    E::widen(r.residual, f);
#pragma unroll
    for (int i = 0; i < E::count; ++i) f[i] *= scale;
    const Unit rounded = E::narrow(f);
    E::widen(rounded, f), E::widen(r.weight, w);
#pragma unroll
    for (int i = 0; i < E::count; ++i) f[i] *= w[i];
    return E::narrow(f);
  }

  // A unit of a normalised row in eight bits (OCP FP8 E4M3), saturated.
  __device__ void quantise(uint32_t row, uint32_t k, const Unit& unit, float scale) const {
    float f[E::count];
    uint8_t q[E::count];
    E::widen(unit, f);
#pragma unroll
    for (int i = 0; i < E::count; ++i) q[i] = __nv_cvt_float_to_fp8(__fdiv_rn(f[i], scale), __NV_SATFINITE, __NV_E4M3);
    const uint32_t width = row_bytes / sizeof(T), at = k * E::count;
    char* out = c.quantised + int64_t(row) * width + at;
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < E::count; i += 4)
        *reinterpret_cast<uint32_t*>(out + i) = q[i] | q[i + 1] << 8 | q[i + 2] << 16 | uint32_t(q[i + 3]) << 24;
    } else {
#pragma unroll
      for (int i = 0; i < E::count; ++i)
        if (at + i < width) out[i] = char(q[i]);
    }
  }

  // residual_out = residual + value; out = weight · round(residual_out / √(mean of squares + eps)): a row a cluster.
  // Squares are summed by runs of 32 units, then over runs: the same bits however many threads share a row.
  // r: loaded for the first row. Where a row has more than a unit a thread, the others are read again.
  __device__ void write_normed(Row& r, Runs& runs) const {
    const uint32_t units = l.out, by = step_in_row(), start = start_in_row();
    const int width = int(row_bytes / sizeof(T)), used = int(row_units + 31) / 32;
    const bool more = row_units > by;
    if (first_of_warp(start) >= row_units) return;  // no part in any row
    Rows all = rows();
#pragma unroll 1
    for (uint32_t row = row_of(all), count = 1; row * row_units < units; ++count) {
      // Two turns' sums lie apart: none writes what another still reads, for who reads a turn's takes part in the next.
      uint64_t* const shared = runs[count % 2];
      const uint32_t begin = row * row_units;
#pragma unroll 1
      for (uint32_t k = start; first_of_warp(k) < row_units; k += by) {
        const bool mine = k < row_units;
        float squares = 0;
        if (k >= by) load_row(row, k, r);
        const Unit sum = value(mine, begin + k);
        if (mine) {
          float f[E::count], d[E::count];
          E::widen(sum, d), E::widen(r.residual, f);
#pragma unroll
          for (int i = 0; i < E::count; ++i) f[i] += d[i];
          r.residual = E::narrow(f);
          store(c.residual_out, begin + k, r.residual);
          E::widen(r.residual, f);
#pragma unroll
          for (int i = 0; i < E::count; ++i)
            if (kWhole || int(k) * E::count + i < width) squares += f[i] * f[i];
        }
        share(&shared[k / 32], over_warp(squares), count);
      }
      const float scale = rsqrtf(shared_total(shared, used, count) * c.inverse_width + c.eps);
#pragma unroll 1
      for (uint32_t k = start; k < row_units; k += by) {
        if (more) r.residual = load(c.residual_out, begin + k), r.weight = load(c.weight, k);
        const Unit result = normed(r, scale);
        store(c.out, begin + k, result);
        if (c.quantised) quantise(row, k, result, r.scale);
      }
      all.turn += rows_at_a_time();
      row = row_of(all);
      load_row(row, start, r);
    }
  }
};

// Lanes from counts in device memory, by the keepers; all empty if they do not fit the tensors and the inbox.
// Thread i holds segment i's count, then stands for rank i, whose place is `at`; me: this rank's.
template <bool kTwoHops>
__device__ inline void read_counts(const Call& c, int i, Place at, Place me, Lanes& l) {
  const uint32_t count = i < c.segments ? uint32_t(c.device_counts[i]) : 0;
  uint32_t total = count;  // of segments up to this one
#pragma unroll
  for (int by = 1; by < kMaxRanks; by *= 2) {
    const uint32_t before = __shfl_up_sync(~0u, total, by);
    if (i >= by) total += before;
  }
  const uint32_t most = __reduce_max_sync(~0u, count), all = __shfl_sync(~0u, total, c.segments - 1);
  const uint32_t my_rows = __shfl_sync(~0u, count, me.segment);
  const bool fits = fit(c, most, my_rows, all);
  if (!fits && i == 0) atomicCAS_system(c.error, 0u, kTooManyRows);
  const uint32_t row_units = fits ? c.row_units : 0, size = count * row_units, begin = total * row_units - size;
  const Segment mine{__shfl_sync(~0u, begin, me.segment), my_rows * row_units};
  const Segment its{__shfl_sync(~0u, begin, at.segment), __shfl_sync(~0u, size, at.segment)};
  const uint32_t out = c.scatter ? mine.units : all * row_units;
  const Lane lane = lane_of<kTwoHops>(c, i, at, me, its, mine, {});
  if (i < c.n) put(c, i, lane, l);
  if (i >= c.n && i <= kMaxRanks) l.begin[i] = out;
  if (i == 0) l.out = out;
}

// A block's last warp keeps the books, so that no worker waits for it: it lays out what counts in device memory ask for,
// and once every block has read the group's epoch, it writes the next call's. The next kernel may take its place at once
// (programmatic dependent launch), but waits for this one's end: what it sends tells its peers that.
template <class T, bool kWhole, int N, Way kWay, bool kNorm>
__global__ void __launch_bounds__(kWorkers + kKeepers, N <= 4 ? 2 : 1) exchange(const __grid_constant__ Call c) {
  __shared__ Lanes lanes;
  __shared__ uint32_t touched;
  for (uint32_t k = threadIdx.x; k < sizeof(Lanes) / 4; k += blockDim.x)
    reinterpret_cast<uint32_t*>(&lanes)[k] = reinterpret_cast<const uint32_t*>(&c.lanes)[k];
  uint32_t touch = 0;  // of every cache line of the parameters
#pragma unroll
  for (size_t k = 0; k < (sizeof(Call) - sizeof(Lanes)) / 4; k += 8) touch += reinterpret_cast<const uint32_t*>(&c)[k];
  if (threadIdx.x == 0) *const_cast<volatile uint32_t*>(&touched) = touch;
  Kernel<T, kWhole, N, kWay, kNorm> kernel{c, lanes};
  const bool worker = threadIdx.x < kernel.workers(), pushes = kernel.has(c.push) && worker;
  // Counts in device memory: with one hop it is pushed before all is laid out, with two after.
  const bool pushes_first = kWay != Way::kTwoHops && c.device_counts;
  const bool lays_out_first = kWay == Way::kTwoHops && c.device_counts;
  const int keeper = int(threadIdx.x - kernel.workers());
  const Place at = c.device_counts && !worker ? where_is(c, keeper) : Place{}, here = where_is(c, c.me);
  uint32_t segments = 0;
  if (pushes_first)
    for (int i = 0; i < c.n; ++i) segments |= uint32_t(i / c.span) << 4 * i;
  __shared__ Runs runs;  // none without kNorm
  if constexpr (kNorm)
    for (uint32_t k = threadIdx.x; k < 2 * kMaxRuns; k += blockDim.x) runs[k / kMaxRuns][k % kMaxRuns] = 0;
  __syncthreads();
  // Who tells another block something must know that it has begun. Later, this would wait for what was pushed.
  if (kNorm && c.log2_cluster) meet_cluster();

  wait_for_kernel_before();
  let_next_kernel_begin();
  const uint32_t epoch = *reinterpret_cast<volatile uint32_t*>(&c.state->epoch);
  if (c.device_counts && !worker) read_counts<kWay == Way::kTwoHops>(c, keeper, at, here, lanes);
  if (lays_out_first) __syncthreads();
  typename Kernel<T, kWhole, N, kWay, kNorm>::Send send;  // loaded while the epoch is on its way, as is the row
  typename Kernel<T, kWhole, N, kWay, kNorm>::Row row;
  if (pushes && pushes_first) {
    if constexpr (kWay != Way::kTwoHops) kernel.begin_by_counts(segments, send);
  } else if (pushes) {
    kernel.begin_to_send(send);
  }
  const bool normalises = kNorm && worker && kernel.has(c.write);
  if (normalises && !pushes_first) kernel.load_first_row(row);
  kernel.rotation = int64_t(epoch % kRotations) * c.inbox_units * kUnit;
  if (pushes) kernel.push(send);
  if (pushes_first) {
    __syncthreads();
    if (normalises) kernel.load_first_row(row);
  }
  if (!worker) {
    meet(1, blockDim.x);  // every thread of the block has read the epoch
    if (keeper == 0 && (gridDim.x == 1 || atomicAdd(&c.state->blocks_begun, 1) == gridDim.x - 1))
      c.state->blocks_begun = 0, c.state->epoch = epoch + 1;
    return;
  }
  if (pushes) kernel.push_tokens();
  arrive(1, blockDim.x);
  if constexpr (kWay == Way::kTwoHops)
    if (kernel.has(c.sum)) kernel.sum_part();
  if (!kernel.has(c.write)) return;
  kernel.await_tokens();
  if constexpr (kNorm)
    kernel.write_normed(row, runs);
  else
    kernel.write();
}

}  // namespace weft
