// The merge of attention over shards of the keys in one kernel: each rank has outputs and log-sum-exps of all heads
// over its own tokens, and gets its own heads over all tokens, as `softmax_merge` in weft/kernels/torch_reference.py
// defines.
//
// A row is one head of one token. A team, some neighbouring threads of a warp, moves a row's piece of up to 32 units:
// it stores each reader's into that rank's inbox, with the row's log-sum-exp in a unit of its own, and then waits for
// its own row's pieces and merges them in rank order and float32. For an empty row only the log-sum-exp is sent. Units
// are their own flags, and inboxes alternate, as wait.cuh says.
#pragma once

#include "wait.cuh"

namespace weft {

constexpr uint32_t kPieceUnits = 32;

// A lane of an inbox has the outputs of the reader's rows, then a unit for each piece with its log-sum-exp.
struct Merge {
  int n = 0, me = 0;
  const char* x = nullptr;               // outputs [tokens, heads, dim]
  uint32_t x_token = 0, x_head = 0;      // units from one to the next
  const float* lse = nullptr;            // [tokens, heads]
  uint32_t lse_token = 0, lse_head = 0;  // elements from one to the next
  char* out = nullptr;                   // [tokens, own_heads, dim], dense, as out_lse
  float* out_lse = nullptr;
  uint32_t tokens = 0, own_heads = 0, row_units = 0, pieces = 0;
  const int32_t* live = nullptr;  // number of live tokens, in device memory; null: all
  uint32_t team = 0;              // threads: 8, 16 or 32
  char* inbox[kMaxRanks] = {};
  uint32_t inbox_units = 0, lane_units = 0;
  State* state = nullptr;
  uint32_t* error = nullptr;
  int64_t limit_cycles = 0;
};

// The unit of a piece that a thread moves: unit `unit` of row `row`, if there is one.
struct Piece {
  uint32_t row, token, head, number, unit;
  bool active, moves;  // the team has a piece; this thread a unit of it
};

template <class T, int N>
struct Team {
  const Merge& c;
  uint32_t rows = 0;     // live ones
  int64_t rotation = 0;  // bytes from an inbox of the first rotation to this call's
  const uint32_t lane = threadIdx.x % c.team,
                 first = threadIdx.x % 32 - lane;                      // in the team; its first one in the warp
  const uint32_t rank = lane < uint32_t(c.n) ? lane : uint32_t(c.me);  // this thread polls this rank's log-sum-exp
  const bool other = rank != uint32_t(c.me);

  __device__ static float known(float lse) { return lse < INFINITY ? lse : -INFINITY; }

  // The item-th piece.
  __device__ Piece piece(uint32_t item) const {
    Piece p;
    p.row = item / c.pieces, p.number = item % c.pieces;
    p.token = p.row / c.own_heads, p.head = p.row % c.own_heads;
    p.unit = p.number * kPieceUnits + lane;
    return live(p);
  }
  // The item-th piece, once the number of rows is known.
  __device__ Piece live(Piece p) const {
    p.active = p.row < rows, p.moves = p.active && p.unit < c.row_units;
    return p;
  }
  __device__ float lse_of(const Piece& p, uint32_t reader) const {
    return known(c.lse[p.token * c.lse_token + (reader * c.own_heads + p.head) * c.lse_head]);
  }
  __device__ Unit load(const Piece& p, uint32_t reader) const {
    const uint32_t head = reader * c.own_heads + p.head;
    const int64_t at = int64_t(p.token) * c.x_token + int64_t(head) * c.x_head + p.unit;
    return load_local<true>(c.x + at * kUnit, 0, 0, 0);
  }
  __device__ char* lane_of(uint32_t reader, uint32_t source) const {
    return c.inbox[reader] + rotation + int64_t(source) * c.lane_units * kUnit;
  }
  __device__ int64_t payload(const Piece& p) const { return (int64_t(p.row) * c.row_units + p.unit) * kUnit; }
  __device__ int64_t header(const Piece& p) const {
    const int64_t outputs = int64_t(c.tokens) * c.own_heads * c.row_units;
    return (outputs + int64_t(p.row) * c.pieces + p.number) * kUnit;
  }

