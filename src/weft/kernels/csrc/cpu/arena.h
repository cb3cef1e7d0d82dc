// The shared segment: a header, then for each rank its lines, its staging slots, and its pool of blocks for tensors.
//
// Each rank writes only its own region, so that the first touch puts the pages on its NUMA node. Untouched pages cost
// no memory: the pool's size is a limit, not a cost.
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
  int64_t slot_bytes = 0, blocks = 0, block_bytes = 0;
  std::vector<Ranks> groups;

  // Whole pages: counters that straddle cache lines are not atomic, and streamed stores need aligned places.
  static int64_t pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
  int64_t lines_bytes() const { return int64_t(kMaxGroups * sizeof(Line)); }
  int64_t slots_bytes() const { return 2 * pages(slot_bytes) * int64_t(groups.size()); }
  // Blocks begin on pages. Offsets of some lines, so that blocks begin in different sets of the cache, were tried:
  // calls of 64 KiB were up to a tenth slower.
  int64_t block_stride() const { return pages(block_bytes); }
  int64_t region_bytes() const { return lines_bytes() + slots_bytes() + pages(blocks * block_stride()); }
  int64_t bytes() const { return int64_t(sizeof(Header)) + region_bytes() * world; }
  int64_t region(int rank) const { return int64_t(sizeof(Header)) + region_bytes() * rank; }
};

// A rank's memory for tensors: blocks of one size, one for each tensor.
//
// Blocks of one size cannot fragment. For any sizes in any order, a tensor fits while fewer than `blocks` are alive. So
// a caller that knows its maximum number of live tensors and their maximum size never meets a full pool. The block that
// was freed last is taken first: it is most likely in the cache. Blocks that are not needed are never touched and cost
// no memory.
class Pool {
 public:
  Pool(char* base, int64_t blocks, int64_t block_bytes, int64_t stride)
      : base_(base), block_bytes_(block_bytes), stride_(stride), blocks_(size_t(blocks)), free_(size_t(blocks)) {
    for (size_t i = 0; i < blocks_; ++i) free_[i] = base + stride * int64_t(blocks_ - 1 - i);
  }

  void* take(int64_t bytes) {
    if (bytes > block_bytes_)
      throw CallError("a tensor of " + std::to_string(bytes) + " bytes does not fit a block of the arena, which has " +
                      std::to_string(block_bytes_) + "; give the transport larger block_bytes");
    std::lock_guard<std::mutex> hold(mutex_);
    if (free_.empty())
      throw CallError("all " + std::to_string(blocks_) + " blocks of this rank's arena hold tensors that are still " +
                      "alive; give the transport more blocks");
    void* block = free_.back();
    free_.pop_back();
    peak_ = std::max(peak_, blocks_ - free_.size());
    return block;
  }
  void give(void* block) {
    std::lock_guard<std::mutex> hold(mutex_);
    free_.push_back(static_cast<char*>(block));
  }
  bool holds(const void* p) const { return p >= base_ && p < base_ + stride_ * int64_t(blocks_); }

  // Maximum number of blocks in use at once; no other block was ever touched.
  size_t peak() {
    std::lock_guard<std::mutex> hold(mutex_);
    return peak_;
  }

 private:
  char* base_;
  int64_t block_bytes_, stride_;
  size_t blocks_, peak_ = 0;
  std::mutex mutex_;
  std::vector<char*> free_;
};

// One rank's mapping of the segment. Tensors in it keep it mapped.
class Arena {
 public:
  Arena(int fd, Layout layout, int rank) : layout_(std::move(layout)), rank_(rank) {
    void* base = mmap(nullptr, size_t(layout_.bytes()), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED)
      throw CallError("cannot map the shared arena of " + std::to_string(layout_.bytes()) + " bytes");
    base_ = static_cast<char*>(base);
    pool_ = std::make_unique<Pool>(base_ + layout_.region(rank) + layout_.lines_bytes() + layout_.slots_bytes(),
                                   layout_.blocks, layout_.block_bytes, layout_.block_stride());
    touch(base_ + layout_.region(rank), layout_.lines_bytes());
    for (size_t g = 0; g < layout_.groups.size(); ++g)
      if (std::count(layout_.groups[g].begin(), layout_.groups[g].end(), rank))
        touch(slot(rank, int(g), 0), 2 * Layout::pages(layout_.slot_bytes));
  }
  ~Arena() { munmap(base_, size_t(layout_.bytes())); }
  Arena(const Arena&) = delete;

  const Layout& layout() const { return layout_; }
  int rank() const { return rank_; }
  Pool& pool() { return *pool_; }
  Header& header() { return *reinterpret_cast<Header*>(base_); }
  Line& line(int rank, int group) { return reinterpret_cast<Line*>(base_ + layout_.region(rank))[group]; }
  char* slot(int rank, int group, uint32_t phase) {
    return base_ + layout_.region(rank) + layout_.lines_bytes() +
           Layout::pages(layout_.slot_bytes) * (2 * group + int(phase & 1));
  }
  char* at(int64_t offset) { return base_ + offset; }
  int64_t offset(const void* p) const { return static_cast<const char*>(p) - base_; }

 private:
  // Allocates the pages now: on this rank's node, and with an error here instead of a signal later.
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
  std::unique_ptr<Pool> pool_;
};

}  // namespace weft
