// One call of an exchange: the data between each pair of ranks, and its places. Laid out on the host, or on the device
// from counts in its memory. `weft/planner/exchange.py` defines exchanges; tests compare `lane_of` with it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#ifndef __CUDACC__  // tests of the layout need no CUDA
#define __host__
#define __device__
#endif

namespace weft {

constexpr int kMaxRanks = 8, kRotations = 2;
constexpr uint32_t kTooManyRows =
    0x80000000u;                               // an error code: counts in device memory exceed the capacity
constexpr int kUnit = 16;                      // bytes that are stored and polled at a time
constexpr int kUnitAndMark = kUnit + 1;        // bytes of an inbox for each unit: its mark lies behind all units
constexpr int kWorkers = 480;                  // maximum of a block's threads that move data
constexpr int kMaxSlices = 128, kSliceUnits = 32;  // slices in which a row to be normalised is summed

struct Unit {
  uint32_t w[4];
};

// A rank's memory of a group, on its own device.
struct alignas(16) State {
  uint32_t epoch;         // calls so far
  uint32_t blocks_begun;  // of this one
};

// The blocks of a kernel that do one kind of work.
struct Blocks {
  int first = 0, count = 0;
};

enum class Direction : int { kGather, kScatter, kPermute };

// Segments of the rows, and the ranks that take part in each: as `Exchange` in weft/planner/exchange.py.
struct Exchange {
  Direction direction = Direction::kGather;
  int segments = 0;
  int span = 0;  // neighbouring ranks that share a segment: they hold its terms (gather) or want it (scatter)
};

// The data that ranks send to each other, in units. A lane is the part of an inbox that one source fills.
struct Lanes {
  uint32_t send[kMaxRanks] = {};     // that this rank stores into each other rank's lane; 0: an empty-lane flag
  uint32_t from[kMaxRanks] = {};     // where in x they begin; this rank's own term begins at from[me]
  uint32_t receive[kMaxRanks] = {};  // that each rank stores into this one's lane
  // Beginning of each rank's strip of the result; after the last rank, the result's end. A strip is one rank's data:
  // its segment if nothing is summed; the part that it sums in two shots; in one shot, the first rank of a sum has it
  // all.
  uint32_t begin[kMaxRanks + 1] = {};
  uint32_t part = 0, part_from = 0, part_to = 0;  // two shots: of its segment that this rank sums; in x, in the result
  uint32_t out = 0;                               // of the result
};

struct Call {
  Exchange exchange;
  int n = 0, me = 0;
  const char* x = nullptr;
  char* out = nullptr;           // [rows, width]; with an epilogue the normalised rows
  char* residual_out = nullptr;  // epilogue or null
  const char *residual = nullptr, *weight = nullptr;
  bool wide_weight = false;       // float32, with elements of 16 bits
  char* quantised = nullptr;      // the normalised rows in eight bits, or null
  float* scales = nullptr;        // of each row's groups of columns: their values were divided by these
  uint32_t log2_quant_group = 0;  // of a group's columns
  float eps = 0, inverse_width = 0;
  uint32_t row_bytes = 0, row_units = 0;
  // In device memory, instead of `lanes`: rows of each segment; in a permute, rows sent to each rank, then got from
  // each.
  const int32_t* device_counts = nullptr;
  uint32_t x_units = 0;  // capacity of x; counts on the device may be less
  uint32_t max_rows = 0, max_mine = 0, max_total = 0;  // capacities: of a segment, this rank's, of all
  char* inbox[kMaxRanks] = {};                             // of each rank, in this rank's address space
  uint32_t inbox_units = 0;                                // of one rotation; the marks lie behind them
  uint32_t lane_units[2] = {};  // a rank's part of it, in one shot and in two: these leave half to sums
  State* state = nullptr;
  uint32_t* error = nullptr;  // host memory: 1 + the rank that did not arrive
  int64_t limit_cycles = 0;
  Blocks push, sum, write;
  uint32_t log2_cluster = 0;  // of blocks that share a row to be normalised
  Lanes lanes;
};

// Units of a segment.
struct Segment {
  uint32_t begin, units;
};

// The fields of Lanes for rank i.
struct Lane {
  uint32_t send, from, receive, begin;
  uint32_t part, part_to;  // two shots: the part of its segment that it sums, and its place in this rank's result
};

// A rank's number among those that share a segment.
struct Place {
  int segment, place;
};
__host__ __device__ inline Place place_of_rank(const Exchange& e, int rank) { return {rank / e.span, rank % e.span}; }

// i, me: the places of rank i and this rank; its: rank i's segment; mine: this rank's; arrives: in a permute, the data
// that rank i sends to this one, as it lies in the result.
template <bool kTwoShot>
__host__ __device__ inline Lane lane_of(const Call& c, int i, Place at, Place me, Segment its, Segment mine,
                                        Segment arrives) {
  const bool scatter = c.exchange.direction == Direction::kScatter;
  Lane l{};
  if constexpr (kTwoShot) {
    const auto part = [&](Segment s, int place) {
      const int span = c.exchange.span;
      const uint32_t each = (s.units + span - 1) / span, begin = each * place < s.units ? each * place : s.units;
      return Segment{begin, place == span - 1 || begin + each > s.units ? s.units - begin : each};
    };
    const bool of_mine = at.segment == me.segment, shares = scatter || of_mine;
    const Segment its_part = part(its, at.place), my_part = part(mine, me.place);
    l.send = shares ? its_part.units : 0;
    l.receive = shares ? my_part.units : 0;
    l.from = (scatter ? its.begin : 0) + its_part.begin;
    l.begin = !scatter ? its.begin + its_part.begin : of_mine ? its_part.begin : i < c.me ? 0 : mine.units;
    l.part = its_part.units, l.part_to = (scatter ? 0 : its.begin) + its_part.begin;
  } else if (c.exchange.direction == Direction::kPermute) {
    l.send = its.units, l.from = its.begin, l.receive = arrives.units, l.begin = arrives.begin;
  } else if (scatter) {
    l.send = its.units, l.from = its.begin, l.receive = mine.units, l.begin = i ? mine.units : 0;
  } else {
    l.send = mine.units, l.receive = its.units, l.begin = its.begin + (at.place ? its.units : 0);
  }
  if (i == c.me) l.send = 0;
  return l;
}

__host__ __device__ inline void put(const Call& c, int i, const Lane& lane, Lanes& l) {
  l.send[i] = lane.send, l.from[i] = lane.from, l.receive[i] = lane.receive, l.begin[i] = lane.begin;
  if (i == c.me) l.part = lane.part, l.part_from = lane.from, l.part_to = lane.part_to;
}

// Fills c.lanes. rows: of each segment; in a permute, that this rank sends to each. received: in a permute, from each.
inline void lay_out(Call& c, const int64_t* rows, const int64_t* received, bool two_shot) {
  const auto in_order = [&](const int64_t* given, int count, Segment* segments) {  // gives where they end
    uint32_t begin = 0;
    for (int i = 0; i < count; begin += segments[i++].units) segments[i] = {begin, uint32_t(given[i]) * c.row_units};
    return begin;
  };
  const Direction direction = c.exchange.direction;
  Segment segments[kMaxRanks], arrive[kMaxRanks] = {};
  const uint32_t all = in_order(rows, c.exchange.segments, segments);
  const uint32_t arriving = in_order(received, direction == Direction::kPermute ? c.n : 0, arrive);
  const auto lane = two_shot ? lane_of<true> : lane_of<false>;
  const Place me = place_of_rank(c.exchange, c.me);
  const Segment mine = segments[me.segment];
  for (int i = 0; i < c.n; ++i) {
    const Place at = place_of_rank(c.exchange, i);
    put(c, i, lane(c, i, at, me, segments[at.segment], mine, arrive[i]), c.lanes);
  }
  c.lanes.out = direction == Direction::kPermute ? arriving : direction == Direction::kScatter ? mine.units : all;
  std::fill(c.lanes.begin + c.n, c.lanes.begin + kMaxRanks + 1, c.lanes.out);
}

}  // namespace weft
