// The merge of attention over shards of the keys: each rank has outputs and log-sum-exps of all heads over its own
// tokens, and gets its own heads over all tokens, as `softmax_merge` in weft/kernels/torch_reference.py defines it.
//
// Each rank stages the other ranks' heads, reads its own from the others' slots, and merges them in rank order, in
// float. A row is one head of one token. Rows go in chunks that fit a lane, in the pipeline of exchange.h: in each
// phase a rank stages chunk s and merges chunk s-1. For an empty row only the log-sum-exp is staged and read.
#pragma once

#include <cmath>

#include "exchange.h"

namespace weft {

// Strides are in bytes for out, in elements for lse. own, own_lse: [tokens, heads / ranks, dim] and without dim, dense.
struct MergeCall {
  int group = 0;
  DType dtype = DType::f32;
  int64_t element = 0, tokens = 0, heads = 0, dim = 0;
  const char* out = nullptr;
  int64_t out_token = 0, out_head = 0;
  const float* lse = nullptr;
  int64_t lse_token = 0, lse_head = 0;
  char* own = nullptr;
  float* own_lse = nullptr;
  uint32_t signature = 0;
};

// A part's log-sum-exp, with −inf for NaN and +inf, which some kernels return for an empty part.
inline float known_lse(float lse) { return lse < INFINITY ? lse : -INFINITY; }

// Turns log-sum-exps into weights that sum to 1, or are 0 if all parts are empty; returns the log-sum-exp of all.
inline float weigh(float* lses, int parts) {
  float top = -INFINITY, total = 0;
  for (int i = 0; i < parts; ++i) top = std::max(top, lses[i] = known_lse(lses[i]));
  if (top == -INFINITY) {
    std::fill(lses, lses + parts, 0.0f);
    return top;
  }
  for (int i = 0; i < parts; ++i) total += lses[i] = std::exp(lses[i] - top);
  for (int i = 0; i < parts; ++i) lses[i] /= total;
  return top + std::log(total);
}

template <class Probe>
class Merge {
 public:
  Merge(Exchange<Probe>& exchange, const MergeCall& call)
      : e_(exchange), c_(call), ranks_(e_.arena_->layout().groups[size_t(call.group)]), n_(int(ranks_.size())) {
    me_ = int(std::find(ranks_.begin(), ranks_.end(), e_.arena_->rank()) - ranks_.begin());
    own_heads_ = c_.heads / n_, rows_ = c_.tokens * own_heads_, row_bytes_ = c_.dim * c_.element;
    stride_ = e_.arena_->layout().slot_bytes / std::max(1, n_ - 1) / 64 * 64;
    chunk_rows_ = (stride_ - 64) / (row_bytes_ + int64_t(sizeof(float)));
    if (chunk_rows_ <= 0)
      throw CallError("slots of " + std::to_string(e_.arena_->layout().slot_bytes) + " bytes are too small for " +
                      std::to_string(n_) + " ranks' heads of " + std::to_string(row_bytes_) +
                      " bytes; give the transport a larger slot_bytes");
  }

  void run() {
    const auto chunks = uint32_t(std::max<int64_t>(1, (rows_ + chunk_rows_ - 1) / chunk_rows_));
    uint32_t phase = e_.next_[size_t(c_.group)];
    e_.write_note(c_.group, phase, Note{c_.signature, chunks, -1, -1});
    for (uint32_t s = 0;; ++s, ++phase) {
      if (s < chunks)
        for (int reader = 0; reader < n_; ++reader)
          if (reader != me_) stage(reader, s, phase);
      if (s > 0) take(s - 1, phase - 1);
      if (s == chunks) break;
      e_.publish_phase(c_.group, phase);
      e_.wait_all(c_.group, phase);
      if (s == 0)
        for (const int rank : ranks_) e_.read_note(rank, c_.group, phase, c_.signature);
    }
    e_.next_[size_t(c_.group)] = phase;
  }

 private:
  // A lane holds a reader's rows of a chunk: their log-sum-exps, then, from a cache line on, their outputs.
  char* lane(int source, int reader, uint32_t phase) const {
    return e_.arena_->slot(ranks_[size_t(source)], c_.group, phase) + (reader - (reader > source)) * stride_;
  }
  static int64_t payload(int64_t rows) { return (rows * int64_t(sizeof(float)) + 63) / 64 * 64; }

  int64_t first_row(uint32_t chunk) const { return int64_t(chunk) * chunk_rows_; }
  int64_t rows_of(uint32_t chunk) const { return std::min(chunk_rows_, rows_ - first_row(chunk)); }

  // The place of a reader's row on this rank: rows go by token, then by head.
  const char* out(int reader, int64_t row) const {
    return c_.out + row / own_heads_ * c_.out_token + (reader * own_heads_ + row % own_heads_) * c_.out_head;
  }
  float lse(int reader, int64_t row) const {
    return known_lse(c_.lse[row / own_heads_ * c_.lse_token + (reader * own_heads_ + row % own_heads_) * c_.lse_head]);
  }

  void stage(int reader, uint32_t chunk, uint32_t phase) {
    const int64_t first = first_row(chunk), count = rows_of(chunk);
    auto* lses = reinterpret_cast<float*>(lane(me_, reader, phase));
    char* to = reinterpret_cast<char*>(lses) + payload(count);
    e_.probe.write(Holds::staged, chunk, lses, count * int64_t(sizeof(float)));
    for (int64_t i = 0; i < count; ++i) lses[i] = lse(reader, first + i);
    for (int64_t i = 0; i < count; ++i, to += row_bytes_) {
      if (lses[i] == -INFINITY) continue;
      e_.probe.write(Holds::staged, chunk, to, row_bytes_);
      std::memcpy(to, out(reader, first + i), size_t(row_bytes_));
    }
  }

  void take(uint32_t chunk, uint32_t phase) {
    const int64_t first = first_row(chunk), count = rows_of(chunk);
    const char* lanes[kMaxRanks];
    for (int r = 0; r < n_; ++r) {
      if (r == me_) continue;
      lanes[r] = lane(r, me_, phase);
      e_.probe.read(Holds::staged, chunk, lanes[r], count * int64_t(sizeof(float)));
    }
    for (int64_t i = 0; i < count; ++i) {
      float weights[kMaxRanks];
      for (int r = 0; r < n_; ++r)
        weights[r] = r == me_ ? lse(me_, first + i) : reinterpret_cast<const float*>(lanes[r])[i];
      c_.own_lse[first + i] = weigh(weights, n_);
      const void* from[kMaxRanks];
      int parts = 0;
      for (int r = 0; r < n_; ++r) {
        if (weights[r] == 0) continue;
        from[parts] = r == me_ ? out(me_, first + i) : lanes[r] + payload(count) + i * row_bytes_;
        if (r != me_) e_.probe.read(Holds::staged, chunk, from[parts], row_bytes_);
        weights[parts++] = weights[r];
      }
      char* to = c_.own + (first + i) * row_bytes_;
      if (parts == 0)
        std::memset(to, 0, size_t(row_bytes_));
      else
        e_.rows_.weighted(c_.dtype, to, from, weights, parts, c_.dim);
    }
  }

  Exchange<Probe>& e_;
  const MergeCall& c_;
  const Ranks& ranks_;
  int n_, me_;
  int64_t own_heads_, rows_, row_bytes_, stride_, chunk_rows_;  // chunk_rows_: rows of a chunk
};

}  // namespace weft
