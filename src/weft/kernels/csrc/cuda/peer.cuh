// Collectives over peer memory in one kernel: every edge, ragged, no barrier.
//
// Data is its own flag. Every rank owns an inbox for each group, filled with a sentinel; peers store into it, and a
// reader polls each 16-byte unit until none of its words is the sentinel. The sentinel is a NaN (all ones); data that
// holds it is sent as another NaN. Three inboxes take turns: a call uses one and refills the one of the call before.
// That is safe because every call brings every rank a unit from every other, a token where there is no data: a peer
// stores into an inbox two calls after its refill began, and it gets there only by what this rank sent in the call
// between, a later kernel.
//
// One hop: sources push to every reader, which sums in rank order. Two hops: sources push each part to its owner, which
// sums and pushes the sum. Counts may live in device memory: one captured graph then serves them all. In large calls
// some blocks push while others sum or write; those that push come first, so a call ends however few run at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace weft {

constexpr int kMaxRanks = 8, kRotations = 3, kUnit = 16, kInFlight = 4;
constexpr int kWorkers = 480, kKeepers = 32;  // threads of a block: the keepers keep its books, see `exchange`
constexpr int kMaxUnitsHeld = 4, kMaxRuns = 128;  // of a normalised row: units a thread, runs of 32 units
constexpr uint32_t kSentinel = 0xffffffffu, kOtherNan = 0x7fff7fffu, kTooManyRows = 0x80000000u;

// A rank's memory of a group, on its own device: what the next call must know.
struct alignas(16) State {
  uint32_t epoch, used_lane[kRotations];  // units that the call in this rotation may have filled, of a lane
  uint32_t blocks_begun, used_sum[kRotations];  // and of the sums
};

// The blocks of a kernel that do one kind of work.
struct Blocks {
  int first = 0, count = 0;
};

// Who sends what, in units; from the host, or from counts in device memory.
struct Lanes {
  uint32_t send[kMaxRanks] = {};     // that this rank stores into each other rank's lane; 0: a token
  uint32_t from[kMaxRanks] = {};     // where in x they begin; this rank's own term begins at from[me]
  uint32_t receive[kMaxRanks] = {};  // that each rank has in this one's lane
  uint32_t to[kMaxRanks] = {};       // one hop: where in the result they go
  uint32_t begin[kMaxRanks + 1] = {};  // of each segment
  uint32_t part = 0, part_from = 0, part_to = 0;  // two hops: this rank's share of its group's segment, in x, in the result
  uint32_t out = 0;                  // of the result
};

struct Call {
  // How the edge cuts rows into segments, and who takes part in each.
  int segments = 0;      // of counts
  int span = 0;          // ranks that share a segment: they hold it (gathers), or want it (scatters)
  int scatter = 0;       // 1: a reader gets its own segment, summed over all ranks; 0: all segments, each over its span
  int root = -1;         // broadcast: the only source
  int exchange = 0;      // all_to_all: segments are what this rank sends, arrive what it gets
  int two_hops = 0;
  int sum_span = 0;      // consecutive ranks that a result is summed over

  int n = 0, me = 0;
  const char* x = nullptr;
  char* out = nullptr;            // [rows, width]; with an epilogue the normalised rows
  char* residual_out = nullptr;   // epilogue or null
  const char *residual = nullptr, *weight = nullptr;
  float eps = 0;
  uint32_t row_bytes = 0, row_units = 0;
  Lanes lanes;
  const int32_t* device_counts = nullptr;  // rows of each segment, in device memory: then `lanes` is not used
  int64_t x_rows = 0, out_rows = 0;        // that the tensors have room for; what device counts ask for may be less
  char* inbox[kMaxRanks] = {};             // of each rank, in this rank's address space
  uint32_t inbox_units = 0;                // of one rotation
  uint32_t lane_units[2] = {};             // a rank's part of it, with one hop and with two: these leave half to sums
  State* state = nullptr;
  uint32_t* error = nullptr;               // host memory: 1 + the rank that was waited for in vain
  int64_t limit_cycles = 0;
  Blocks push, sum, write;
  int cluster = 1;                         // blocks that share a row to be normalised
};