  // The data of a piece to send.
  struct Sent {
    float lse;
    Unit units[N];
  };
  __device__ Sent load_to_send(const Piece& p) const {
    Sent s;
    s.lse = p.active && other ? lse_of(p, rank) : -INFINITY;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (p.moves && i < c.n && i != c.me) s.units[i] = load(p, uint32_t(i));
    return s;
  }
  // Called by whole warps.
  __device__ void push(const Piece& p, const Sent& s) const {
    if (p.active && other)
      push_unit(lane_of(rank, uint32_t(c.me)) + header(p), Unit{{__float_as_uint(s.lse), 0, 0, 0}});
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float theirs = __shfl_sync(~0u, s.lse, int(first) + i);
      if (p.moves && i < c.n && i != c.me && theirs > -INFINITY)
        push_unit(lane_of(uint32_t(i), uint32_t(c.me)) + payload(p), s.units[i]);
    }
  }

  // Waits for all sources' log-sum-exps of the piece, and for the outputs of those that are not empty, all loads in
  // flight at once, and empties their places. lses: of all sources. Called by whole warps. Memory order: as `await` in
  // wait.cuh.
  __device__ void await(const Piece& p, Unit (&got)[N], float (&lses)[N]) const {
    char *const inbox = lane_of(uint32_t(c.me), 0) + payload(p), *const said =
                                                                     lane_of(uint32_t(c.me), rank) + header(p);
    const int64_t lane_bytes = int64_t(c.lane_units) * kUnit;
    const bool waits = p.active && other;
    const float own = p.active && lane == uint32_t(c.me) ? lse_of(p, uint32_t(c.me)) : -INFINITY;
    uint32_t wanted = 0;
    int64_t began = 0;
    for (uint32_t spins = 1;; ++spins) {
      Unit header{};
      if (waits) header = load_polled(said);
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (p.moves && i < c.n && i != c.me) got[i] = load_polled(inbox + i * lane_bytes);
      // NaN: not there yet. No source sends it, since `known` turns it into −inf.
      const float mine = !waits ? own : arrived(header) ? __uint_as_float(header.w[0]) : NAN;
      bool all = true;
      int missing = 0;
      wanted = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        lses[i] = __shfl_sync(~0u, mine, int(first) + i);
        if (p.moves && i < c.n && i != c.me && lses[i] > -INFINITY) wanted |= 1u << i;
        if (lses[i] != lses[i] || (wanted >> i & 1 && !arrived(got[i]))) all = false, missing = i;
      }
      if (__all_sync(~0u, all)) break;
      if (spins % 1024 == 0) {
        if (!all) began = wait_on(c.error, began, c.limit_cycles, missing);
        if (__any_sync(~0u, began < 0)) break;
      }
    }
    const uint4 empty = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (waits) *reinterpret_cast<uint4*>(said) = empty;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (wanted >> i & 1) *reinterpret_cast<uint4*>(inbox + i * lane_bytes) = empty;
  }

  // Called by whole warps.
  __device__ void write(const Piece& p) const {
    using E = Elements<T>;
    Unit got[N];
    float lses[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (p.moves && i == c.me) got[i] = load(p, uint32_t(i));
    await(p, got, lses);
    float top = -INFINITY, mine = -INFINITY, sum = 0, total[E::count] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      top = max(top, lses[i]);
      if (uint32_t(i) == lane) mine = lses[i];
    }
    const float term = mine > -INFINITY ? expf(mine - top) : 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += lses[i] = __shfl_sync(~0u, term, int(first) + i);
    const float inverse = sum > 0 ? 1.0f / sum : 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!(lses[i] > 0)) got[i] = Unit{};  // not read: it may be NaN
      float f[E::count];
      E::widen(got[i], f);
