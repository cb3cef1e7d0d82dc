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
