// Every collective as one exchange of parts.
//
// A part is a range of elements that some ranks hold (sources), that is summed in rank order, and that some ranks want
// (readers). In one shot each reader sums for itself, from the data that the sources staged. In two shots the part's
// owner sums, then the readers copy the owner's result, so that no byte is read twice from another rank. Parts larger
// than a slot go in chunks, and the chunks in a pipeline: in each phase a rank stages chunk s, sums chunk s-1, copies
// chunk s-2. A tensor in the arena is not staged: its peers read it in place, and all ranks wait for each other at the
// end, since its memory may be reused after that.
#pragma once

#include <algorithm>
#include <functional>

#include "arena.h"
#include "rows.h"

namespace weft {

struct Part {
  int64_t x = 0, out = 0, length = 0;  // elements: place in a source's input, place in a reader's result, number
  uint32_t sources = 0, readers = 0;   // bit i: the group's i-th rank
  int owner = 0, lane = 0;             // owner: the rank that sums it in two shots; lane: its place in a slot
};

// The continuation of a sum: residual add and RMSNorm of its rows.
struct Finish {
  const void *residual = nullptr, *weight = nullptr;
  void *residual_out = nullptr, *normed = nullptr;
  int64_t width = 0;
  double eps = 0;
};

struct Call {
  int group = 0;
  DType dtype = DType::f32;
  int64_t element = 0;  // bytes
  const char* x = nullptr;
  char* out = nullptr;     // in the arena, unless shared is given
  char* shared = nullptr;  // arena memory for the sums that peers read in two shots; null: out itself
  bool two_shot = false, sums = false, ragged = false;  // ragged: in one shot, lengths that only two ranks know
  int lanes = 1;
  int64_t row = 1;    // elements that a chunk never cuts
  int64_t bytes = 0;  // of the result
  uint32_t signature = 0;
  std::vector<Part>* parts = nullptr;
  const Finish* finish = nullptr;

  char* read_by_peers() const { return shared ? shared : out; }
};

// Sizes in bytes; the fastest differ by host: `weft tune` measures them.
struct Tuning {
  int64_t two_shot_bytes = 16 << 10;     // larger sums use two shots; the same on all ranks
  int64_t chunk_bytes = 256 << 10;       // of a share that is read in place; the same on all ranks
  int64_t zero_copy_bytes = 8 << 10;     // smaller inputs are staged even if they lie in the arena: one wait less
  int64_t stream_slot_bytes = 32 << 10;  // ranges of at least this size that peers read are stored past the cache
  int64_t stream_out_bytes = 32 << 20;   // larger results are stored past the cache
};

enum class Holds { note, staged, input, result };

// Tests record the phases that a rank publishes and waits for, its writes in its own memory, and its reads of peers'.
struct NoProbe {
  void publish(int, uint32_t) {}                        // group, phase: before
  void wait(int, int, uint32_t) {}                      // group, rank, phase: after
  void write(Holds, uint32_t, const void*, int64_t) {}  // chunk, place, bytes: before
  void read(Holds, uint32_t, const void*, int64_t) {}
};

template <class Probe>
class Merge;
struct MergeCall;

template <class Probe = NoProbe>
class Exchange {
 public:
  Exchange(std::shared_ptr<Arena> arena, const Rows& rows, Waiter waiter)
      : arena_(std::move(arena)), rows_(rows), waiter_(std::move(waiter)), next_(arena_->layout().groups.size(), 1) {
    waiter_.left = &arena_->header().left;
  }
  ~Exchange() { arena_->header().left.fetch_or(1u << arena_->rank()); }
  Exchange(const Exchange&) = delete;

  Tuning tuning;
  Probe probe;
  Waiter& waiter() { return waiter_; }
  Arena& arena() { return *arena_; }
  const std::shared_ptr<Arena>& shared_arena() const { return arena_; }