// Fills what concerns rank i. begin: first row of each segment; arrive: of each run received, in all_to_all.
__host__ __device__ inline void lay_out(const Call& c, const int32_t* begin, const int32_t* arrive, int i, Lanes& l) {
  const int g = i / c.span, mine = c.me / c.span;
  const auto first = [&](int s) { return uint32_t(begin[s]) * c.row_units; };
  const auto units = [&](int s) { return first(s + 1) - first(s); };
  const auto part_begin = [&](int r) {
    const uint32_t each = (units(r / c.span) + c.span - 1) / c.span * (r % c.span);
    return each < units(r / c.span) ? each : units(r / c.span);
  };
  const auto part_end = [&](int r) { return r % c.span == c.span - 1 ? units(r / c.span) : part_begin(r + 1); };
  if (c.two_hops) {
    const bool shares = c.scatter || g == mine;
    l.send[i] = shares ? part_end(i) - part_begin(i) : 0;
    l.receive[i] = shares ? part_end(c.me) - part_begin(c.me) : 0;
    l.from[i] = (c.scatter ? first(g) : 0) + part_begin(i);
  } else if (c.root >= 0) {
    l.send[i] = c.me == c.root ? units(0) : 0;
    l.receive[i] = i == c.root ? units(0) : 0;
  } else if (c.exchange) {
    l.send[i] = units(i), l.from[i] = first(i);
    l.receive[i] = uint32_t(arrive[i + 1] - arrive[i]) * c.row_units, l.to[i] = uint32_t(arrive[i]) * c.row_units;
  } else if (c.scatter) {
    l.send[i] = units(g), l.from[i] = first(g), l.receive[i] = units(mine);
  } else {
    l.send[i] = units(mine), l.receive[i] = units(g), l.to[i] = first(g);
  }
  if (i != c.me) return;
  l.send[i] = 0;
  for (int s = 0; s <= c.segments; ++s) l.begin[s] = first(s);
  if (c.two_hops) {
    l.part = part_end(i) - part_begin(i), l.part_from = l.from[i];
    l.part_to = (c.scatter ? 0 : first(g)) + part_begin(i);
  }
  l.out = c.exchange ? uint32_t(arrive[c.n]) * c.row_units : c.scatter ? units(mine) : first(c.segments);
}

struct Unit {
  uint32_t w[4];
};

__device__ inline Unit load_polled(const char* p) {
  Unit u;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(u.w[0]), "=r"(u.w[1]), "=r"(u.w[2]), "=r"(u.w[3])
               : "l"(p)
               : "memory");
  return u;
}
__device__ inline void store_far(char* p, Unit u) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (u.w[i] == kSentinel) u.w[i] = kOtherNan;
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(u.w[0]), "r"(u.w[1]), "r"(u.w[2]),
               "r"(u.w[3])
               : "memory");
}
__device__ inline bool arrived(const Unit& u) {
  return u.w[0] != kSentinel && u.w[1] != kSentinel && u.w[2] != kSentinel && u.w[3] != kSentinel;
}
// By value: `?:` on units would choose an address, and so keep them in memory.
__device__ inline Unit choose(bool first, Unit a, Unit b) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a.w[i] = first ? a.w[i] : b.w[i];
  return a;
}

// Named barriers: of so many threads of the block.
__device__ inline void meet(int barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive(int barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

template <class T>
struct Elements;  // of a unit, as floats
template <>
struct Elements<float> {
  static constexpr int count = 4;
  __device__ static void widen(const Unit& u, float* f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] = __uint_as_float(u.w[i]);
  }
  __device__ static Unit narrow(const float* f) {
    Unit u;
#pragma unroll
    for (int i = 0; i < 4; ++i) u.w[i] = __float_as_uint(f[i]);
    return u;
  }
};
template <>
struct Elements<__nv_bfloat16> {
  static constexpr int count = 8;
  __device__ static void widen(const Unit& u, float* f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(u.w[i] << 16);
      f[2 * i + 1] = __uint_as_float(u.w[i] & 0xffff0000u);
    }
  }
  __device__ static Unit narrow(const float* f) {
    Unit u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
      u.w[i] = reinterpret_cast<const uint32_t&>(two);
    }
    return u;
  }
};
template <>
struct Elements<__half> {
  static constexpr int count = 8;
  __device__ static void widen(const Unit& u, float* f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __half22float2(reinterpret_cast<const __half2&>(u.w[i]));
      f[2 * i] = two.x;
      f[2 * i + 1] = two.y;
    }
  }
  __device__ static Unit narrow(const float* f) {
    Unit u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 two = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
      u.w[i] = reinterpret_cast<const uint32_t&>(two);
    }
    return u;
  }
};

