// Records what each rank of a small world does in shared memory while the ranks make a sequence of calls.
//
// trace WORLD CALL…, a call as kind@group with the kinds below. Prints JSON: for each rank its actions, in order:
//   ["call", k]                               the k-th call begins
//   ["write", holds, chunk, offset, bytes]    in its own memory
//   ["read", holds, chunk, offset, bytes]     in a peer's
//   ["publish", group, phase], ["wait", group, rank, phase]
// holds: note, staged, input, result. A call's result lies where the next call's input will, as results that go on to
// the next call do, or whose memory is used again.
#include <cstring>

#include "calls.h"

using namespace weft;

namespace {

constexpr int64_t kSlot = 960, kBuffer = 1 << 16;
const char* const kHolds[] = {"note", "staged", "input", "result"};

struct Recorder {
  Arena* arena = nullptr;
  std::string text;

  template <class... Terms>
  void put(const char* format, Terms... terms) {
    char line[128];
    std::snprintf(line, sizeof line, format, terms...);
    text += (text.empty() ? "[" : ",[") + std::string(line) + "]";
  }
  void place(const char* what, Holds holds, uint32_t chunk, const void* p, int64_t bytes) {
    if (bytes > 0)
      put("\"%s\",\"%s\",%u,%ld,%ld", what, kHolds[int(holds)], chunk, long(arena->offset(p)), long(bytes));
  }
  void publish(int group, uint32_t phase) { put("\"publish\",%d,%u", group, phase); }
  void wait(int group, int rank, uint32_t phase) { put("\"wait\",%d,%d,%u", group, rank, phase); }
  void write(Holds holds, uint32_t chunk, const void* p, int64_t bytes) { place("write", holds, chunk, p, bytes); }
  void read(Holds holds, uint32_t chunk, const void* p, int64_t bytes) {
    place("read", holds, holds == Holds::input ? 0 : chunk, p, bytes);
  }
};

struct Planned {
  Shape shape;
  int64_t zero_copy_bytes = 1 << 30, chunk_bytes = 512;
};

// A slot of 960 bytes takes 192 floats, in 2 or 3 lanes 64 or more a lane: larger calls go in two chunks.
Planned planned(const std::string& kind) {
  Planned p;
  Shape& s = p.shape;
  const auto zero_copy = [&](uint32_t who) { s.in_arena = who, p.zero_copy_bytes = 1; };
  s.count = 4;
  if (kind == "sum") return p;
  if (kind == "barrier") return s.kind = Kind::barrier, p;
  if (kind == "merge") return s.kind = Kind::merge, p;
  if (kind == "merge_chunks") return s.kind = Kind::merge, s.count = 0, p;
  s.count = 200;
  if (kind == "sum_chunks") return p;
  if (kind == "sum_zero_copy") return zero_copy(~0u), s.count = 300, p.chunk_bytes = 1024, p;
  if (kind == "sum_some_zero_copy") return zero_copy(1), p;
  if (kind == "scatter") return s.kind = Kind::scatter, p;
  if (kind == "gather_zero_copy") return s.kind = Kind::gather, zero_copy(~0u), p;
  if (kind == "exchange") return s.kind = Kind::exchange, s.seed = 3, p;
  s.two_shot = true;
  if (kind == "two_shot") return p;
  zero_copy(~0u);
  s.count = 400;  // 200 or 134 a rank, where a chunk is 128
  if (kind == "two_shot_zero_copy") return p;
  if (kind == "two_shot_over_input") return s.over_input = true, p;
  std::fprintf(stderr, "no kind %s\n", kind.c_str());
  std::exit(2);
}

std::string rank_main(int rank, int fd, const Layout& layout, const std::vector<Planned>& calls) {
  auto arena = std::make_shared<Arena>(fd, layout, rank);
  Waiter waiter;
  waiter.lost = &arena->header().lost;
  Exchange<Recorder> exchange(arena, rows_for("scalar"), waiter);
  exchange.probe.arena = arena.get();
  auto* buffers = static_cast<char*>(arena->pool().take(2 * kBuffer));
  std::vector<float> away(kBuffer / sizeof(float));
  int next = 0;
  for (size_t k = 0; k <= calls.size(); ++k) {
    exchange.probe.put("\"call\",%ld", long(k));
    if (k == calls.size()) {  // all that was used is now used for something else
      exchange.probe.write(Holds::input, 0, buffers, 2 * kBuffer);
      break;
    }
    const Planned& p = calls[k];
    const Ranks& ranks = layout.groups[size_t(p.shape.group)];
    const auto place = std::find(ranks.begin(), ranks.end(), rank);
    if (place == ranks.end()) continue;
    const int me = int(place - ranks.begin());
    if (p.shape.kind == Kind::merge) {  // a lane takes 13 rows of 16 floats with their lse, or 5 where it shares a slot
      Shape shape = p.shape;
      if (!shape.count) shape.count = ranks.size() == 2 ? 20 : 9;
      Merging merging(shape, int(ranks.size()), 1, 16, uint32_t(k) * 2 + 1);
      exchange.run(merging.call);
      continue;
    }
    exchange.tuning.zero_copy_bytes = p.zero_copy_bytes;
    exchange.tuning.chunk_bytes = p.chunk_bytes;
    Parts parts(p.shape, me, int(ranks.size()));
    char* const here = buffers + next * kBuffer;
    next ^= !p.shape.over_input;
    float* x = p.shape.in_arena >> me & 1 ? reinterpret_cast<float*>(here) : away.data();
    if (p.shape.in_arena >> me & 1) exchange.probe.write(Holds::input, 0, x, parts.input * int64_t(sizeof(float)));
    make(exchange, p.shape, parts, x, p.shape.over_input ? x : reinterpret_cast<float*>(buffers + next * kBuffer),
         uint32_t(k) * 2 + 1);
  }
  return exchange.probe.text;
}

}  // namespace

int main(int argc, char** argv) {
  Layout layout;
  layout.world = std::atoi(argv[1]);
  layout.slot_bytes = kSlot;
  layout.blocks = 1;
  layout.block_bytes = 2 * kBuffer;
  layout.groups = {layout.world == 2 ? Ranks{0, 1} : Ranks{0, 1, 2}, {0, 1}};
  if (layout.world == 3) layout.groups.push_back({1, 2});
  const int fd = shared_memory(layout);
  std::vector<Planned> calls;
  for (int i = 2; i < argc; ++i) {
    const std::string call = argv[i];
    calls.push_back(planned(call.substr(0, call.find('@'))));
    calls.back().shape.group = std::atoi(call.c_str() + call.find('@') + 1);
  }
  std::vector<std::string> programs(size_t(layout.world));
  std::vector<std::thread> threads;
  for (int r = 0; r < layout.world; ++r)
    threads.emplace_back([&, r] { programs[size_t(r)] = rank_main(r, fd, layout, calls); });
  for (std::thread& thread : threads) thread.join();
  std::string all;
  for (const std::string& program : programs) all += (all.empty() ? "[" : ",\n[") + program + "]";
  std::printf("[%s]\n", all.c_str());
  return 0;
}
