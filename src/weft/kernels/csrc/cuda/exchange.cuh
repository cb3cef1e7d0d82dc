// Collectives over peer memory in one kernel: every edge, ragged, no barrier.
//
// Data is its own flag. Every rank owns an inbox for each group, filled with a sentinel; peers store into it, and a
// reader polls each 16-byte unit until none of its words is the sentinel. Three inboxes take turns: a call uses one and
// refills the one of the call before. That is safe because every call brings every rank a unit from every other, a
// token where there is no data: a peer stores into an inbox two calls after its refill began, and it gets there only by
// what this rank sent in the call between, a later kernel.
//
// One hop: sources push to every reader, which sums in rank order. Two hops: sources push each part to its owner, which
// sums and pushes the sum. Counts may live in device memory: one captured graph then serves them all. In large calls
// some blocks push while others sum or write; those that push come first, so a call ends however few run at once.
//
// A small call is as slow as what it fetches for the first time: instructions and parameters too. So each way has a
// kernel of its own, parameters are read before the wait for the kernel before, and loops are rolled.
#pragma once

#include "call.h"
#include "units.cuh"

namespace weft {

constexpr int kInFlight = 4;
constexpr int kWorkers = 480, kKeepers = 32;  // threads of a block: the keepers keep its books, see `exchange`
constexpr int kMaxRuns = 128;                 // of 32 units, of a row to be normalised

// kGather: nothing is summed.
enum class Way { kGather, kSum, kTwoHops };

// Named barriers: of so many threads of the block.
__device__ inline void meet(int barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive(int barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Times are in 2¹⁶ cycles. Not inlined: it is rarely run, and would only part what is.
__device__ __noinline__ bool gives_up(uint32_t* error, uint32_t begun, uint32_t limit, int rank) {
  if (!*reinterpret_cast<volatile uint32_t*>(error) && uint32_t(clock64() >> 16) - begun <= limit) return false;
  atomicCAS_system(error, 0u, uint32_t(rank + 1));
  return true;
}

// N: at least as many as ranks.
template <class T, bool kWhole, int N, Way kWay, bool kNorm>
struct Kernel {
  using E = Elements<T>;
  const Call& c;
  const Lanes& l;
  const uint32_t me = uint32_t(c.me), lane_bytes = c.lane_units[kWay == Way::kTwoHops] * kUnit;
  const uint32_t row_units = c.row_units, row_bytes = kWhole ? row_units * kUnit : c.row_bytes;
  const char* const x = c.x;
  char* const out = c.out;
  char* inbox[N];  // of each rank; once `turn` has run, of this call
  char* mine;      // this rank's

  __device__ Kernel(const Call& call, const Lanes& lanes) : c(call), l(lanes) {
#pragma unroll
    for (int i = 0; i < N; ++i) inbox[i] = call.inbox[i];
    mine = call.inbox[call.me];
  }
  __device__ void turn(uint32_t rotation) {
    const int64_t offset = int64_t(rotation) * c.inbox_units * kUnit;
#pragma unroll
    for (int i = 0; i < N; ++i) inbox[i] += offset;
    mine += offset;
  }

  __device__ Unit load(const char* base, uint32_t unit) const {
    return load_local<kWhole>(base, unit, row_units, row_bytes);
  }
  __device__ void store(char* base, uint32_t unit, const Unit& u) const {
    store_local<kWhole>(base, unit, u, row_units, row_bytes);
  }

  // Unit of the lane that rank `of` fills of an inbox. Sums of the second hop lie behind all, as in the result.
  __device__ int64_t lane(uint32_t of, uint32_t unit) const { return int64_t(of) * lane_bytes + int64_t(unit) * kUnit; }
  __device__ int64_t sum_place(uint32_t unit) const { return lane(c.n, unit); }

  __device__ static bool has(Blocks b) { return int(blockIdx.x) >= b.first && int(blockIdx.x) < b.first + b.count; }
  __device__ static uint32_t workers() { return blockDim.x - kKeepers; }
  __device__ static uint32_t start(Blocks b) { return (blockIdx.x - b.first) * workers() + threadIdx.x; }
  __device__ static uint32_t step(Blocks b) { return b.count * workers(); }

  // --- waiting ------------------------------------------------------------------------------------------------

  // Polls K units of this rank's inbox until all wanted have arrived, all loads in flight at once. rank(k): whose.
  template <int K, class Wanted, class Place, class Rank>
  __device__ void await(Unit (&got)[K], Wanted wanted, Place place, Rank rank) const {
    const uint32_t begun = uint32_t(clock64() >> 16);
    for (uint32_t spins = 0;; ++spins) {
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (wanted(k)) got[k] = load_polled(mine + place(k));
      int missing = -1;
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (wanted(k) && !arrived(got[k])) missing = k;
      if (missing < 0) return;
      if (spins % 1024 == 1023 && gives_up(c.error, begun, uint32_t(c.limit_cycles >> 16), rank(missing))) return;
    }
  }
  // M sums in rank order over ranks first … last - 1 of what lies in their lanes; `own` are this rank's terms.
  template <int M>
  __device__ void reduce(int first, int last, const uint32_t (&unit)[M], const bool (&wanted)[M], const Unit (&own)[M],
                         Unit (&sum)[M]) const {
    Unit got[M * N];
    await(
        got, [&](int k) { return wanted[k / N] && k % N >= first && k % N < last && k % N != me; },
        [&](int k) { return lane(k % N, unit[k / N]); }, [](int k) { return k % N; });
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float total[E::count];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i < first || i >= last) continue;
        float f[E::count];
        E::widen(choose(i == me, own[m], got[m * N + i]), f);
#pragma unroll
        for (int k = 0; k < E::count; ++k) total[k] = i == first ? f[k] : total[k] + f[k];
      }
      sum[m] = E::narrow(total);
    }
  }

