// tests/data/sharing.h - what the tests of prepared loaders share: data that are their own indices.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/prepared_loader.h"
#include "data/index_reference.h"

namespace accelerate::test {

using Batches = std::vector<IndexBatch>;

/// 0, 1, ..., size - 1, one after the other.
class Counting {
 public:
  explicit Counting(std::int64_t size) : size_(size) {}

  void reset() { at_ = 0; }
  std::optional<std::int64_t> next() {
    if (at_ == size_) return std::nullopt;
    return at_++;
  }

 private:
  std::int64_t size_;
  std::int64_t at_ = 0;
};

/// The same with a length.
class CountingWithSize : public Counting {
 public:
  explicit CountingWithSize(std::int64_t size) : Counting(size), length_(size) {}
  [[nodiscard]] std::int64_t size() const { return length_; }

 private:
  std::int64_t length_;
};

inline DataLoader<at::Tensor> indexed(std::int64_t size, const DataLoaderOptions& options) {
  return make_data_loader(torch::arange(size), options);
}
inline DataLoader<at::Tensor> counted(std::int64_t size, const DataLoaderOptions& options) {
  return make_data_loader(Counting(size), options);
}

inline IndexBatch indices(const at::Tensor& tensor) {
  const auto flat = tensor.to(torch::kLong).contiguous();
  return {flat.data_ptr<std::int64_t>(), flat.data_ptr<std::int64_t>() + flat.numel()};
}

inline Batches batches(const DataLoader<at::Tensor>& loader) {
  Batches result;
  for (auto& batch : loader) result.push_back(indices(batch));
  return result;
}

inline void append(IndexBatch& to, const IndexBatch& more) {
  to.insert(to.end(), more.begin(), more.end());
}

inline DataLoaderOptions loader_options(const GridSetting& setting) {
  return {.batch_size = setting.batch_size, .drop_last = setting.drop_last};
}

inline PrepareDataLoaderOptions prepare_options(const GridSetting& setting) {
  PrepareDataLoaderOptions options;
  options.split_batches = setting.split_batches;
  options.even_batches = setting.even_batches;
  return options;
}

}  // namespace accelerate::test
