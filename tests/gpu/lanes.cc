// What `call.h` lays out on the host, for Python: see test_lanes.py.
#include "call.h"

extern "C" int max_ranks() { return weft::kMaxRanks; }

// exchange: direction, segments, span, whether in two shots. out: Lanes.
extern "C" void lanes(int n, int me, const int* exchange, int row_units, const int64_t* rows, const int64_t* received,
                      weft::Lanes* out) {
  weft::Call c;
  c.exchange = {weft::Direction(exchange[0]), exchange[1], exchange[2]};
  c.n = n, c.me = me, c.row_units = uint32_t(row_units);
  weft::lay_out(c, rows, received, exchange[3] != 0);
  *out = c.lanes;
}