// kWhole: rows are whole units and tensors are aligned to them; else they go byte by byte. N: at least as many as ranks.
template <class T, bool kWhole, int N>
struct Kernel {
  using E = Elements<T>;
  const Call& c;
  const Lanes& counted;  // in shared memory, where counts live on the device
  uint32_t rotation;

  __device__ uint32_t send(int i) const { return c.device_counts ? counted.send[i] : c.lanes.send[i]; }
  __device__ uint32_t from(int i) const { return c.device_counts ? counted.from[i] : c.lanes.from[i]; }
  __device__ uint32_t receive(int i) const { return c.device_counts ? counted.receive[i] : c.lanes.receive[i]; }
  __device__ uint32_t to(int i) const { return c.device_counts ? counted.to[i] : c.lanes.to[i]; }
  __device__ uint32_t begin(int s) const { return c.device_counts ? counted.begin[s] : c.lanes.begin[s]; }
  __device__ uint32_t out_units() const { return c.device_counts ? counted.out : c.lanes.out; }

  // --- where things are ---------------------------------------------------------------------------------------

  // A tensor's unit, counted from its first row on.
  __device__ Unit load_local(const char* base, uint32_t unit) const {
    Unit u{};
    if constexpr (kWhole) {
      const uint4 v = *reinterpret_cast<const uint4*>(base + int64_t(unit) * kUnit);
      u.w[0] = v.x, u.w[1] = v.y, u.w[2] = v.z, u.w[3] = v.w;
    } else {
      const uint32_t k = unit % c.row_units * kUnit, bytes = min(uint32_t(kUnit), c.row_bytes - k);
      const char* p = base + int64_t(unit / c.row_units) * c.row_bytes + k;
      for (uint32_t i = 0; i < bytes; ++i) u.w[i / 4] |= uint32_t(uint8_t(p[i])) << (8 * (i % 4));
    }
    return u;
  }
  __device__ void store_local(char* base, uint32_t unit, const Unit& u) const {
    if constexpr (kWhole) {
      *reinterpret_cast<uint4*>(base + int64_t(unit) * kUnit) = make_uint4(u.w[0], u.w[1], u.w[2], u.w[3]);
    } else {
      const uint32_t k = unit % c.row_units * kUnit, bytes = min(uint32_t(kUnit), c.row_bytes - k);
      char* p = base + int64_t(unit / c.row_units) * c.row_bytes + k;
      for (uint32_t i = 0; i < bytes; ++i) p[i] = char(u.w[i / 4] >> (8 * (i % 4)));
    }
  }

  // Unit of the lane that `of` fills in this call's inbox of `rank`.
  __device__ char* lane(int rank, int of, uint32_t unit) const {
    return c.inbox[rank] +
           (int64_t(rotation) * c.inbox_units + int64_t(of) * c.lane_units[c.two_hops] + unit) * kUnit;
  }
  // Sums of the second hop lie behind the lanes, as the result does in its tensor.
  __device__ char* sum_place(int rank, uint32_t unit) const { return lane(rank, c.n, unit); }

  __device__ static bool has(Blocks b) { return int(blockIdx.x) >= b.first && int(blockIdx.x) < b.first + b.count; }
  __device__ static uint32_t workers() { return blockDim.x - kKeepers; }
  __device__ static uint32_t start(Blocks b) { return (blockIdx.x - b.first) * workers() + threadIdx.x; }
  __device__ static uint32_t step(Blocks b) { return b.count * workers(); }

  // --- waiting ------------------------------------------------------------------------------------------------