  // --- pushing ------------------------------------------------------------------------------------------------

  // What this thread sends to each rank as its u-th.
  __device__ void load_to_send(uint32_t u, Unit (&v)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (u < l.send[i]) v[i] = load(x, l.from[i] + u);
  }
  // v: what `load_to_send` gave for the first.
  __device__ void push(Unit (&v)[N]) const {
    const uint32_t most = l.most_to_send, by = step(c.push);
#pragma unroll 1
    for (uint32_t u = start(c.push); u < most;) {
      const int64_t at = lane(me, u);
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (u < l.send[i]) store_far(inbox[i] + at, v[i]);
      u += by;
      if (u < most) load_to_send(u, v);
    }
    const uint32_t r = start(c.push);  // tokens for those who get nothing
    if (r >= c.n || r == me || l.send[r] != 0) return;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i == r) store_far(inbox[i] + lane(me, 0), Unit{});
  }

  __device__ void await_tokens() const {
    const uint32_t r = start(c.write);
    if (r >= c.n || r == me || l.receive[r] != 0) return;
    Unit token[1];
    await(
        token, [](int) { return true; }, [&](int) { return lane(r, 0); }, [&](int) { return r; });
  }

  // --- summing and writing --------------------------------------------------------------------------------------

  // Two hops: sums this rank's part and pushes it to its readers, itself among them.
  __device__ void sum_part() const {
    const uint32_t units = l.part, part_from = l.part_from, part_to = l.part_to, by = step(c.sum);
    const int group = c.me / c.span * c.span;
    const int first = c.scatter ? 0 : group, last = c.scatter ? c.n : group + c.span;
    const int to_first = c.scatter ? group : 0, to_last = c.scatter ? group + c.span : c.n;
#pragma unroll 1
    for (uint32_t u = start(c.sum); u < units; u += 2 * by) {
      const uint32_t unit[2] = {u, u + by};
      const bool wanted[2] = {true, u + by < units};
      Unit own[2], sum[2];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        if (wanted[m]) own[m] = load(x, part_from + unit[m]);
      reduce(first, last, unit, wanted, own, sum);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (wanted[m] && i >= to_first && i < to_last) store_far(inbox[i] + sum_place(part_to + unit[m]), sum[m]);
    }
  }

  __device__ void write_sums() const {
    const uint32_t units = l.out, by = step(c.write);
#pragma unroll 1
    for (uint32_t u = start(c.write); u < units; u += kInFlight * by) {
      Unit got[kInFlight];
      await(
          got, [&](int k) { return u + k * by < units; }, [&](int k) { return sum_place(u + k * by); },
          [&](int) { return me; });
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        if (u + k * by < units) store(out, u + k * by, got[k]);
    }
  }

  // One hop: every lane's unit u at once, summed over each run of ranks.
  __device__ void write_lanes() const {
    const uint32_t most = l.most_to_receive, by = step(c.write), begins = c.begins_sum, ends = c.ends_sum;
#pragma unroll 1
    for (uint32_t u = start(c.write); u < most; u += by) {
      Unit got[N], own{};
      if (u < l.receive[me]) own = load(x, l.from[me] + u);
      await(
          got, [&](int i) { return i != me && u < l.receive[i]; }, [&](int i) { return lane(i, u); },
          [](int i) { return i; });
      float total[E::count];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (u >= l.receive[i]) continue;
        const Unit term = choose(i == me, own, got[i]);
        if constexpr (kWay == Way::kGather) {
          store(out, l.to[i] + u, term);
        } else {
          float f[E::count];
          E::widen(term, f);
#pragma unroll
          for (int k = 0; k < E::count; ++k) total[k] = begins >> i & 1 ? f[k] : total[k] + f[k];
          if (ends >> i & 1) store(out, l.to[i] + u, E::narrow(total));
        }
      }
    }
  }

  // Units of the result, for one row of it: `segment` is that row's among gathered ones.
  __device__ void values(int segment, const uint32_t (&unit)[2], const bool (&wanted)[2], Unit (&value)[2]) const {
    if constexpr (kWay == Way::kTwoHops) {
      await(
          value, [&](int m) { return wanted[m]; }, [&](int m) { return sum_place(unit[m]); }, [&](int) { return me; });
    } else {
      const int first = c.scatter ? 0 : segment * c.span, last = c.scatter ? c.n : first + c.span;
      const uint32_t base = c.scatter ? 0 : l.begin[segment];
      uint32_t u[2];
      Unit own[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        u[m] = unit[m] - base;
        if (wanted[m] && me >= first && me < last) own[m] = load(x, l.from[me] + u[m]);
      }
      reduce(first, last, u, wanted, own, value);
    }
  }

  // What the epilogue needs of a row besides its sum: this thread's units k and k + workers().
  struct Row {
    Unit residual[2], weight[2];
  };
  __device__ void load_row(uint32_t row, uint32_t k, Row& r) const {
#pragma unroll
    for (int m = 0; m < 2; ++m)
      if (k + m * workers() < row_units) {
        r.residual[m] = load(c.residual, row * row_units + k + m * workers());
        r.weight[m] = load(c.weight, k + m * workers());
      }
  }

  // residual_out = residual + value; out = weight · round(residual_out / √(mean of squares + eps)): a row a block.
  // Squares are summed by runs of 32 units, then over runs: the same bits however many threads share a row.
  // r: loaded for the block's first row. Of rows that take more than two units a thread, the rest is read again.
  __device__ void write_normed(Row& r) const {
    __shared__ float runs[2][kMaxRuns];
    const uint32_t units = l.out, by = workers(), lane = threadIdx.x % 32;
    const int width = int(row_bytes / sizeof(T)), used = int(row_units + 31) / 32;
    const bool more = row_units > 2 * by;
    int segment = 0, turn = 0;
#pragma unroll 1
    for (uint32_t row = blockIdx.x - c.write.first; row * row_units < units; turn ^= 1) {
      const uint32_t begin = row * row_units;
      if (!c.scatter)
        while (begin >= l.begin[segment + 1]) ++segment;
#pragma unroll 1
      for (uint32_t at = threadIdx.x; at - lane < row_units; at += 2 * by) {  // for the whole warp
        const uint32_t k[2] = {at, at + by}, unit[2] = {begin + k[0], begin + k[1]};
        const bool wanted[2] = {k[0] < row_units, k[1] < row_units};
        if (at >= 2 * by) load_row(row, at, r);
        Unit delta[2];
        values(segment, unit, wanted, delta);
        float squares[2] = {0, 0};
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (!wanted[m]) continue;
          float f[E::count], d[E::count];
          E::widen(r.residual[m], f), E::widen(delta[m], d);
#pragma unroll
          for (int i = 0; i < E::count; ++i) f[i] += d[i];
          r.residual[m] = E::narrow(f);
          store(c.residual_out, unit[m], r.residual[m]);
          E::widen(r.residual[m], f);
#pragma unroll
          for (int i = 0; i < E::count; ++i)
            if (kWhole || int(k[m]) * E::count + i < width) squares[m] += f[i] * f[i];
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2)
#pragma unroll
          for (int m = 0; m < 2; ++m) squares[m] += __shfl_xor_sync(~0u, squares[m], mask);
#pragma unroll
        for (int m = 0; m < 2; ++m)
          if (lane == 0 && wanted[m]) runs[turn][k[m] / 32] = squares[m];
      }
      meet(2, workers());  // two turns' sums lie apart: none writes what another still reads
      float total = 0;
#pragma unroll
      for (int i = 0; i < kMaxRuns / 32; ++i)
        if (int(lane) + 32 * i < used) total += runs[turn][lane + 32 * i];
#pragma unroll
      for (int mask = 16; mask; mask /= 2) total += __shfl_xor_sync(~0u, total, mask);
      const float scale = rsqrtf(total / float(width) + c.eps);
#pragma unroll 1
      for (uint32_t at = threadIdx.x; at < row_units; at += 2 * by) {
        if (more) load_row(row, at, r);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint32_t k = at + m * by;
          if (k >= row_units) continue;
          if (more) r.residual[m] = load(c.residual_out, begin + k);
          float f[E::count], w[E::count];
          E::widen(r.weight[m], w);
          E::widen(r.residual[m], f);
#pragma unroll
          for (int i = 0; i < E::count; ++i) f[i] *= scale;
          const Unit rounded = E::narrow(f);
          E::widen(rounded, f);
#pragma unroll
          for (int i = 0; i < E::count; ++i) f[i] *= w[i];
          store(out, begin + k, E::narrow(f));
        }
      }
      row += c.write.count;
      if (row * row_units < units) load_row(row, threadIdx.x, r);
    }
  }

  // --- what the next calls need --------------------------------------------------------------------------------

  __device__ static void fill(char* base, uint32_t units) {
    const uint4 empty = make_uint4(kSentinel, kSentinel, kSentinel, kSentinel);
#pragma unroll 1
    for (uint32_t u = blockIdx.x * workers() + threadIdx.x; u < units; u += gridDim.x * workers())
      reinterpret_cast<uint4*>(base)[u] = empty;
  }
  __device__ void refill(uint32_t before, uint32_t used_lane, uint32_t used_sum) const {
    char* old = c.inbox[me] + int64_t(before) * c.inbox_units * kUnit;
    const int64_t old_lane_bytes = int64_t(c.lane_units[used_sum != 0]) * kUnit;
#pragma unroll 1
    for (int i = 0; i < c.n; ++i, old += old_lane_bytes) fill(old, used_lane);
    fill(old, used_sum);
  }
  __device__ void hand_on(uint32_t epoch) const {
    c.state->used_lane[epoch % kRotations] = max(1u, l.most_to_receive);  // at least a token
    c.state->used_sum[epoch % kRotations] = kWay == Way::kTwoHops ? max(1u, l.out) : 0;
    c.state->blocks_begun = 0;
    c.state->epoch = epoch + 1;
  }
};

