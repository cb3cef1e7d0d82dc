// Readers sum the received units, in rank order and float32, and write the result.
#pragma once

#include "push.cuh"

namespace weft {

// The sum, in rank order, of ranks first … last - 1 of their unit u; for this rank it is x's unit `own` + u.
// mine: false: the thread only takes part in its warp's instructions.
template <class K>
__device__ Unit sum(const K& k, bool mine, int first, int last, uint32_t own, uint32_t u) {
  using E = typename K::E;
  constexpr int N = K::N;
  const uint32_t ranks = mine ? (1u << last) - (1u << first) : 0, wanted = ranks & ~(1u << k.me);
  Unit got[N];
  char* place[N];
  place[0] = k.c.inbox[k.me] + k.lane(0, u);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i) place[i] = place[i - 1] + k.lane_bytes;
    got[i] = E::nothing();
    uint32_t self = k.me;
    asm volatile("" : "+r"(self));  // the compiler would make one load of all, to got[me] in local memory
    if (uint32_t(i) == self && ranks >> i & 1) got[i] = k.load(k.c.x, own + u);
  }
  await<K::kWholeWarp>(k, got, wanted, place, [](int i) { return i; });
  float total[E::count];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float f[E::count];
    E::widen(got[i], f);
#pragma unroll
    for (int e = 0; e < E::count; ++e) total[e] = i == 0 ? f[e] : total[e] + f[e];
  }
  return E::narrow(total);
}

// Two shots: sums this rank's part and pushes it to its readers, this rank included.
template <class K>
__device__ void sum_part(const K& k) {
  const Call& c = k.c;
  const uint32_t units = k.l.part, from = k.l.part_from, to = k.l.part_to;
  const int group = c.me / c.exchange.span * c.exchange.span, end = group + c.exchange.span;
  const int first = k.scatters ? 0 : group, last = k.scatters ? c.n : end;
  const uint32_t readers = k.scatters ? (1u << end) - (1u << group) : (1u << c.n) - 1;
#pragma unroll 1
  for (uint32_t u = k.start(c.sum); k.first_of_warp(u) < units; u += k.step(c.sum)) {
    const Unit total = sum(k, u < units, first, last, from, u);
#pragma unroll
    for (int i = 0; i < K::N; ++i)
      if (u < units && readers >> i & 1) push_unit(c.inbox[i] + k.sum_place(to + u), total);
  }
}

// The rank with unit u of the result in its strip.
template <class K>
__device__ int strip_of(const K& k, uint32_t u) {
  int rank = 0;
#pragma unroll
  for (int i = 1; i < K::N; ++i) rank += u >= k.l.begin[i];
  return rank;
}

// The place of unit u of a rank's strip in this rank's inbox, where it is not summed first.
template <class K>
__device__ char* place_of_unit(const K& k, uint32_t rank, uint32_t u, uint32_t begin) {
  return k.c.inbox[k.me] + (K::kAlgorithm == Algorithm::kTwoShot ? k.sum_place(begin + u) : k.lane(rank, u));
}
template <class K>
__device__ bool is_own(const K& k, uint32_t rank) {
  return K::kAlgorithm == Algorithm::kCopy && rank == k.me;
}

// A unit of the result. mine: as for `sum`.
template <class K>
__device__ Unit value(const K& k, bool mine, uint32_t unit) {
  const int rank = strip_of(k, unit);
  const uint32_t begin = k.l.begin[rank], u = unit - begin;
  if constexpr (K::kAlgorithm == Algorithm::kOneShot)
    return sum(k, mine, rank, k.scatters ? k.c.n : rank + k.c.exchange.span, k.l.from[k.me], u);
  Unit got[1];
  char* place[1] = {place_of_unit(k, uint32_t(rank), u, begin)};
  if (mine && is_own(k, uint32_t(rank))) got[0] = k.load(k.c.x, k.l.from[k.me] + u);
  const bool wanted = mine && !is_own(k, uint32_t(rank));
  await<K::kWholeWarp>(k, got, wanted, place, [&](int) { return rank; });
  restore(k, got, wanted, place, [&](int) { return rank; });
  return got[0];
}

// All strips at once, since all arrive at once: a thread that waited for one would find the others there.
template <class K>
__device__ void write_strips(const K& k) {
  constexpr int N = K::N, kEach = N < kInFlight ? kInFlight / N : 1, kUnits = N * kEach;
  const uint32_t by = k.step(k.c.write), own = k.l.from[k.me];
  uint32_t begin[N], units[N], longest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i)
    begin[i] = k.l.begin[i], units[i] = k.l.begin[i + 1] - begin[i], longest = max(longest, units[i]);
#pragma unroll 1
  for (uint32_t u = k.start(k.c.write); k.first_of_warp(u) < longest; u += kEach * by) {
    Unit got[kUnits];
    char* place[kUnits];
    uint32_t wanted = 0;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const uint32_t i = j % N, at = u + j / N * by;
      place[j] = place_of_unit(k, i, at, begin[i]);
      if (at < units[i] && is_own(k, i)) got[j] = k.load(k.c.x, own + at);
      if (at < units[i] && !is_own(k, i)) wanted |= 1u << j;
    }
    await<true>(k, got, wanted, place, [](int j) { return j % N; });
    restore(k, got, wanted, place, [](int j) { return j % N; });
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
      if (const uint32_t i = j % N, at = u + j / N * by; at < units[i]) k.store(k.c.out, begin[i] + at, got[j]);
  }
}

template <class K>
__device__ void write(const K& k) {
  const uint32_t units = k.l.out, by = k.step(k.c.write);
  if constexpr (K::kAlgorithm != Algorithm::kOneShot)
    if (units > by) return write_strips(k);
#pragma unroll 1
  for (uint32_t u = k.start(k.c.write); k.first_of_warp(u) < units; u += by) {
    const Unit result = value(k, u < units, u);
    if (u < units) k.store(k.c.out, u, result);
  }
}

}  // namespace weft