  void barrier(int group) {
    in_step([&] {
      uint32_t& next = next_[size_t(group)];
      const Ranks& ranks = arena_->layout().groups[size_t(group)];
      write_note(group, next, Note{0, 0, -1, -1});
      publish_phase(group, next);
      wait_all(group, next);
      for (const int rank : ranks) read_note(rank, group, next, 0);
      ++next;
    });
  }

  void run(const Call& call) {
    Live live(*this, call);
    in_step([&] { live.run(); });
  }

  void run(const MergeCall& call) {  // see merge.h
    Merge<Probe> merge(*this, call);
    in_step([&] { merge.run(); });
  }

 private:
  friend class Merge<Probe>;

  // A call that fails midway leaves phases and notes that a later call would mistake for its own.
  template <class F>
  void in_step(F&& call) {
    waiter_.check_lost();
    if (broken_) throw CallError("an earlier call failed midway, and the ranks are out of step: restart them");
    broken_ = true;
    call();
    broken_ = false;
  }

  struct Live {
    Exchange& e;
    const Call& c;
    const Ranks& ranks;
    int me;
    uint32_t first;
    bool staged = false, exit = false;
    bool late = false;              // the norm comes after all else, since no slot holds a whole row
    int64_t row = 1;                // elements that a chunk never cuts
    int64_t stride = 0, piece = 0;  // bytes between a slot's lanes, which start on cache lines; elements of a chunk
    int64_t head = 0;               // bytes of a lane before its elements: in ragged calls the part's length
    uint32_t chunks = 1;
    Note notes[kMaxRanks];

    Live(Exchange& exchange, const Call& call)
        : e(exchange), c(call), ranks(exchange.arena_->layout().groups[size_t(call.group)]) {
      me = int(std::find(ranks.begin(), ranks.end(), e.arena_->rank()) - ranks.begin());
      first = e.next_[size_t(c.group)];
      stride = e.arena_->layout().slot_bytes / c.lanes / 64 * 64;
      head = c.ragged ? 64 : 0;
      const int64_t fits = (stride - head) / c.element;
      late = c.row > fits;
      row = late ? 1 : c.row;
      piece = row > 1 ? fits / row * row : fits / 64 * 64;
      if (piece <= 0)
        throw CallError("slots of " + std::to_string(e.arena_->layout().slot_bytes) + " bytes are too small for " +
                        std::to_string(c.lanes) + " ranks; give the transport a larger slot_bytes");
      chunks = count_chunks();
    }

    uint32_t count_chunks() const {
      int64_t longest = 0;
      for (const Part& part : *c.parts) longest = std::max(longest, part.length);
      return uint32_t(std::max<int64_t>(1, (longest + piece - 1) / piece));
    }

    void run() {
      const bool here = in_place();
      e.write_note(c.group, first,
                   Note{c.signature, chunks, here ? e.arena_->offset(c.x) : -1,
                        c.out ? e.arena_->offset(c.read_by_peers()) : -1});
      uint32_t phase = first;
      for (uint32_t s = 0;; ++s, ++phase) {
        if (s < chunks && !here) stage(s, phase);
        if (s >= 1 && s - 1 < chunks) take(s - 1, phase - 1);
        if (c.two_shot && s >= 2 && s - 2 < chunks) copy(s - 2, phase - 1);
        if (s == chunks + uint32_t(c.two_shot)) break;
        e.publish_phase(c.group, phase);
        e.wait_all(c.group, phase);
        if (s == 0) agree();
      }
      if (exit) {
        e.publish_phase(c.group, phase);
        e.wait_all(c.group, phase);
        ++phase;
      }
      e.next_[size_t(c.group)] = phase;
      if (late)
        for (const Part& part : *c.parts)
          if (part.readers >> me & 1) normalise(c.out + part.out * c.element, part.out, part.length);
    }

