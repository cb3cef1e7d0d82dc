// The shared segment: a header, then for each rank its lines, its staging slots, and a heap for tensors.
//
// Each rank writes only its own region, so that the first touch puts the pages on its NUMA node. Pages that nobody
// touches take no memory: the heap's size is a limit, not a cost.
#pragma once

#include <errno.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "sync.h"

namespace weft {

constexpr int kMaxRanks = 16, kMaxGroups = 64;
constexpr int64_t kPage = 4096;

struct alignas(kPage) Header {
  std::atomic<int32_t> lost;
  std::atomic<uint32_t> left;
};

// Group g of the world: its ranks, ascending.
using Ranks = std::vector<int>;

struct Layout {
  int world = 0;
  int64_t slot_bytes = 0, heap_bytes = 0;
  std::vector<Ranks> groups;

  // Whole pages: counters that straddle cache lines are not atomic, and streamed stores need aligned places.
  static int64_t pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
  int64_t lines_bytes() const { return int64_t(kMaxGroups * sizeof(Line)); }
  int64_t slots_bytes() const { return 2 * pages(slot_bytes) * int64_t(groups.size()); }
  int64_t region_bytes() const { return lines_bytes() + slots_bytes() + pages(heap_bytes); }
  int64_t bytes() const { return int64_t(sizeof(Header)) + region_bytes() * world; }
  int64_t region(int rank) const { return int64_t(sizeof(Header)) + region_bytes() * rank; }
};

// Blocks of a region, by size class: four classes for each doubling. A freed block serves its class again.
class Heap {
 public:
  Heap(char* base, int64_t bytes) : base_(base), bytes_(bytes) {}

  void* take(int64_t wanted) {
    std::lock_guard<std::mutex> hold(mutex_);
    const auto [size, index] = size_class(wanted);
    auto& free = free_[index];
    if (!free.empty()) {
      void* block = free.back();
      free.pop_back();
      return block;
    }
    if (used_ + size > bytes_)
      throw CallError("the arena of " + std::to_string(bytes_ >> 20) + " MiB a rank is full: " +
                      std::to_string(wanted) + " bytes more were asked for; give the transport a larger arena_bytes");
    void* block = base_ + used_;
    used_ += size;
    return block;
  }
  void give(void* block, int64_t wanted) {
    std::lock_guard<std::mutex> hold(mutex_);
    free_[size_class(wanted).second].push_back(block);
  }
  bool holds(const void* p) const { return p >= base_ && p < base_ + bytes_; }

 private:
  // 64, 128, 192, 256, then 5, 6, 7 and 8 times 64, 128, 256, …
  static std::pair<int64_t, size_t> size_class(int64_t wanted) {
    const int64_t lines = std::max<int64_t>(1, (wanted + 63) / 64);
    const int doubling = lines <= 4 ? 0 : 61 - __builtin_clzll(uint64_t(lines - 1));
    const int64_t steps = ((lines - 1) >> doubling) + 1;
    return {(steps << doubling) * 64, size_t(4 * doubling + steps - 1)};
  }
  char* base_;
  int64_t bytes_, used_ = 0;
  std::mutex mutex_;
  std::vector<void*> free_[4 * 64];
};

// One rank's mapping of the segment. Tensors in it keep it mapped.
class Arena {
 public:
  Arena(int fd, Layout layout, int rank) : layout_(std::move(layout)), rank_(rank) {
    void* base = mmap(nullptr, size_t(layout_.bytes()), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) throw CallError("cannot map the shared arena of " + std::to_string(layout_.bytes()) + " bytes");
    base_ = static_cast<char*>(base);
    heap_ = std::make_unique<Heap>(base_ + layout_.region(rank) + layout_.lines_bytes() + layout_.slots_bytes(),
                                   layout_.heap_bytes);
    touch(base_ + layout_.region(rank), layout_.lines_bytes());
    for (size_t g = 0; g < layout_.groups.size(); ++g)
      if (std::count(layout_.groups[g].begin(), layout_.groups[g].end(), rank))
        touch(slot(rank, int(g), 0), 2 * Layout::pages(layout_.slot_bytes));
  }
  ~Arena() { munmap(base_, size_t(layout_.bytes())); }
  Arena(const Arena&) = delete;

  const Layout& layout() const { return layout_; }
  int rank() const { return rank_; }
  Heap& heap() { return *heap_; }
  Header& header() { return *reinterpret_cast<Header*>(base_); }
  Line& line(int rank, int group) { return reinterpret_cast<Line*>(base_ + layout_.region(rank))[group]; }
  char* slot(int rank, int group, uint32_t phase) {
    return base_ + layout_.region(rank) + layout_.lines_bytes() +
           Layout::pages(layout_.slot_bytes) * (2 * group + int(phase & 1));
  }
  char* at(int64_t offset) { return base_ + offset; }
  int64_t offset(const void* p) const { return static_cast<const char*>(p) - base_; }

 private:
  // Takes the pages now: on this rank's node, and with an error here instead of a signal later.
  void touch(char* from, int64_t bytes) {
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
    if (madvise(from, size_t(bytes), kPopulateWrite) == 0) return;
    if (errno != EINVAL) {
      munmap(base_, size_t(layout_.bytes()));
      throw CallError("no memory for the " + std::to_string(bytes >> 10) + " KiB of shared slots of a rank");
    }
    for (int64_t i = 0; i < bytes; i += kPage) reinterpret_cast<std::atomic<char>*>(from + i)->fetch_or(0);
  }

  Layout layout_;
  int rank_;
  char* base_ = nullptr;
  std::unique_ptr<Heap> heap_;
};

}  // namespace weft
