// tests/data/loading.h - what the tests of data loaders share.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "accelerate/data_loader.h"

namespace accelerate::test {

using Numbers = std::vector<std::int64_t>;
/// Sample i is a number; one type for many tests, which keeps them quick to compile.
using NumberDataset = FunctionDataset<std::function<std::int64_t(std::int64_t)>>;
using NumberLoader = DataLoader<at::Tensor>;

inline Numbers numbers(const at::Tensor& tensor) {
  const auto flat = tensor.to(torch::kLong).contiguous();
  return {flat.data_ptr<std::int64_t>(), flat.data_ptr<std::int64_t>() + flat.numel()};
}

/// The batches of one pass.
template <class Loader>
std::vector<Numbers> batches(const Loader& loader) {
  std::vector<Numbers> result;
  for (auto& batch : loader) result.push_back(numbers(batch));
  return result;
}

/// The samples of one pass, in order.
template <class Loader>
Numbers samples(const Loader& loader) {
  Numbers result;
  for (const auto& batch : batches(loader)) result.insert(result.end(), batch.begin(), batch.end());
  return result;
}

inline Numbers iota(std::int64_t size) { return numbers(torch::arange(size)); }

/// A loader over 0, 1, ..., size - 1; `f` is called with each index first.
inline NumberLoader number_loader(
    std::int64_t size, const DataLoaderOptions& options,
    const std::function<void(std::int64_t)>& f = [](std::int64_t) {}) {
  return make_data_loader(NumberDataset(size,
                                        [f](std::int64_t i) {
                                          f(i);
                                          return i;
                                        }),
                          options);
}

}  // namespace accelerate::test
