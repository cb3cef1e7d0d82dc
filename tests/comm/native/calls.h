// The transport's calls in small, for programs without Python: the parts of each kind in elements, as plan.h lays them
// out.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>

#include "merge.h"

namespace weft {

enum class Kind { sum, scatter, gather, exchange, any, barrier, merge };

// What one call is; the same on every rank.
struct Shape {
  Kind kind = Kind::sum;
  int group = 0;
  int64_t count = 0;  // elements of a rank's input; tokens of a merge
  bool two_shot = false;
  uint32_t seed = 0;        // of sizes, and of who reads what in `any`
  uint32_t in_arena = 0;    // bit i: the group's i-th rank has its input there
  bool over_input = false;  // the result goes where the input is
};

struct Random {
  uint64_t state;
  uint32_t operator()() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t(state >> 33);
  }
  uint32_t below(uint32_t n) { return (*this)() % n; }
};

// A part of the result: the sum of what some ranks have from element x on.
struct Want {
  int64_t out, length, x;
  uint32_t sources;
};

// A call's parts as rank `me` of `n` sees them, and what it must find in its result. Sizes are in elements.
struct Parts {
  std::vector<Part> parts;
  std::vector<Want> wanted;
  int64_t input = 0, result = 0;
  int lanes = 1;

  Parts(const Shape& s, int me, int n) {
    const uint32_t all = (1u << n) - 1, mine = 1u << me;
    Random random{s.seed * 2654435761ull + 1};
    input = s.count;
    const auto cut = [&](int64_t i) { return s.count * i / n; };
    const auto add = [&](Part part) {
      parts.push_back(part);
      if (part.readers & mine) want(part.out, part.length, part.x, part.sources);
    };
    switch (s.kind) {
      case Kind::barrier:
      case Kind::merge:
        break;
      case Kind::sum:
        if (!s.two_shot) {
          add({0, 0, s.count, all, all, 0, 0});
          break;
        }
        lanes = n;
        for (int i = 0; i < n; ++i) add({cut(i), cut(i), cut(i + 1) - cut(i), all, all, i, i});
        break;
      case Kind::scatter:
        lanes = n;
        for (int i = 0; i < n; ++i) add({cut(i), 0, cut(i + 1) - cut(i), all, 1u << i, i, i});
        break;
      case Kind::gather:
        for (int i = 0; i < n; ++i) add({0, s.count * i, s.count, 1u << i, all, i, 0});
        break;
      case Kind::exchange: {
        lanes = n;
        int64_t sent[kMaxRanks][kMaxRanks];
        for (int i = 0; i < n; ++i)
          for (int j = 0; j < n; ++j) sent[i][j] = random.below(uint32_t(s.count) + 1);
        int64_t from = 0, at = 0;
        for (int i = 0; i < n; ++i) {
          int64_t there = 0;
          for (int j = 0; j < me; ++j) there += sent[i][j];
          if (i == me) {
            parts.push_back({from, at, sent[i][i], mine, mine, i, i});
          } else {
            parts.push_back({from, 0, sent[me][i], mine, 1u << i, i, i});
            parts.push_back({0, at, sent[i][me], 1u << i, mine, i, me});
          }
          want(at, sent[i][me], there, 1u << i);
          from += sent[me][i];
          at += sent[i][me];
        }
        input = from;
        break;
      }
      case Kind::any: {  // as in the edges between layouts: some ranks have it, some want it
        lanes = n;
        for (int i = 0; i < n; ++i) {
          const uint32_t sources = 1 + random.below(all), readers = 1 + random.below(all);
          add({cut(i), cut(i), cut(i + 1) - cut(i), sources, readers, int(random.below(uint32_t(n))), i});
        }
      }
    }
    result = std::max(result, s.two_shot ? s.count : 0);  // an owner sums where its result is, though it wants none
  }

  void want(int64_t out, int64_t length, int64_t x, uint32_t sources) {
    wanted.push_back({out, length, x, sources});
    result = std::max(result, out + length);
  }
};

// A merge of float32 heads, and its tensors: token by token, of each of `heads` heads `dim` elements.
struct Merging {
  MergeCall call;
  std::vector<float> out, lse, own, own_lse;

  Merging(const Shape& s, int n, int64_t own_heads, int64_t dim, uint32_t signature) {
    const int64_t rows = s.count * own_heads;
    out.resize(size_t(rows * n * dim)), lse.resize(size_t(rows * n)), own.resize(size_t(rows * dim), -1);
    own_lse.resize(size_t(rows), -1);
    call.group = s.group, call.element = sizeof(float), call.signature = signature;
    call.tokens = s.count, call.heads = own_heads * n, call.dim = dim;
    call.out = reinterpret_cast<const char*>(out.data()), call.lse = lse.data();
    call.out_head = dim * call.element, call.out_token = call.heads * call.out_head;
    call.lse_head = 1, call.lse_token = call.heads;
    call.own = reinterpret_cast<char*>(own.data()), call.own_lse = own_lse.data();
  }
};

inline int shared_memory(const Layout& layout) {
  const int fd = int(syscall(SYS_memfd_create, "weft", 0));
  if (fd < 0 || ftruncate(fd, layout.bytes())) std::abort();
  return fd;
}

// Makes a call on float32. x, out: of this rank; out lies in the arena.
template <class Probe>
void make(Exchange<Probe>& exchange, const Shape& shape, Parts& parts, const float* x, float* out, uint32_t signature) {
  if (shape.kind == Kind::barrier) return exchange.barrier(shape.group);
  Call call;
  call.group = shape.group;
  call.element = sizeof(float);
  call.x = reinterpret_cast<const char*>(x);
  call.out = reinterpret_cast<char*>(out);
  call.two_shot = shape.two_shot;
  call.ragged = shape.kind == Kind::exchange;
  call.lanes = parts.lanes;
  call.bytes = parts.result * call.element;
  call.signature = signature;
  call.parts = &parts.parts;
  exchange.run(call);
}

}  // namespace weft
