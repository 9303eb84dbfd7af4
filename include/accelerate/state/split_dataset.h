// accelerate/state/split_dataset.h - one process's part of a dataset, itself a dataset.
//
// Part of accelerate/state/split.h. Made by `split_between_processes(dataset)`.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/detail/core/split_range.h"

namespace accelerate {
namespace detail::state {

inline std::int64_t dataset_size(std::size_t size) { return static_cast<std::int64_t>(size); }
/// -1 for a dataset that does not know its size: it cannot be split.
inline std::int64_t dataset_size(const std::optional<std::size_t>& size) {
  return size ? static_cast<std::int64_t>(*size) : -1;
}

template <class D>
concept GetsItems = requires(D& dataset) { dataset.get(std::size_t{}); };
template <class D>
concept IndexesItems = requires(D& dataset) { dataset[std::size_t{}]; };
/// The datasets of LibTorch: batches are asked for by a list of indexes.
template <class D>
concept TorchDataset = requires {
  typename D::BatchType;
  typename D::BatchRequestType;
  requires std::constructible_from<typename D::BatchRequestType, const std::vector<std::size_t>&>;
};

/// Something with a size and items by index that is no container: no iterators.
template <class D>
concept SplitSource = requires(const D& dataset) {
  dataset_size(dataset.size());
} && (GetsItems<D> || TorchDataset<D> || (IndexesItems<D> && !requires(D& d) { d.begin(); }));

/// The member types that `torch::data::make_data_loader` needs.
template <class D>
struct DatasetTypes {};
template <TorchDataset D>
struct DatasetTypes<D> {
  using BatchType = typename D::BatchType;
  using BatchRequestType = typename D::BatchRequestType;
  static constexpr bool is_stateful = false;
};

}  // namespace detail::state

/// The items of one process. Refers to the dataset it was made from when that has a name, and owns
/// it when it was a temporary or moved in. Cheap to copy.
template <class D>
class SplitDataset : public detail::state::DatasetTypes<D> {
 public:
  SplitDataset(std::shared_ptr<D> dataset, detail::SplitPart part)
      : dataset_(std::move(dataset)), part_(part) {}

  [[nodiscard]] auto size() const {
    using Size = decltype(std::as_const(*dataset_).size());
    return Size(static_cast<std::size_t>(part_.size()));
  }

  /// The i-th item of this part.
  decltype(auto) get(std::size_t i)
    requires detail::state::GetsItems<D> || detail::state::IndexesItems<D>
  {
    if constexpr (detail::state::GetsItems<D>) {
      return dataset_->get(source_index(i));
    } else {
      return (*dataset_)[source_index(i)];
    }
  }
  decltype(auto) operator[](std::size_t i)
    requires detail::state::GetsItems<D> || detail::state::IndexesItems<D>
  {
    return get(i);
  }

  /// What LibTorch's data loader calls.
  template <class Request>
    requires detail::state::TorchDataset<D>
  auto get_batch(const Request& request) {
    std::vector<std::size_t> indexes;
    for (const std::size_t i : request) indexes.push_back(source_index(i));
    return dataset_->get_batch(typename D::BatchRequestType(indexes));
  }

  /// The index of the i-th item in the whole dataset.
  [[nodiscard]] std::size_t source_index(std::size_t i) const {
    return static_cast<std::size_t>(part_.at(static_cast<std::int64_t>(i)));
  }

 private:
  std::shared_ptr<D> dataset_;
  detail::SplitPart part_;
};

}  // namespace accelerate