// Lanes from counts in device memory, by the block's first warp; all empty if they do not fit the tensors and the inbox.
// A lane of the warp holds a segment first, then a rank. its: rank i's segment, in lane i; mine: this rank's.
template <bool kTwoHops>
__device__ inline void read_counts(const Call& c, uint32_t count, int its, int mine, Lanes& l) {
  const int i = int(threadIdx.x);
  uint32_t total = count;  // of segments up to this one
#pragma unroll
  for (int by = 1; by < kMaxRanks; by *= 2) {
    const uint32_t before = __shfl_up_sync(~0u, total, by);
    if (i >= by) total += before;
  }
  const uint32_t most = __reduce_max_sync(~0u, count), all = __shfl_sync(~0u, total, c.segments - 1);
  const uint32_t my_rows = __shfl_sync(~0u, count, mine);
  const uint64_t units = uint64_t(most) * c.row_units, room = c.lane_units[kTwoHops];
  const bool fits = c.scatter ? all <= c.x_rows && my_rows <= c.out_rows : all <= c.out_rows && my_rows <= c.x_rows;
  const bool sane = most < 1u << 28 && fits && units <= (kTwoHops ? room * c.span : room) &&
                    (!kTwoHops || uint64_t(all) * c.row_units <= c.inbox_units / 2);
  if (!sane && i == 0) atomicCAS_system(c.error, 0u, kTooManyRows);
  const uint32_t row_units = sane ? c.row_units : 0, end = total * row_units, size = count * row_units;
  const Segment my_segment{__shfl_sync(~0u, end - size, mine), my_rows * row_units};
  const Segment its_segment{__shfl_sync(~0u, end - size, its), __shfl_sync(~0u, size, its)};
  if (i < kMaxRanks) l.begin[i + 1] = end;
  if (i < c.n) lay_out<kTwoHops>(c, i, its_segment, my_segment, all * row_units, {}, l);
  __syncwarp();
  const uint32_t most_to_send = __reduce_max_sync(~0u, i < c.n ? l.send[i] : 0);
  const uint32_t most_to_receive = __reduce_max_sync(~0u, i < c.n ? l.receive[i] : 0);
  if (i == 0) l.most_to_send = most_to_send, l.most_to_receive = most_to_receive;
}

