// Exchanges over peer memory, each in one kernel: ragged, no barrier between GPUs.
//
// Counts may live in device memory: one captured graph then serves them all. In large calls some blocks push while
// others sum or write. Those that push come first, so a call ends even if few blocks run at once.
//
// A small call is as slow as its first fetches, of instructions and parameters too. So each algorithm has a kernel of
// its own, parameters are read before the wait for the previous kernel, and loops are rolled.
#pragma once

#include "norm.cuh"

namespace weft {

// Rows of the segments before this one; thread i holds segment i's.
__device__ inline uint32_t rows_before(uint32_t rows, int i) {
  uint32_t total = rows;  // of segments up to this one
#pragma unroll
  for (int by = 1; by < kMaxRanks; by *= 2) {
    const uint32_t before = __shfl_up_sync(~0u, total, by);
    if (i >= by) total += before;
  }
  return total - rows;
}

// Lanes of a permute from counts in device memory: rows that this rank sends to each rank, then rows that it gets from
// each.
__device__ inline void lay_out_permute_by_counts(const Call& c, int i, Place at, Place me, Lanes& l) {
  const uint32_t sent = i < c.n ? uint32_t(c.device_counts[i]) : 0;
  const uint32_t arriving = i < c.n ? uint32_t(c.device_counts[c.n + i]) : 0;
  const uint32_t from = rows_before(sent, i), to = rows_before(arriving, i);
  const uint32_t all_sent = __shfl_sync(~0u, from + sent, c.n - 1);
  const uint32_t all_arriving = __shfl_sync(~0u, to + arriving, c.n - 1);
  const uint32_t largest = max(__reduce_max_sync(~0u, sent), __reduce_max_sync(~0u, arriving));
  const bool fits = fit(c, largest, all_sent, all_arriving);
  if (!fits && i == 0) atomicCAS_system(c.error, 0u, kTooManyRows);
  const uint32_t row_units = fits ? c.row_units : 0, out = all_arriving * row_units;
  const Segment its{from * row_units, sent * row_units}, arrives{to * row_units, arriving * row_units};
  const Lane lane = lane_of<false>(c, i, at, me, its, {}, arrives);
  if (i < c.n) put(c, i, lane, l);
  if (i >= c.n && i <= kMaxRanks) l.begin[i] = out;
  if (i == 0) l.out = out;
}

// Lanes from counts in device memory, by the bookkeeping warp; all empty if they exceed the tensors or the inbox.
// Thread i holds segment i's count, then serves rank i with place `at`; me: this rank's.
template <bool kTwoShot>
__device__ inline void lay_out_by_counts(const Call& c, int i, Place at, Place me, Lanes& l) {
  const int segments = c.exchange.segments;
  const uint32_t count = i < segments ? uint32_t(c.device_counts[i]) : 0;
  const uint32_t total = rows_before(count, i) + count;  // of segments up to this one
  const uint32_t largest = __reduce_max_sync(~0u, count), all = __shfl_sync(~0u, total, segments - 1);
  const uint32_t my_rows = __shfl_sync(~0u, count, me.segment);
  const bool fits = fit(c, largest, my_rows, all);
  if (!fits && i == 0) atomicCAS_system(c.error, 0u, kTooManyRows);
  const uint32_t row_units = fits ? c.row_units : 0, size = count * row_units, begin = total * row_units - size;
  const Segment mine{__shfl_sync(~0u, begin, me.segment), my_rows * row_units};
  const Segment its{__shfl_sync(~0u, begin, at.segment), __shfl_sync(~0u, size, at.segment)};
  const uint32_t out = c.exchange.direction == Direction::kScatter ? mine.units : all * row_units;
  const Lane lane = lane_of<kTwoShot>(c, i, at, me, its, mine, {});
  if (i < c.n) put(c, i, lane, l);
  if (i >= c.n && i <= kMaxRanks) l.begin[i] = out;
  if (i == 0) l.out = out;
}

// A block's last warp does the bookkeeping, so that no worker waits for it: it lays out the lanes from counts in device
// memory, and once all blocks have read the group's epoch, it writes the next call's. The next kernel may start at once
// (programmatic dependent launch), but waits for this one's end: what it sends tells its peers that.
template <class T, bool kWhole, int N, Algorithm kAlgorithm, Epilogue kEpilogue>
__global__ void __launch_bounds__(kWorkers + kBookkeepers, N <= 4 ? 2 : 1) exchange(const __grid_constant__ Call c) {
  using K = Context<T, kWhole, N, kAlgorithm, kEpilogue>;
  constexpr bool kTwoShot = kAlgorithm == Algorithm::kTwoShot, kNorm = K::kNorm;
  __shared__ Lanes lanes;
  __shared__ uint32_t touched;
  for (uint32_t k = threadIdx.x; k < sizeof(Lanes) / 4; k += blockDim.x)
    reinterpret_cast<uint32_t*>(&lanes)[k] = reinterpret_cast<const uint32_t*>(&c.lanes)[k];
  uint32_t touch = 0;  // of every cache line of the parameters
#pragma unroll
  for (size_t k = 0; k < (sizeof(Call) - sizeof(Lanes)) / 4; k += 8) touch += reinterpret_cast<const uint32_t*>(&c)[k];
  if (threadIdx.x == 0) *const_cast<volatile uint32_t*>(&touched) = touch;
  K k{c, lanes};
  const bool worker = threadIdx.x < k.workers(), pushes = k.has(c.push) && worker;
  // Counts in device memory: in one shot, units are pushed before all is laid out; in two, and in a permute, after.
  const bool permutes = kAlgorithm == Algorithm::kCopy && c.exchange.direction == Direction::kPermute;
  const bool lays_out_first = (kTwoShot || permutes) && c.device_counts;
  const bool pushes_first = !lays_out_first && c.device_counts;
  const int bookkeeper = int(threadIdx.x - k.workers());
  const Place at = c.device_counts && !worker ? place_of_rank(c.exchange, bookkeeper) : Place{};
  const Place here = place_of_rank(c.exchange, c.me);
  uint32_t segments = 0;
  if (pushes_first)
    for (int i = 0; i < c.n; ++i) segments |= uint32_t(i / c.exchange.span) << 4 * i;
  __shared__ RowSums sums;  // none without kNorm
  if constexpr (kNorm) {
    const InRow<K> in{k};
    sums.init(in.slices, in.own_slices());
  }
  __syncthreads();
  // A thread that stores into another block must know that the block has begun, and its barriers.
  if (kNorm && c.log2_cluster) sync_cluster();

  wait_for_kernel_before();
  let_next_kernel_begin();
  const uint32_t epoch = *reinterpret_cast<volatile uint32_t*>(&c.state->epoch);
  if (c.device_counts && !worker) {
    if (permutes)
      lay_out_permute_by_counts(c, bookkeeper, at, here, lanes);
    else
      lay_out_by_counts<kTwoShot>(c, bookkeeper, at, here, lanes);
  }
  if (lays_out_first) __syncthreads();
  Send<N> send;  // loaded while the epoch is being loaded, as is the row
  RowUnit row;
  if (pushes && pushes_first) {
    if constexpr (!kTwoShot) begin_to_send_by_counts(k, segments, send);
  } else if (pushes) {
    begin_to_send(k, send);
  }
  const bool normalises = kNorm && worker && k.has(c.write);
  if constexpr (kNorm)
    if (normalises && !pushes_first) load_first_row(k, row);
  k.rotation = int64_t(epoch % kRotations) * c.inbox_units * kUnitAndMark;
  if (pushes) push(k, send);
  if (pushes_first) {
    __syncthreads();
    if constexpr (kNorm)
      if (normalises) load_first_row(k, row);
  }
  if (!worker) {
    sync_named(1, blockDim.x);  // all threads of the block have read the epoch
    if (bookkeeper == 0 && (gridDim.x == 1 || atomicAdd(&c.state->blocks_begun, 1) == gridDim.x - 1))
      c.state->blocks_begun = 0, c.state->epoch = epoch + 1;
    return;
  }
  if (pushes) push_empty_lanes(k);
  arrive_named(1, blockDim.x);
  if constexpr (kTwoShot)
    if (k.has(c.sum)) sum_part(k);
  if (!k.has(c.write)) return;
  await_empty_lanes(k);
  if constexpr (kNorm)
    write_normed(k, row, sums);
  else
    write(k);
}

}  // namespace weft
