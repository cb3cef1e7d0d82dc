// Collectives over peer memory in one kernel: every edge, ragged, no barrier.
//
// Data is its own flag. Every rank owns an inbox for each group, filled with a sentinel; peers store into it, and a
// reader polls each 16-byte unit until none of its words is the sentinel. The sentinel is a NaN (all ones); data that
// holds it is sent as another NaN. Three inboxes take turns: a call uses one and refills the one of the call before.
// That is safe: a peer stores into an inbox two calls after its refill, and it gets there only by data that this rank
// sent in the call between, a later kernel.
//
// One hop: sources push to every reader, which sums in rank order. Two hops: sources push each part to its owner, which
// sums and pushes the sum. Counts may live in device memory: one captured graph then serves them all.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace weft {

constexpr int kMaxRanks = 8, kThreads = 512, kRotations = 3, kUnit = 16, kMaxUnitsHeld = 4;
constexpr uint32_t kSentinel = 0xffffffffu, kOtherNan = 0x7fff7fffu, kTooManyRows = 0x80000000u;

// A rank's memory of a group, on its own device: what the next call must know.
struct State {
  uint32_t epoch, blocks_done;
  uint32_t used_lane[kRotations], used_sum[kRotations];  // units that the call in this rotation may have filled
};

// How an edge cuts rows into segments, and who takes part in each.
struct Edge {
  int segments = 0;      // of counts
  int span = 0;          // ranks that share a segment: they hold it (gathers), or want it (scatters)
  int scatter = 0;       // 1: a reader gets its own segment, summed over all ranks; 0: all segments, each over its span
  int root = -1;         // broadcast: the only source
  int exchange = 0;      // all_to_all: counts are what this rank sends, received what it gets
};

struct Call {
  Edge edge;
  int n = 0, me = 0;
  const char* x = nullptr;
  char* out = nullptr;            // [rows, width]; with an epilogue the normalised rows
  char* residual_out = nullptr;   // epilogue or null
  const char *residual = nullptr, *weight = nullptr;
  float eps = 0;
  int64_t row_bytes = 0;
  const int32_t* device_counts = nullptr;  // [segments] in device memory, or null: then counts
  int64_t x_rows = 0, out_rows = 0;        // that the tensors have room for; what device counts ask for may be less
  int32_t counts[kMaxRanks] = {}, received[kMaxRanks] = {};
  char* inbox[kMaxRanks] = {};    // of each rank, in this rank's address space
  int64_t inbox_units = 0;        // of one rotation
  State* state = nullptr;
  uint32_t* error = nullptr;      // host memory: 1 + the rank that was waited for in vain
  int64_t limit_ns = 0;
  int two_hops = 0;
};

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
__device__ inline int64_t now_ns() {
  int64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
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

// A tensor's unit k of row r. Rows that are no whole units, or lie askew, go byte by byte.
template <bool kWhole>
__device__ inline Unit load_local(const char* base, int64_t row, int64_t k, int64_t row_bytes) {
  const char* p = base + row * row_bytes + k * kUnit;
  Unit u{};
  if constexpr (kWhole) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    u.w[0] = v.x, u.w[1] = v.y, u.w[2] = v.z, u.w[3] = v.w;
  } else {
    const int bytes = int(min(int64_t(kUnit), row_bytes - k * kUnit));
    for (int i = 0; i < bytes; ++i) u.w[i / 4] |= uint32_t(uint8_t(p[i])) << (8 * (i % 4));
  }
  return u;
}
template <bool kWhole>
__device__ inline void store_local(char* base, int64_t row, int64_t k, int64_t row_bytes, const Unit& u) {
  char* p = base + row * row_bytes + k * kUnit;
  if constexpr (kWhole) {
    *reinterpret_cast<uint4*>(p) = make_uint4(u.w[0], u.w[1], u.w[2], u.w[3]);
  } else {
    const int bytes = int(min(int64_t(kUnit), row_bytes - k * kUnit));
    for (int i = 0; i < bytes; ++i) p[i] = char(u.w[i / 4] >> (8 * (i % 4)));
  }
}

// The kernel's view of a call: counts read, prefixes summed.
struct Plan {
  int begin[kMaxRanks + 1];    // first row of each segment of the input (scatters) or the result (gathers)
  int arrive[kMaxRanks + 1];   // all_to_all: first row of each run received
  int64_t row_units, lane_units;
  char* mine;                  // this call's inbox
  int rotation;
};

template <class T, bool kWhole>
struct Kernel {
  const Call& c;
  const Plan& p;
  using E = Elements<T>;