  // Polls K places until all that are wanted have arrived, all loads in flight at once. rank(k): who is waited for.
  template <int K, class Wanted, class Place, class Rank>
  __device__ void await(Unit (&got)[K], Wanted wanted, Place place, Rank rank) const {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (wanted(k)) got[k] = load_polled(place(k));
    int64_t began = 0;
    for (uint32_t spins = 1;; ++spins) {
      int missing = -1;
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (wanted(k) && !arrived(got[k])) missing = k, got[k] = load_polled(place(k));
      if (missing < 0) return;
      if (spins % 1024) continue;  // what follows is slow
      if (!began) began = clock64();
      if (*reinterpret_cast<volatile uint32_t*>(c.error) || clock64() - began > c.limit_cycles) {
        atomicCAS_system(c.error, 0u, uint32_t(rank(missing) + 1));
        return;
      }
    }
  }

  // M sums in rank order over ranks first … last - 1 of what lies in their lanes; `own` are this rank's terms.
  template <int M>
  __device__ void reduce(int first, int last, const uint32_t (&unit)[M], const bool (&wanted)[M], const Unit (&own)[M],
                         Unit (&sum)[M]) const {
    Unit got[M * N];
    await(
        got, [&](int k) { return wanted[k / N] && k % N >= first && k % N < last && k % N != c.me; },
        [&](int k) { return lane(c.me, k % N, unit[k / N]); }, [](int k) { return k % N; });
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float total[E::count];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i < first || i >= last) continue;
        float f[E::count];
        E::widen(choose(i == c.me, own[m], got[m * N + i]), f);
#pragma unroll
        for (int k = 0; k < E::count; ++k) total[k] = i == first ? f[k] : total[k] + f[k];
      }
      sum[m] = E::narrow(total);
    }
  }

  // --- work ---------------------------------------------------------------------------------------------------

  __device__ bool same_for_all() const { return !c.two_hops && !c.scatter && !c.exchange; }
  __device__ uint32_t most_to_send() const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) most = max(most, send(i));
    return most;
  }

  // first: where all get the same, the unit that this thread begins with.
  __device__ void push(Unit first) const {
    const uint32_t most = most_to_send();
    if (same_for_all()) {
      for (uint32_t u = start(c.push); u < most; u += step(c.push)) {
        const Unit v = u < step(c.push) ? first : load_local(c.x, u);
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (u < send(i)) store_far(lane(i, c.me, u), v);
      }
    } else {
      for (uint32_t u = start(c.push); u < most; u += step(c.push)) {
        Unit v[N];
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (u < send(i)) v[i] = load_local(c.x, from(i) + u);
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (u < send(i)) store_far(lane(i, c.me, u), v[i]);
      }
    }
    const uint32_t q = start(c.push);  // tokens for those who get nothing
    if (q < c.n && q != c.me && send(q) == 0) store_far(lane(q, c.me, 0), Unit{});
  }

  __device__ void await_tokens() const {
    const uint32_t r = start(c.write);
    if (r >= c.n || r == c.me || receive(r) != 0) return;
    Unit token[1];
    await(
        token, [](int) { return true; }, [&](int) { return lane(c.me, r, 0); }, [&](int) { return r; });
  }

  // Two hops: sums this rank's part and pushes it to its readers, itself among them.
  __device__ void sum_part() const {
    const Lanes& l = c.device_counts ? counted : c.lanes;
    const uint32_t units = l.part, part_from = l.part_from, part_to = l.part_to, by = step(c.sum);
    const int group = c.me / c.span * c.span;
    const int first = c.scatter ? 0 : group, last = c.scatter ? c.n : group + c.span;
    for (uint32_t u = start(c.sum); u < units; u += 2 * by) {
      const uint32_t unit[2] = {u, u + by};
      const bool wanted[2] = {true, u + by < units};
      Unit own[2], sum[2];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        if (wanted[m]) own[m] = load_local(c.x, part_from + unit[m]);
      reduce(first, last, unit, wanted, own, sum);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (wanted[m] && i < c.n && (!c.scatter || (i >= group && i < group + c.span)))
            store_far(sum_place(i, part_to + unit[m]), sum[m]);
    }
  }

  __device__ void write_sums() const {
    const uint32_t units = out_units(), by = step(c.write);
    for (uint32_t u = start(c.write); u < units; u += kInFlight * by) {
      Unit got[kInFlight];
      await(
          got, [&](int k) { return u + k * by < units; }, [&](int k) { return sum_place(c.me, u + k * by); },
          [&](int) { return c.me; });
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        if (u + k * by < units) store_local(c.out, u + k * by, got[k]);
    }
  }

  // One hop: every lane's unit u at once, summed over each run of sum_span ranks.
  __device__ void write_lanes() const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) most = max(most, receive(i));
    for (uint32_t u = start(c.write); u < most; u += step(c.write)) {
      Unit got[N], own{};
      if (u < receive(c.me)) own = load_local(c.x, from(c.me) + u);
      await(
          got, [&](int i) { return i != c.me && u < receive(i); }, [&](int i) { return lane(c.me, i, u); },
          [](int i) { return i; });
      float total[E::count];
      int place = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (u < receive(i)) {
          const Unit term = choose(i == c.me, own, got[i]);
          if (c.sum_span == 1) {
            store_local(c.out, to(i) + u, term);
          } else {
            float f[E::count];
            E::widen(term, f);
#pragma unroll
            for (int k = 0; k < E::count; ++k) total[k] = place == 0 ? f[k] : total[k] + f[k];
            if (place == c.sum_span - 1) store_local(c.out, to(i) + u, E::narrow(total));
          }
        }
        place = place == c.sum_span - 1 ? 0 : place + 1;
      }
    }
  }

  // M units of the result, for one row of it: `segment` is that row's among gathered ones.
  template <int M>
  __device__ void values(int segment, const uint32_t (&unit)[M], const bool (&wanted)[M], Unit (&value)[M]) const {
    if (c.two_hops) {
      await(
          value, [&](int m) { return wanted[m]; }, [&](int m) { return sum_place(c.me, unit[m]); },
          [&](int) { return c.me; });
      return;
    }
    const int first = c.scatter ? 0 : segment * c.span, last = c.scatter ? c.n : first + c.span;
    const uint32_t base = c.scatter ? 0 : begin(segment);
    uint32_t u[M];
    Unit own[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      u[m] = unit[m] - base;
      if (wanted[m] && c.me >= first && c.me < last) own[m] = load_local(c.x, from(c.me) + u[m]);
    }
    reduce(first, last, u, wanted, own, value);
  }

  // residual_out = residual + value; out = weight · round(residual_out / √(mean of squares + eps)): a row a cluster.
  // Squares are summed by runs of 32 units, then over runs: the same bits however many threads and blocks share a row.
  __device__ void write_normed() const {
    __shared__ float runs[2][kMaxRuns];
    if (c.cluster > 1) asm volatile("barrier.cluster.wait;" ::: "memory");  // every block of it has begun
    const uint32_t units = out_units(), by = c.cluster * workers(), lane = threadIdx.x % 32;
    const uint32_t block = blockIdx.x - c.write.first, at = block % c.cluster * workers() + threadIdx.x;
    const int width = int(c.row_bytes / sizeof(T)), used = int(c.row_units + 31) / 32;
    int segment = 0, turn = 0;
    for (uint32_t row = block / c.cluster; row * c.row_units < units; row += c.write.count / c.cluster, turn ^= 1) {
      if (!c.scatter)
        while (row * c.row_units >= begin(segment + 1)) ++segment;
      Unit held[kMaxUnitsHeld], weight[2];  // held: the new residual
#pragma unroll
      for (int j = 0; j < kMaxUnitsHeld; ++j)
        if (at + j * by < c.row_units) {
          held[j] = load_local(c.residual, row * c.row_units + at + j * by);
          if (j < 2) weight[j] = load_local(c.weight, at + j * by);  // most rows have no more
        }
#pragma unroll
      for (int j = 0; j < kMaxUnitsHeld; j += 2) {
        if (at - lane + j * by >= c.row_units) break;  // of the whole warp
        const uint32_t k[2] = {at + j * by, at + (j + 1) * by};
        const uint32_t unit[2] = {row * c.row_units + k[0], row * c.row_units + k[1]};
        const bool wanted[2] = {k[0] < c.row_units, k[1] < c.row_units};
        Unit delta[2];
        values(segment, unit, wanted, delta);
        float squares[2] = {0, 0};
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (!wanted[m]) continue;
          float f[E::count], d[E::count];
          E::widen(held[j + m], f), E::widen(delta[m], d);
#pragma unroll
          for (int i = 0; i < E::count; ++i) f[i] += d[i];
          held[j + m] = E::narrow(f);
          store_local(c.residual_out, unit[m], held[j + m]);
          E::widen(held[j + m], f);
#pragma unroll
          for (int i = 0; i < E::count; ++i)
            if (kWhole || int(k[m]) * E::count + i < width) squares[m] += f[i] * f[i];
        }
        for (int mask = 16; mask; mask /= 2)
#pragma unroll
          for (int m = 0; m < 2; ++m) squares[m] += __shfl_xor_sync(~0u, squares[m], mask);
#pragma unroll
        for (int m = 0; m < 2; ++m)
          if (k[m] - lane < c.row_units) share(&runs[turn][k[m] / 32], squares[m]);
      }
      // Two turns' sums lie apart: none writes what another still reads.
      if (c.cluster > 1)
        asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
      else
        meet(2, workers());
      float total = 0;
      for (int i = int(lane); i < used; i += 32) total += runs[turn][i];
      for (int mask = 16; mask; mask /= 2) total += __shfl_xor_sync(~0u, total, mask);
      const float scale = rsqrtf(total / float(width) + c.eps);
#pragma unroll
      for (int j = 0; j < kMaxUnitsHeld; ++j) {
        if (at + j * by >= c.row_units) break;
        float f[E::count], w[E::count];
        E::widen(j < 2 ? weight[j % 2] : load_local(c.weight, at + j * by), w);
        E::widen(held[j], f);
#pragma unroll
        for (int i = 0; i < E::count; ++i) f[i] *= scale;
        const Unit rounded = E::narrow(f);
        E::widen(rounded, f);
#pragma unroll
        for (int i = 0; i < E::count; ++i) f[i] *= w[i];
        store_local(c.out, row * c.row_units + at + j * by, E::narrow(f));
      }
    }
  }

  // Puts a warp's value at this place of every block of the cluster, a lane each.
  __device__ void share(float* place, float value) const {
    if (c.cluster == 1) {
      if (threadIdx.x % 32 == 0) *place = value;
      return;
    }
    if (threadIdx.x % 32 >= c.cluster) return;
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(uint32_t(__cvta_generic_to_shared(place))), "r"(threadIdx.x % 32));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
  }

  // --- what the next calls need --------------------------------------------------------------------------------

  __device__ static void fill(char* base, uint32_t units) {
    const uint4 empty = make_uint4(kSentinel, kSentinel, kSentinel, kSentinel);
    for (uint32_t u = blockIdx.x * workers() + threadIdx.x; u < units; u += gridDim.x * workers())
      reinterpret_cast<uint4*>(base)[u] = empty;
  }
  __device__ void refill(uint32_t before, uint32_t used_lane, uint32_t used_sum) const {
    char* old = c.inbox[c.me] + int64_t(before) * c.inbox_units * kUnit;
    const int64_t lane_bytes = int64_t(c.lane_units[used_sum != 0]) * kUnit;
    for (int i = 0; i < c.n; ++i) fill(old + i * lane_bytes, used_lane);
    fill(old + c.n * lane_bytes, used_sum);
  }
  __device__ void hand_on(uint32_t epoch) const {
    uint32_t most = 1;  // a token
#pragma unroll
    for (int i = 0; i < N; ++i) most = max(most, receive(i));
    c.state->used_lane[rotation] = most;
    c.state->used_sum[rotation] = c.two_hops ? max(1u, out_units()) : 0;
    c.state->blocks_begun = 0;
    c.state->epoch = epoch + 1;
  }
};

