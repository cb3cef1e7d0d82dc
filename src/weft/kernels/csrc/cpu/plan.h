// The plan of a collective: computed once for its sizes, and laid out for the row width of each call.
//
// Python describes a collective by its parts (weft/planner/exchange.py): ranges of rows with the ranks that hold a term
// of them (sources) and the ranks that want them (readers). The plan follows from the parts, and is the same on all
// ranks: rows received and sent, the rank that sums each share in two shots, each part's place in a slot, and the
// signature by which ranks notice that they make different calls.
#pragma once

#include "exchange.h"

namespace weft {

// A share of a part that one rank sums in two shots, and the share's lane in the slots of the part's sources.
struct Share {
  int owner = 0, lane = 0;
};

struct RowPart {
  uint32_t sources = 0, readers = 0;  // bit i: the group's i-th rank
  int64_t source_row = 0, reader_row = 0, rows = 0;
  int lane = 0;               // in one shot
  std::vector<Share> shares;  // in two shots: even ones
};

inline uint32_t mix(uint32_t hash, uint64_t value) {
  const uint64_t mixed = (hash ^ value) * 0x9e3779b97f4a7c15ull;
  return uint32_t(mixed >> 32) | 1;
}

// Assigns the lanes of slots: two parts that have a source in common never share one.
class Lanes {
 public:
  int take(uint32_t sources) {
    int lane = 0;
    for (int i = 0; i < kMaxRanks; ++i)
      if (sources >> i & 1) lane = std::max(lane, next_[i]);
    for (int i = 0; i < kMaxRanks; ++i)
      if (sources >> i & 1) next_[i] = lane + 1;
    count_ = std::max(count_, lane + 1);
    return lane;
  }
  int count() const { return count_; }

 private:
  int next_[kMaxRanks] = {}, count_ = 1;
};

class Plan {
 public:
  // me: this rank's place in the group. permute: only a row's sender and receiver know of it. sums: parts are summed
  // over their sources; else the first source's rows are copied. flat: for each part its sources, readers, first row in
  // a source's input, first row in a reader's result, and number of rows. If there is one part, its number of rows may
  // be -1: the plan then serves inputs of any number of rows, and all of them are the part's.
  Plan(int group, int me, bool permute, bool sums, const std::vector<int64_t>& flat)
      : group_(group), permute_(permute), sums_(sums), signature_(mix(1, permute ? 2 : sums)) {
    Lanes lanes, share_lanes;
    for (size_t i = 0; i + 5 <= flat.size(); i += 5) {
      RowPart part{uint32_t(flat[i]), uint32_t(flat[i + 1]), flat[i + 2], flat[i + 3], flat[i + 4], 0, {}};
      if (part.sources >> me & 1) input_rows_ = std::max(input_rows_, part.source_row + part.rows);
      if (part.readers >> me & 1) result_rows_ = std::max(result_rows_, part.reader_row + part.rows);
      if (!sums) part.sources &= -part.sources;
      part.lane = lanes.take(part.sources);
      // Ranks that hold a term and want the sum own a share each; where there is no such rank, the first reader owns
      // all.
      uint32_t owners = part.sources & part.readers;
      if (!owners) owners = part.readers & -part.readers;
      for (int r = 0; r < kMaxRanks; ++r)
        if (owners >> r & 1) part.shares.push_back(Share{r, share_lanes.take(part.sources)});
      if (sums && part.shares.size() > 1) shared_ = true;
      open_ = part.rows < 0;
      rows_ += part.rows;
      moved_ |= part.source_row != part.reader_row;
      if (!permute)
        for (size_t k = 0; k < (open_ ? 4 : 5); ++k) signature_ = mix(signature_, uint64_t(flat[i + k]));
      if (!permute || ((part.sources | part.readers) >> me & 1)) parts_.push_back(std::move(part));
    }
    lanes_ = lanes.count(), share_lanes_ = share_lanes.count();
  }

  // Rows of this rank's input and of its result, for an input of `given` rows.
  int64_t input_rows(int64_t given) const { return open_ ? given : input_rows_; }
  int64_t result_rows(int64_t given) const { return open_ ? given : result_rows_; }
  bool sums() const { return sums_; }
  // True if the result may lie over the input: every row has the same place in both.
  bool in_place() const { return !moved_ && !permute_ && input_rows_ == result_rows_; }

  // Fills in the fields of a call that follow from the plan. call.element is set. given, width: the input's rows, and
  // their elements. norm: rows continue to it, so that none is cut.
  void lay_out(Call& call, std::vector<Part>& parts, int64_t given, int64_t width, bool norm,
               const Tuning& tuning) const {
    call.group = group_;
    call.sums = sums_;
    call.ragged = permute_;
    call.two_shot = shared_ && (open_ ? given : rows_) * width * call.element > tuning.two_shot_bytes;
    call.lanes = call.two_shot ? share_lanes_ : lanes_;
    call.bytes = result_rows(given) * width * call.element;
    call.signature = mix(mix(open_ ? mix(signature_, uint64_t(given)) : signature_, uint64_t(width)), norm);
    call.parts = &parts;
    parts.clear();
    for (const RowPart& part : parts_) {
      const int64_t from = part.source_row * width, to = part.reader_row * width;
      const int64_t length = (open_ ? given : part.rows) * width;
      if (!call.two_shot) {
        const int first = __builtin_ctz(part.sources);
        parts.push_back(Part{from, to, length, part.sources, part.readers, first, part.lane});
        continue;
      }
      // Shares are whole rows where rows continue to the norm, else whole cache lines.
      const int64_t unit = norm ? width : 64, units = unit ? (length + unit - 1) / unit : 0;
      const int64_t owners = int64_t(part.shares.size()), each = units / owners, more = units % owners;
      int64_t begin = 0;
      for (int64_t i = 0; i < owners; ++i) {
        const int64_t end = std::min(length, begin + (each + (i < more)) * unit);
        const auto [owner, lane] = part.shares[size_t(i)];
        if (begin < end)
          parts.push_back(Part{from + begin, to + begin, end - begin, part.sources, part.readers, owner, lane});
        begin = end;
      }
    }
  }

 private:
  int group_;
  bool permute_, sums_, shared_ = false, moved_ = false, open_ = false;
  uint32_t signature_;
  int64_t input_rows_ = 0, result_rows_ = 0, rows_ = 0;
  int lanes_ = 1, share_lanes_ = 1;
  std::vector<RowPart> parts_;
};

}  // namespace weft
