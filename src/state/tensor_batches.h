// src/state/tensor_batches.h - tensors by device and dtype: lists that one kernel processes.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace accelerate::detail::state {

/// `clear` keeps the memory of the lists, so that steps of a training loop allocate none.
class TensorBatches {
 public:
  using Lists = std::vector<std::vector<at::Tensor>>;

  void add(at::Tensor tensor) {
    auto& batch = batch_for(tensor);
    batch.push_back(std::move(tensor));
  }
  /// Releases all tensors.
  void clear() noexcept {
    for (auto& batch : *this) batch.clear();
    used_ = 0;
  }

  [[nodiscard]] Lists::iterator begin() { return batches_.begin(); }
  [[nodiscard]] Lists::iterator end() {
    return batches_.begin() + static_cast<std::ptrdiff_t>(used_);
  }

 private:
  std::vector<at::Tensor>& batch_for(const at::Tensor& tensor) {
    const auto found = std::find_if(begin(), end(), [&](const auto& batch) {
      return batch[0].device() == tensor.device() && batch[0].scalar_type() == tensor.scalar_type();
    });
    if (found != end()) return *found;
    if (used_ == batches_.size()) batches_.emplace_back();
    return batches_[used_++];
  }

  Lists batches_;
  std::size_t used_ = 0;
};

/// Clears lists that outlive their scope, so that they keep no tensor alive.
template <class Lists>
class ClearedAtEnd {
 public:
  explicit ClearedAtEnd(Lists& lists) : lists_(lists) {}
  ~ClearedAtEnd() { lists_.clear(); }
  ClearedAtEnd(const ClearedAtEnd&) = delete;
  ClearedAtEnd& operator=(const ClearedAtEnd&) = delete;

 private:
  Lists& lists_;
};

}  // namespace accelerate::detail::state
