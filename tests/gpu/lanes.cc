// What `call.h` lays out on the host, for Python: see test_lanes.py.
#include <vector>

#include "call.h"

extern "C" int max_ranks() { return weft::kMaxRanks; }

// edge: segments, span, scatter, root, exchange, two hops. out: Lanes.
extern "C" void lanes(int n, int me, const int* edge, int row_units, const int64_t* counts, const int64_t* received,
                      weft::Lanes* out) {
  weft::Call c;
  c.segments = edge[0], c.span = edge[1], c.scatter = edge[2], c.root = edge[3], c.exchange = edge[4];
  c.n = n, c.me = me, c.row_units = uint32_t(row_units);
  const std::vector<int64_t> rows(counts, counts + c.segments), arrive(received, received + (c.exchange ? n : 0));
  weft::lay_out(c, rows, arrive, edge[5] != 0);
  *out = c.lanes;
}

extern "C" void room(int64_t bytes, int n, int two_hops, int64_t* lane_sums_from) {
  const weft::Room room = weft::room_in(bytes, n, two_hops != 0);
  lane_sums_from[0] = room.lane, lane_sums_from[1] = room.sums, lane_sums_from[2] = room.sums_from;
}
extern "C" int64_t lane_place(int n, int turn, int rank, int u) { return weft::lane_place(n, turn, rank, u); }
extern "C" int64_t sum_place(int64_t sums_from, int turn, int u) { return weft::sum_place(sums_from, turn, u); }