// Lanes from counts in device memory, by the block's first warp; all empty if they do not fit the tensors and the inbox.
__device__ inline void read_counts(const Call& c, Lanes& lanes) {
  __shared__ int32_t begin[kMaxRanks + 1];
  const int i = int(threadIdx.x);
  if (i < 32) {
    const int count = i < c.segments ? c.device_counts[i] : 0;
    int64_t total = count;  // of segments up to this one
    for (int by = 1; by < kMaxRanks; by *= 2) {
      const int64_t before = __shfl_up_sync(~0u, total, by);
      if (i >= by) total += before;
    }
    const int most = __reduce_max_sync(~0u, count), least = __reduce_min_sync(~0u, count);
    const int mine = __shfl_sync(~0u, count, c.me / c.span);
    const int64_t all = __shfl_sync(~0u, total, c.segments - 1), units = int64_t(most) * c.row_units;
    const bool fits = c.scatter ? all <= c.x_rows && mine <= c.out_rows : all <= c.out_rows && mine <= c.x_rows;
    const bool room = (c.two_hops ? (units + c.span - 1) / c.span : units) <= c.lane_units[c.two_hops] &&
                      (!c.two_hops || all * c.row_units <= c.inbox_units / 2);
    const bool sane = least >= 0 && fits && room;
    if (!sane && i == 0) atomicCAS_system(c.error, 0u, kTooManyRows);
    if (i == 0) begin[0] = 0;
    if (i < kMaxRanks) begin[i + 1] = sane ? int(total) : 0;
    for (int k = i; k < int(sizeof(Lanes) / 4); k += 32) reinterpret_cast<uint32_t*>(&lanes)[k] = 0;
    __syncwarp();
    if (i < c.n) lay_out(c, begin, nullptr, i, lanes);
  }
  __syncthreads();
}