  __device__ int group_of(int rank) const { return rank / c.edge.span; }
  __device__ int out_rows() const {
    if (c.edge.exchange) return p.arrive[c.n];
    if (!c.edge.scatter) return p.begin[c.edge.segments];
    return p.begin[group_of(c.me) + 1] - p.begin[group_of(c.me)];
  }
  __device__ char* lane(int rank, int of, int64_t unit) const {
    return c.inbox[rank] + (int64_t(p.rotation) * c.inbox_units + of * p.lane_units + unit) * kUnit;
  }
  // Sums of the second hop lie behind the lanes.
  __device__ char* sum_place(int rank, int64_t unit) const { return lane(rank, c.n, unit); }

  __device__ Unit poll(const char* place, int rank) const {
    Unit u = load_polled(place);
    if (arrived(u)) return u;
    const int64_t deadline = now_ns() + c.limit_ns;
    for (int i = 0;; ++i) {
      u = load_polled(place);
      if (arrived(u)) return u;
      if ((i & 255) == 255 && (*reinterpret_cast<volatile uint32_t*>(c.error) || now_ns() > deadline)) {
        atomicCAS_system(c.error, 0u, uint32_t(rank + 1));
        return u;
      }
    }
  }

  // Σ over ranks first … last - 1 of what lies in their lanes at `unit`; this rank's own term is `own`.
  __device__ Unit reduce(int first, int last, int64_t unit, const Unit& own) const {
    Unit got[kMaxRanks];
#pragma unroll
    for (int i = 0; i < kMaxRanks; ++i)  // all loads in flight before the first wait
      if (i >= first && i < last && i != c.me) got[i] = load_polled(lane(c.me, i, unit));
    float total[E::count];
    bool begun = false;
#pragma unroll
    for (int i = 0; i < kMaxRanks; ++i) {
      if (i < first || i >= last) continue;
      if (i != c.me && !arrived(got[i])) got[i] = poll(lane(c.me, i, unit), i);
      const Unit& term = i == c.me ? own : got[i];
      if (last - first == 1) return term;
      float f[E::count];
      E::widen(term, f);
#pragma unroll
      for (int k = 0; k < E::count; ++k) total[k] = begun ? total[k] + f[k] : f[k];
      begun = true;
    }
    return E::narrow(total);
  }

  // --- pushing ------------------------------------------------------------------------------------------------

  // Rows that go to rank q: first row of my input, and how many.
  __device__ void rows_for(int q, int* first, int* count) const {
    if (c.edge.scatter || c.edge.exchange) {
      const int s = c.edge.exchange ? q : group_of(q);
      *first = p.begin[s], *count = p.begin[s + 1] - p.begin[s];
    } else {
      const int s = c.edge.root >= 0 ? 0 : group_of(c.me);
      *first = 0, *count = p.begin[s + 1] - p.begin[s];
    }
  }

  __device__ void push_all() const {
    if (c.edge.root >= 0 && c.me != c.edge.root) return;
    // Peers in turn from the next one on, so that not all push to one at once.
    for (int step = 1; step < c.n; ++step) {
      const int q = (c.me + step) % c.n;
      int first, count;
      rows_for(q, &first, &count);
      const int64_t units = count * p.row_units;
      for (int64_t u = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; u < units; u += gridDim.x * int64_t(blockDim.x))
        store_far(lane(q, c.me, u), load_local<kWhole>(c.x, first + u / p.row_units, u % p.row_units, c.row_bytes));
    }
  }

  // The a-th of span even shares of a segment's units.
  __device__ void share(int64_t units, int a, int64_t* begin, int64_t* end) const {
    const int64_t each = (units + c.edge.span - 1) / c.edge.span;
    *begin = min(units, each * a), *end = min(units, each * (a + 1));
  }

  __device__ void push_parts() const {
    for (int step = 1; step < c.n; ++step) {
      const int owner = (c.me + step) % c.n;
      if (!c.edge.scatter && group_of(owner) != group_of(c.me)) continue;
      int first, count;
      rows_for(owner, &first, &count);
      int64_t begin, end;
      share(count * p.row_units, owner % c.edge.span, &begin, &end);
      for (int64_t u = begin + blockIdx.x * int64_t(blockDim.x) + threadIdx.x; u < end;
           u += gridDim.x * int64_t(blockDim.x))
        store_far(lane(owner, c.me, u - begin),
                  load_local<kWhole>(c.x, first + u / p.row_units, u % p.row_units, c.row_bytes));
    }
  }

  // --- one unit of the result ---------------------------------------------------------------------------------

