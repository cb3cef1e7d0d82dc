// Sources store their units into the readers' inboxes.
//
// Memory order: each unit is stored relaxed at system scope and is its own flag (wait.cuh), and so is each mark.
// Earlier stores of a thread are not published with it, and need not be.
#pragma once

#include "wait.cuh"

namespace weft {

// A thread's data for each rank, and the units with which it begins.
template <int N>
struct Send {
  uint32_t units[N], from[N];
  Unit first[N];
};

template <class K>
__device__ void load_to_send(const K& k, uint32_t u, Send<K::N>& s) {
#pragma unroll
  for (int i = 0; i < K::N; ++i)
    if (u < s.units[i]) s.first[i] = k.load(k.c.x, s.from[i] + u);
}

template <class K>
__device__ void begin_to_send(const K& k, Send<K::N>& s) {
#pragma unroll
  for (int i = 0; i < K::N; ++i) s.units[i] = k.l.send[i], s.from[i] = k.l.from[i];
  load_to_send(k, k.start(k.c.push), s);
}

// True if counts in device memory fit the tensors and the inbox. largest: of a segment; mine: this rank's; total: of
// all.
__device__ inline bool fit(const Call& c, uint32_t largest, uint32_t mine, uint32_t total) {
  return largest <= c.max_rows && mine <= c.max_mine && total <= c.max_total;
}

// One shot, counts in device memory: each thread reads them for itself, while the bookkeeping warp lays out the rest.
// segments: of each rank, four bits each.
template <class K>
__device__ void begin_to_send_by_counts(const K& k, uint32_t segments, Send<K::N>& s) {
  const Call& c = k.c;
  uint32_t rows[K::N], mine = 0, largest = 0, total = 0, begin = 0;
#pragma unroll
  for (int i = 0; i < K::N; ++i) rows[i] = i < c.n ? uint32_t(c.device_counts[segments >> 4 * i & 15]) : 0;
  if (!k.scatters) {  // from the first row on, for any number of rows
#pragma unroll
    for (int i = 0; i < K::N; ++i) s.units[i] = c.x_units, s.from[i] = 0;
    load_to_send(k, k.start(c.push), s);
  }
#pragma unroll
  for (int i = 0; i < K::N; ++i) {
    if (i == 0 || (segments >> 4 * i & 15) != (segments >> 4 * (i - 1) & 15)) begin = total, total += rows[i];
    if (k.scatters) s.from[i] = begin * k.row_units;
    if (i == int(k.me)) mine = rows[i];
    largest = max(largest, rows[i]);
  }
  const bool fits = fit(c, largest, mine, total);
#pragma unroll
  for (int i = 0; i < K::N; ++i)
    s.units[i] = fits && i < c.n && i != int(k.me) ? (k.scatters ? rows[i] : mine) * k.row_units : 0;
  if (k.scatters) load_to_send(k, k.start(c.push), s);
}

template <class K>
__device__ void push(const K& k, Send<K::N>& s) {
  uint32_t longest = 0;
#pragma unroll
  for (int i = 0; i < K::N; ++i) longest = max(longest, s.units[i]);
  const uint32_t by = k.step(k.c.push);
#pragma unroll 1
  for (uint32_t u = k.start(k.c.push); u < longest;) {
    const int64_t at = k.lane(k.me, u);
    bool marks = false;
#pragma unroll
    for (int i = 0; i < K::N; ++i)
      if (u < s.units[i]) push_unit(k.c.inbox[i] + at, s.first[i]), marks |= needs_mark(s.first[i]);
    if (K::kAlgorithm == Algorithm::kCopy && __builtin_expect(marks, false)) {
#pragma unroll
      for (int i = 0; i < K::N; ++i)
        if (u < s.units[i] && needs_mark(s.first[i])) push_mark(k.c.inbox[i] + k.mark(at), s.first[i]);
    }
    u += by;
    if (u < longest) load_to_send(k, u, s);
  }
}

// A flag for each rank that gets no data from this one.
template <class K>
__device__ void push_empty_lanes(const K& k) {
  const uint32_t r = k.start(k.c.push);
  if (r < uint32_t(k.c.n) && r != k.me && k.l.send[r] == 0) push_unit(k.c.inbox[r] + k.lane(k.me, 0), Unit{});
}

}  // namespace weft