// A block's last warp keeps the books, so that no worker waits for it: once every block has read the group's state, it
// writes the next call's. The next kernel may take its place at once (programmatic dependent launch), but waits for
// this one's end: what it sends tells its peers that.
template <class T, bool kWhole, int N>
__global__ void __launch_bounds__(kWorkers + kKeepers, 1) exchange(const __grid_constant__ Call c) {
  __shared__ __align__(16) unsigned char room[sizeof(Lanes)];
  Lanes& counted = reinterpret_cast<Lanes&>(room);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const Unit state = load_polled(reinterpret_cast<const char*>(c.state));
  const Unit sums = load_polled(reinterpret_cast<const char*>(&c.state->blocks_begun));
  if (c.device_counts) read_counts(c, counted);
  Kernel<T, kWhole, N> kernel{c, counted, 0};
  const bool pushes = kernel.has(c.push), worker = threadIdx.x < kernel.workers();
  Unit first{};  // the unit to push first: loaded while the state is on its way
  if (pushes && worker && kernel.same_for_all() && kernel.start(c.push) < kernel.most_to_send())
    first = kernel.load_local(c.x, kernel.start(c.push));
  const uint32_t epoch = state.w[0], before = (epoch + kRotations - 1) % kRotations;
  kernel.rotation = epoch % kRotations;
  if (!worker) {
    meet(1, blockDim.x);  // every thread of the block has read the state
    if (threadIdx.x == kernel.workers() &&
        (gridDim.x == 1 || atomicAdd(&c.state->blocks_begun, 1) == gridDim.x - 1))
      kernel.hand_on(epoch);
    return;
  }
  if (c.cluster > 1) asm volatile("barrier.cluster.arrive;" ::: "memory");
  if (pushes) kernel.push(first);
  arrive(1, blockDim.x);
  const auto of_before = [&](const Unit& u) { return before == 0 ? u.w[1] : before == 1 ? u.w[2] : u.w[3]; };
  kernel.refill(before, of_before(state), of_before(sums));  // while the data travels
  if (c.two_hops && kernel.has(c.sum)) kernel.sum_part();
  if (!kernel.has(c.write)) return;
  kernel.await_tokens();
  if (c.residual)
    kernel.write_normed();
  else if (c.two_hops)
    kernel.write_sums();
  else
    kernel.write_lanes();
}

}  // namespace weft