  // One hop: row and unit of the result → its value.
  __device__ Unit result(int row, int64_t k) const {
    if (c.edge.exchange || (!c.edge.scatter && c.edge.root < 0)) {
      const int* begin = c.edge.exchange ? p.arrive : p.begin;
      int s = 0;
      while (row >= begin[s + 1]) ++s;
      const int from = row - begin[s], first = s * c.edge.span;
      const int64_t unit = from * p.row_units + k;
      Unit own{};
      if (c.me >= first && c.me < first + c.edge.span) {
        const int at = c.edge.exchange ? p.begin[c.me] + from : from;
        own = load_local<kWhole>(c.x, at, k, c.row_bytes);
      }
      return reduce(first, first + c.edge.span, unit, own);
    }
    const int at = c.edge.scatter ? p.begin[group_of(c.me)] + row : row;
    const Unit own = load_local<kWhole>(c.x, at, k, c.row_bytes);
    if (c.edge.root >= 0)
      return c.me == c.edge.root ? own : reduce(c.edge.root, c.edge.root + 1, row * p.row_units + k, own);
    return reduce(0, c.n, row * p.row_units + k, own);
  }

  // Two hops: sums my part and pushes it to its readers; keeps it in my own place of sums.
  __device__ void sum_part() const {
    const int s = group_of(c.me);
    const int rows = p.begin[s + 1] - p.begin[s];
    int64_t begin, end;
    share(rows * p.row_units, c.me % c.edge.span, &begin, &end);
    const int64_t shift = c.edge.scatter ? 0 : p.begin[s] * p.row_units;
    for (int64_t u = begin + blockIdx.x * int64_t(blockDim.x) + threadIdx.x; u < end;
         u += gridDim.x * int64_t(blockDim.x)) {
      const int64_t row = (c.edge.scatter ? p.begin[s] : 0) + u / p.row_units;
      const Unit own = load_local<kWhole>(c.x, row, u % p.row_units, c.row_bytes);
      const int first = c.edge.scatter ? 0 : s * c.edge.span, last = c.edge.scatter ? c.n : first + c.edge.span;
      const Unit sum = reduce(first, last, u - begin, own);
      for (int step = 0; step < c.n; ++step) {
        const int q = (c.me + step) % c.n;
        if (!c.edge.scatter || group_of(q) == s) store_far(sum_place(q, shift + u), sum);
      }
    }
  }

  __device__ Unit value(int row, int64_t k) const {
    return c.two_hops ? poll(sum_place(c.me, row * p.row_units + k), c.me) : result(row, k);
  }

  __device__ void write_all() const {
    const int64_t units = out_rows() * p.row_units;
    for (int64_t u = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; u < units; u += gridDim.x * int64_t(blockDim.x)) {
      const int row = int(u / p.row_units);
      const int64_t k = u % p.row_units;
      store_local<kWhole>(c.out, row, k, c.row_bytes, value(row, k));
    }
  }

  // residual_out = residual + value; out = weight · round(residual_out / √(mean of squares + eps)): a row a block.
  __device__ void write_normed() const {
    __shared__ float partial[kThreads / 32];
    const int rows = out_rows();
    const int width = int(c.row_bytes / sizeof(T));
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
      float held[kMaxUnitsHeld][E::count];
      float squares = 0;
#pragma unroll
      for (int j = 0; j < kMaxUnitsHeld; ++j) {
        const int64_t k = threadIdx.x + j * int64_t(blockDim.x);
        if (k >= p.row_units) break;
        float delta[E::count], residual[E::count];
        E::widen(value(row, k), delta);
        E::widen(load_local<kWhole>(c.residual, row, k, c.row_bytes), residual);
#pragma unroll
        for (int i = 0; i < E::count; ++i) residual[i] += delta[i];
        const Unit sum = E::narrow(residual);
        store_local<kWhole>(c.residual_out, row, k, c.row_bytes, sum);
        E::widen(sum, held[j]);
#pragma unroll
        for (int i = 0; i < E::count; ++i)
          if (kWhole || k * E::count + i < width) squares += held[j][i] * held[j][i];
      }
      for (int lane_mask = 16; lane_mask; lane_mask /= 2) squares += __shfl_xor_sync(~0u, squares, lane_mask);
      __syncthreads();
      if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
      __syncthreads();
      float total = 0;
      for (int i = 0; i < int(blockDim.x) / 32; ++i) total += partial[i];
      const float scale = rsqrtf(total / float(width) + c.eps);
#pragma unroll
      for (int j = 0; j < kMaxUnitsHeld; ++j) {
        const int64_t k = threadIdx.x + j * int64_t(blockDim.x);
        if (k >= p.row_units) break;
        float weight[E::count];
        E::widen(load_local<kWhole>(c.weight, 0, k, c.row_bytes), weight);
#pragma unroll
        for (int i = 0; i < E::count; ++i) held[j][i] *= scale;
        const Unit rounded = E::narrow(held[j]);
        E::widen(rounded, held[j]);
#pragma unroll
        for (int i = 0; i < E::count; ++i) held[j][i] *= weight[i];
        store_local<kWhole>(c.out, row, k, c.row_bytes, E::narrow(held[j]));
      }
    }
  }
};