#pragma unroll
      for (int e = 0; e < E::count; ++e) total[e] += lses[i] * inverse * f[e];
    }
    if (p.moves) store_local<true>(c.out + (int64_t(p.row) * c.row_units + p.unit) * kUnit, 0, E::narrow(total), 0, 0);
    if (p.active && p.number == 0 && lane == 0) c.out_lse[p.row] = sum > 0 ? top + logf(sum) : -INFINITY;
  }

  // Without a row, peers still get a flag that this call was made: nothing else orders the next calls.
  __device__ bool sends_flags() const {
    return blockIdx.x == 0 && threadIdx.x < uint32_t(c.n) && threadIdx.x != uint32_t(c.me);
  }
  __device__ void push_flags() const {
    if (sends_flags()) push_unit(lane_of(threadIdx.x, uint32_t(c.me)), Unit{});
  }
  __device__ void await_flags() const {
    if (blockIdx.x || threadIdx.x >= 32) return;
    char* const flag = lane_of(uint32_t(c.me), sends_flags() ? threadIdx.x : uint32_t(c.me));
    int64_t began = 0;
    for (uint32_t spins = 1;; ++spins) {
      const bool came = !sends_flags() || arrived(load_polled(flag));
      if (__all_sync(~0u, came)) break;
      if (spins % 1024 == 0) {
        if (!came) began = wait_on(c.error, began, c.limit_cycles, int(threadIdx.x));
        if (__any_sync(~0u, began < 0)) break;
      }
    }
    if (sends_flags()) *reinterpret_cast<uint4*>(flag) = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
};

// A block's last warp does the bookkeeping, as in `exchange`. Work that needs no input precedes the wait for the
// previous kernel, and the first pieces are loaded while the epoch is being loaded.
template <class T, int N>
__global__ void __launch_bounds__(kWorkers + kBookkeepers, N <= 4 ? 2 : 1) merge(const __grid_constant__ Merge c) {
  const uint32_t workers = blockDim.x - kBookkeepers;
  const bool worker = threadIdx.x < workers;
  Team<T, N> team{c};
  const uint32_t mine = (blockIdx.x * workers + threadIdx.x) / c.team, of_warp = threadIdx.x % 32 / c.team;
  const uint32_t step = gridDim.x * workers / c.team;
  Piece begin = team.piece(mine);
  wait_for_kernel_before();
  let_next_kernel_begin();
  const uint32_t epoch = *reinterpret_cast<volatile uint32_t*>(&c.state->epoch);
  if (!worker) {
    sync_named(1, blockDim.x);  // all threads of the block have read the epoch
    if (threadIdx.x == workers && (gridDim.x == 1 || atomicAdd(&c.state->blocks_begun, 1) == gridDim.x - 1))
      c.state->blocks_begun = 0, c.state->epoch = epoch + 1;
    return;
  }
  uint32_t tokens = c.live ? uint32_t(*c.live) : c.tokens;
  if (tokens > c.tokens) {
    atomicCAS_system(c.error, 0u, kTooManyRows);
    tokens = 0;
  }
  team.rows = tokens * c.own_heads;
  begin = team.live(begin);
  typename Team<T, N>::Sent sent = team.load_to_send(begin);
  team.rotation = int64_t(epoch % kRotations) * c.inbox_units * kUnitAndMark;
  const uint32_t items = team.rows * c.pieces;
  Piece p = begin;
#pragma unroll 1
  for (uint32_t item = mine; item - of_warp < items;) {
    team.push(p, sent);
    item += step;
    if (item - of_warp < items) p = team.piece(item), sent = team.load_to_send(p);
  }
  if (!tokens) team.push_flags();
  arrive_named(1, blockDim.x);
  if (!tokens) return team.await_flags();
  team.write(begin);
#pragma unroll 1
  for (uint32_t item = mine + step; item - of_warp < items; item += step) team.write(team.piece(item));
}

}  // namespace weft
