// accelerate/data/iterable_dataset_shard.h - the samples of one process, when several share out an
// iterable dataset.
//
// Prepared loaders do this themselves; the class is for loops of your own.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/data/options.h"
#include "accelerate/detail/data/sample_stream.h"

namespace accelerate {

struct IterableDatasetShardOptions {
  std::int64_t batch_size = 1;
  bool drop_last = false;
  int num_processes = 1;
  int process_index = 0;
  /// A group is one batch, cut into equal parts, instead of one batch per process.
  bool split_batches = false;
};

namespace detail::data {
/// Throws `ArgumentError` for a process that there is not, and for a batch that the processes
/// cannot share equally.
[[nodiscard]] ACCELERATE_API StreamCut shard_cut(const IterableDatasetShardOptions& options);
}  // namespace detail::data

/// An iterable dataset again, with the samples of one process: groups of `batch_size` samples per
/// process, or of `batch_size` in all, of which each process takes its share. A last group that is
/// not full is left out or filled up from the start.
///
///     IterableDatasetShard shard(lines, {.batch_size = 2, .num_processes = 2, .process_index =
///     1}); while (auto line = shard.next()) use(*line);
template <detail::data::IterableDataset D>
  requires std::copy_constructible<detail::data::ItemOf<D>>
class IterableDatasetShard {
 public:
  using Item = detail::data::ItemOf<D>;

  /// Throws `ArgumentError` for a process that there is not, and for a batch that the processes
  /// cannot share equally.
  explicit IterableDatasetShard(D dataset, const IterableDatasetShardOptions& options = {})
      : dataset_(std::make_shared<D>(std::move(dataset))),
        options_(options),
        cut_(detail::data::shard_cut(options)) {}

  void set_epoch(std::int64_t epoch) { epoch_ = epoch; }
  /// Begins a new pass. The epoch seeds the generator of a dataset that has one and no
  /// `set_epoch`.
  void reset() {
    detail::data::seed_generator(*dataset_, epoch_);
    reader_.emplace(dataset_, static_cast<std::size_t>(options_.batch_size), epoch_);
    group_.clear();
    first_.clear();
    position_ = cut_.end;
  }
  std::optional<Item> next() {
    if (!reader_) reset();
    if (position_ == cut_.end && !read_group()) return std::nullopt;
    return group_[static_cast<std::size_t>(position_++)];
  }
  /// Samples of this process, where the dataset knows its own.
  [[nodiscard]] std::optional<std::int64_t> size() const {
    const auto all = detail::data::dataset_length(*dataset_);
    if (!all) return std::nullopt;
    const auto groups = (*all + (options_.drop_last ? 0 : cut_.group - 1)) / cut_.group;
    return groups * (cut_.end - cut_.begin);
  }

 private:
  bool read_group() {
    group_.clear();
    while (std::ssize(group_) < cut_.group) {
      auto item = reader_->next();
      if (!item) break;
      group_.push_back(std::move(*item));
    }
    const bool full = std::ssize(group_) == cut_.group;
    if (group_.empty() || (!full && options_.drop_last)) return false;
    if (first_.empty()) first_ = group_;
    detail::data::check_filling(std::ssize(first_), cut_.group);
    for (std::size_t i = 0; std::ssize(group_) < cut_.group; ++i) {
      group_.push_back(first_[i % first_.size()]);
    }
    position_ = cut_.begin;
    return true;
  }

  std::shared_ptr<D> dataset_;
  IterableDatasetShardOptions options_;
  detail::data::StreamCut cut_;
  std::int64_t epoch_ = 0;
  std::optional<detail::data::ItemReader<D>> reader_ = std::nullopt;
  std::vector<Item> group_ = {};
  std::vector<Item> first_ = {};
  std::int64_t position_ = 0;
};

}  // namespace accelerate