// A block's last warp keeps the books, so that no worker waits for it: once every block has read the group's state, it
// writes the next call's. The next kernel may take its place at once (programmatic dependent launch), but waits for
// this one's end: what it sends tells its peers that.
template <class T, bool kWhole, int N, Way kWay, bool kNorm>
__global__ void __launch_bounds__(kWorkers + kKeepers, 1) exchange(const __grid_constant__ Call c) {
  __shared__ Lanes lanes;
  __shared__ uint32_t touched;
  for (uint32_t k = threadIdx.x; k < sizeof(Lanes) / 4; k += blockDim.x)
    reinterpret_cast<uint32_t*>(&lanes)[k] = reinterpret_cast<const uint32_t*>(&c.lanes)[k];
  uint32_t touch = 0;  // of every cache line of the parameters
#pragma unroll
  for (size_t k = 0; k < (sizeof(Call) - sizeof(Lanes)) / 4; k += 8) touch += reinterpret_cast<const uint32_t*>(&c)[k];
  if (threadIdx.x == 0) *const_cast<volatile uint32_t*>(&touched) = touch;
  Kernel<T, kWhole, N, kWay, kNorm> kernel(c, lanes);
  const bool worker = threadIdx.x < kernel.workers(), pushes = kernel.has(c.push) && worker;
  const int its = c.device_counts ? int(threadIdx.x) / c.span : 0, mine = c.device_counts ? c.me / c.span : 0;
  __syncthreads();

  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const char* at = reinterpret_cast<const char*>(c.state);
  const Unit state = load_polled(at), sums = load_polled(at + kUnit);
  if (c.device_counts) {
    if (threadIdx.x < 32)
      read_counts<kWay == Way::kTwoHops>(c, threadIdx.x < c.segments ? uint32_t(c.device_counts[threadIdx.x]) : 0, its,
                                         mine, lanes);
    __syncthreads();
  }
  Unit first[N];  // loaded while the state is on its way, as is the row
  typename Kernel<T, kWhole, N, kWay, kNorm>::Row row;
  if (pushes) kernel.load_to_send(kernel.start(c.push), first);
  if constexpr (kNorm)
    if (worker && kernel.has(c.write) && (blockIdx.x - c.write.first) * kernel.row_units < lanes.out)
      kernel.load_row(blockIdx.x - c.write.first, threadIdx.x, row);
  const uint32_t epoch = state.w[0], before = (epoch + kRotations - 1) % kRotations;
  kernel.turn(epoch % kRotations);
  if (!worker) {
    meet(1, blockDim.x);  // every thread of the block has read the state
    if (threadIdx.x == kernel.workers() && (gridDim.x == 1 || atomicAdd(&c.state->blocks_begun, 1) == gridDim.x - 1))
      kernel.hand_on(epoch);
    return;
  }
  if (pushes) kernel.push(first);
  arrive(1, blockDim.x);
  const auto of_before = [&](const Unit& u) { return before == 0 ? u.w[1] : before == 1 ? u.w[2] : u.w[3]; };
  kernel.refill(before, of_before(state), of_before(sums));  // while the data travels
  if constexpr (kWay == Way::kTwoHops)
    if (kernel.has(c.sum)) kernel.sum_part();
  if (!kernel.has(c.write)) return;
  kernel.await_tokens();
  if constexpr (kNorm)
    kernel.write_normed(row);
  else if constexpr (kWay == Way::kTwoHops)
    kernel.write_sums();
  else
    kernel.write_lanes();
}

}  // namespace weft
