// Calls that a step makes, to be made again with the same tensors, and memory for the results of a step.
#pragma once

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace weft::model {

namespace ffi = tvm::ffi;

// Memory of which parts are taken and given back in any order. It grows, and never shrinks.
class Memory {
 public:
  void* take(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    bytes = rounded(bytes);
    auto hole = find(bytes);
    if (hole == holes_.end()) {
      const int64_t grown = std::max(bytes, kGrowth);
      chunks_.emplace_back(new Line[size_t(grown) / sizeof(Line)]);
      total_ += grown;
      add(reinterpret_cast<char*>(chunks_.back().get()), grown);
      hole = find(bytes);
    }
    const auto [at, size] = *hole;
    holes_.erase(hole);
    if (size > bytes) holes_[at + bytes] = size - bytes;
    return at;
  }
  void give(void* at, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    add(static_cast<char*>(at), rounded(bytes));
  }
  int64_t total() const { return total_; }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  using Holes = std::map<char*, int64_t>;
  static int64_t rounded(int64_t bytes) { return std::max<int64_t>(1, (bytes + 63) / 64) * 64; }
  Holes::iterator find(int64_t bytes) {
    return std::find_if(holes_.begin(), holes_.end(), [&](const auto& hole) { return hole.second >= bytes; });
  }
  void add(char* at, int64_t bytes) {
    auto next = holes_.lower_bound(at);
    if (next != holes_.end() && at + bytes == next->first) bytes += next->second, next = holes_.erase(next);
    if (next != holes_.begin() && std::prev(next)->first + std::prev(next)->second == at)
      std::prev(next)->second += bytes;
    else
      holes_[at] = bytes;
  }

  static constexpr int64_t kGrowth = 4 << 20;
  std::mutex mutex_;  // a tensor may end on any thread
  Holes holes_;
  std::vector<std::unique_ptr<Line[]>> chunks_;
  int64_t total_ = 0;
};

// A tensor's part of it.
struct Piece {
  std::shared_ptr<Memory> memory;
  void AllocData(DLTensor* tensor) { tensor->data = memory->take(int64_t(ffi::GetDataSize(*tensor))); }
  void FreeData(DLTensor* tensor) { memory->give(tensor->data, int64_t(ffi::GetDataSize(*tensor))); }
};

// A call of any library's function. Its tensors' memory must stay: the call holds only their addresses.
class RecordedCall {
 public:
  // result: the memory that a returned tensor is copied to, or none.
  RecordedCall(ffi::Function function, const ffi::Array<ffi::Any>& arguments, ffi::Optional<ffi::TensorView> result)
      : function_(std::move(function)), values_(arguments.begin(), arguments.end()) {
    for (auto& value : values_) {
      if (value.type_index() != ffi::TypeIndex::kTVMFFITensor) {
        arguments_.emplace_back(value);
        continue;
      }
      const DLTensor& from = *value.cast<ffi::Tensor>().GetDLTensorPtr();
      auto& sizes = sizes_.emplace_back(new int64_t[size_t(2 * from.ndim) + 1]);
      std::copy_n(from.shape, from.ndim, sizes.get());
      std::copy_n(from.strides, from.ndim, sizes.get() + from.ndim);
      auto& copy = tensors_.emplace_back(new DLTensor(from));
      copy->shape = sizes.get(), copy->strides = sizes.get() + from.ndim;
      arguments_.emplace_back(copy.get());
      value = nullptr;
    }
    if (!result.has_value()) return;
    to_ = result.value().data_ptr(), bytes_ = int64_t(ffi::GetDataSize(size_t(result.value().numel()), result.value().dtype()));
  }
  void repeat() const {
    ffi::Any result;
    function_.CallPacked(arguments_.data(), int32_t(arguments_.size()), &result);
    if (to_ != nullptr) std::memcpy(to_, result.cast<ffi::Tensor>().data_ptr(), size_t(bytes_));
  }

 private:
  ffi::Function function_;
  std::vector<ffi::Any> values_;
  std::vector<std::unique_ptr<int64_t[]>> sizes_;
  std::vector<std::unique_ptr<DLTensor>> tensors_;
  std::vector<ffi::AnyView> arguments_;
  void* to_ = nullptr;
  int64_t bytes_ = 0;
};

struct Recorder {
  std::shared_ptr<Memory> memory = std::make_shared<Memory>();
  std::vector<std::unique_ptr<RecordedCall>> calls;
};

}  // namespace weft::model