    // True if peers may read this rank's input in place.
    bool in_place() const {
      if (c.ragged) return false;  // a reader would not know where its range begins
      int64_t bytes = 0;
      for (const Part& part : *c.parts)
        if (part.sources >> me & 1) bytes += part.length * c.element;
      // In one shot, a result over the input would change it while peers read it.
      return bytes >= e.tuning.zero_copy_bytes && e.arena_->pool().holds(c.x) && (c.two_shot || c.out != c.x);
    }

    void agree() {
      bool anyone_in_place = false;
      for (size_t i = 0; i < ranks.size(); ++i) {
        notes[i] = e.read_note(ranks[i], c.group, first, c.signature);
        staged |= notes[i].x < 0;
        anyone_in_place |= notes[i].x >= 0;
        if (c.ragged) chunks = std::max(chunks, notes[i].chunks);
      }
      if (!staged && !c.ragged) {  // no slot limits the chunks
        const int64_t limit = e.tuning.chunk_bytes / c.element / row * row;
        if (limit > piece) piece = limit, chunks = count_chunks();
      }
      exit = c.two_shot || anyone_in_place;
    }

    int64_t length(const Part& part, uint32_t chunk) const {
      return std::clamp<int64_t>(part.length - int64_t(chunk) * piece, 0, piece);
    }
    char* lane(int rank, const Part& part, uint32_t phase) const {
      return e.arena_->slot(ranks[size_t(rank)], c.group, phase) + part.lane * stride;
    }

    bool needed_by_others(const Part& part) const {
      return c.two_shot ? part.owner != me : (part.readers & ~(1u << me)) != 0;
    }

    void stage(uint32_t chunk, uint32_t phase) {
      for (const Part& part : *c.parts) {
        if (!(part.sources >> me & 1) || !needed_by_others(part)) continue;
        const int64_t bytes = length(part, chunk) * c.element;
        const char* from = c.x + (part.x + int64_t(chunk) * piece) * c.element;
        char* to = lane(me, part, phase);
        if (head && chunk == 0) {
          e.probe.write(Holds::staged, chunk, to, sizeof part.length);
          std::memcpy(to, &part.length, sizeof part.length);
        }
        to += head;
        e.probe.write(Holds::staged, chunk, to, bytes);
        if (bytes >= e.tuning.stream_slot_bytes)
          e.rows_.copy_stream(to, from, bytes);
        else if (bytes > 0)
          std::memcpy(to, from, size_t(bytes));
      }
    }

    // The first shot: sums (or copies) chunk `chunk`, which the sources staged in `phase`.
    void take(uint32_t chunk, uint32_t phase) {
      const void* from[kMaxRanks];
      for (const Part& part : *c.parts) {
        if (c.two_shot ? part.owner != me : !(part.readers >> me & 1)) continue;
        const int64_t n = length(part, chunk), done = int64_t(chunk) * piece;
        if (head && chunk == 0 && part.owner != me) expect_length(part, phase);
        if (n <= 0) continue;
        int count = 0;
        for (size_t i = 0; i < ranks.size(); ++i) {
          if (!(part.sources >> i & 1)) continue;
          const int64_t at = (part.x + done) * c.element;
          const bool staged_there = notes[i].x < 0;
          if (int(i) == me)
            from[count] = c.x + at;
          else if (staged_there)
            from[count] = lane(int(i), part, phase) + head;
          else
            from[count] = e.arena_->at(notes[i].x) + at;
          if (int(i) != me)
            e.probe.read(staged_there ? Holds::staged : Holds::input, chunk, from[count], n * c.element);
          ++count;
        }
        const int64_t place = (part.out + done) * c.element;
        char* out = (c.two_shot ? c.read_by_peers() : c.out) + place;
        e.probe.write(Holds::result, chunk, out, n * c.element);
        if (count == 1)
          move(out, from[0], n * c.element);
        else
          e.rows_.reduce(c.dtype, out, from, count, n, streams_out(n));
        if (out != c.out + place) move(c.out + place, out, n * c.element);
        if (c.finish && !late) normalise(out, part.out + done, n);
      }
    }