__device__ inline void fill(char* base, int64_t units) {
  const uint4 empty = make_uint4(kSentinel, kSentinel, kSentinel, kSentinel);
  for (int64_t u = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; u < units; u += gridDim.x * int64_t(blockDim.x))
    reinterpret_cast<uint4*>(base)[u] = empty;
}

// Whether counts read from device memory stay within the tensors and the inbox.
__device__ inline bool fits(const Call& c, const int* begin) {
  const int total = begin[c.edge.segments];
  int most = 0;
  for (int s = 0; s < c.edge.segments; ++s) most = max(most, begin[s + 1] - begin[s]);
  const int64_t units = (c.row_bytes + kUnit - 1) / kUnit;
  const int64_t lane = c.two_hops ? (most * units + c.edge.span - 1) / c.edge.span : most * units;
  if (lane > c.inbox_units / (c.two_hops ? 2 * c.n : c.n)) return false;
  return total <= max(c.x_rows, c.out_rows) && (!c.two_hops || total * units <= c.inbox_units / 2);
}

template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads, 1) exchange(const __grid_constant__ Call c) {
  __shared__ Plan p;
  __shared__ uint32_t epoch;
  if (threadIdx.x == 0) {
    epoch = *reinterpret_cast<volatile uint32_t*>(&c.state->epoch);
    int from = 0, arrive = 0;
    for (int s = 0; s < c.edge.segments; ++s) {
      p.begin[s] = from;
      from += c.device_counts ? c.device_counts[s] : c.counts[s];
    }
    p.begin[c.edge.segments] = from;
    if (c.device_counts && !fits(c, p.begin)) {  // the same on every rank of the group: none waits for another
      for (int s = 0; s <= c.edge.segments; ++s) p.begin[s] = 0;
      atomicCAS_system(c.error, 0u, kTooManyRows);
    }
    if (c.edge.exchange)
      for (int s = 0; s < c.n; ++s) p.arrive[s] = arrive, arrive += c.received[s];
    p.arrive[c.n] = arrive;
    p.row_units = (c.row_bytes + kUnit - 1) / kUnit;
    // One hop: n lanes. Two: n lanes and the sums, which take as much as all lanes.
    p.lane_units = c.inbox_units / (c.two_hops ? 2 * c.n : c.n);
    p.rotation = int(epoch % kRotations);
  }
  __syncthreads();
  const Kernel<T, kWhole> kernel{c, p};
  if (c.two_hops)
    kernel.push_parts();
  else
    kernel.push_all();
  // The inbox of the call before gets its sentinels back while the data travels.
  const int before = int((epoch + kRotations - 1) % kRotations);
  const uint32_t used_lane = c.state->used_lane[before], used_sum = c.state->used_sum[before];
  char* old = c.inbox[c.me] + int64_t(before) * c.inbox_units * kUnit;
  const bool had_two = used_sum != 0;
  const int64_t old_lane = c.inbox_units / (had_two ? 2 * c.n : c.n);
  for (int i = 0; i < c.n; ++i) fill(old + i * old_lane * kUnit, used_lane);
  if (had_two) fill(old + c.n * old_lane * kUnit, used_sum);
  if (c.two_hops) kernel.sum_part();
  if (c.residual)
    kernel.write_normed();
  else
    kernel.write_all();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&c.state->blocks_done, 1) == gridDim.x - 1) {
      int most = 0;  // rows that a lane may have received
      for (int s = 0; s < c.edge.segments; ++s) most = max(most, p.begin[s + 1] - p.begin[s]);
      if (c.edge.exchange)
        for (int s = 0; s < c.n; ++s) most = max(most, p.arrive[s + 1] - p.arrive[s]);
      const int64_t units = most * p.row_units;
      c.state->used_lane[p.rotation] = uint32_t(c.two_hops ? (units + c.edge.span - 1) / c.edge.span : units);
      c.state->used_sum[p.rotation] = uint32_t(c.two_hops ? max(int64_t(1), kernel.out_rows() * p.row_units) : 0);
      c.state->blocks_done = 0;
      c.state->epoch = epoch + 1;
    }
  }
}

}  // namespace weft