    // True if a sum of n elements is stored past the cache. In two shots peers read it; a norm reads it again here. Not
    // over the input: no peer has read those lines, so a plain store finds them in this core's cache.
    bool streams_out(int64_t n) const {
      const bool read_again = c.finish || c.shared || c.out == c.x;
      const bool shared = c.two_shot && !read_again && n * c.element >= e.tuning.stream_slot_bytes;
      return shared || c.bytes >= e.tuning.stream_out_bytes;
    }

    // The elements that an owner, which is the source of each part of a ragged call, has for this rank.
    void expect_length(const Part& part, uint32_t phase) const {
      int64_t there;
      const char* place = lane(part.owner, part, phase);
      e.probe.read(Holds::staged, 0, place, sizeof there);
      std::memcpy(&there, place, sizeof there);
      if (there != part.length)
        throw CallError("rank " + std::to_string(ranks[size_t(part.owner)]) + " sends " + std::to_string(there) +
                        " elements where this rank expects " + std::to_string(part.length));
    }

    // The second shot: copies the owners' sums of `phase`.
    void copy(uint32_t chunk, uint32_t) {
      for (const Part& part : *c.parts) {
        if (part.owner == me || !(part.readers >> me & 1)) continue;
        const int64_t n = length(part, chunk), place = part.out + int64_t(chunk) * piece;
        if (n <= 0) continue;
        const char* from = e.arena_->at(notes[part.owner].out) + place * c.element;
        e.probe.read(Holds::result, chunk, from, n * c.element);
        if (!c.finish || late) {
          e.probe.write(Holds::result, chunk, c.out + place * c.element, n * c.element);
          move(c.out + place * c.element, from, n * c.element);
        }
        if (c.finish && !late) normalise(from, place, n);
      }
    }

    static void move(char* out, const void* from, int64_t bytes) { std::memcpy(out, from, size_t(bytes)); }

    // Whole rows: n elements of the sum, at delta, which go to `place` of the result.
    void normalise(const char* delta, int64_t place, int64_t n) {
      const Finish& f = *c.finish;
      const int64_t at = place * c.element;
      e.rows_.add_norm(c.dtype, static_cast<char*>(f.residual_out) + at, static_cast<char*>(f.normed) + at, delta,
                       static_cast<const char*>(f.residual) + at, f.weight, n / f.width, f.width, f.eps);
    }
  };

  // Release, of stores past the cache too: see publish.
  void publish_phase(int group, uint32_t phase) {
    stream_fence();
    probe.publish(group, phase);
    publish(arena_->line(arena_->rank(), group), phase);
  }
  // Acquire, of all that each rank of the group stored before it published the phase.
  void wait_all(int group, uint32_t phase) {
    for (const int rank : arena_->layout().groups[size_t(group)]) {
      if (rank == arena_->rank()) continue;
      waiter_.wait(arena_->line(rank, group), phase, rank);
      probe.wait(group, rank, phase);
    }
  }

  // A plain store: publishing the phase releases it.
  void write_note(int group, uint32_t phase, const Note& note) {
    Note& mine = arena_->line(arena_->rank(), group).notes[phase & 1];
    probe.write(Holds::note, 0, &mine, sizeof mine);
    mine = note;
  }
  // A rank's note of its call, read by a plain load after the wait for the phase; throws unless it is the same call.
  Note read_note(int rank, int group, uint32_t phase, uint32_t signature) {
    const Note& note = arena_->line(rank, group).notes[phase & 1];
    if (rank != arena_->rank()) probe.read(Holds::note, 0, &note, sizeof note);
    if (note.signature != signature)
      throw CallError("rank " + std::to_string(rank) + " makes another call, or one of another size, dtype, eps or root");
    return note;
  }

  std::shared_ptr<Arena> arena_;
  const Rows& rows_;
  Waiter waiter_;
  std::vector<uint32_t> next_;
  bool broken_ = false;
};

}  // namespace weft
