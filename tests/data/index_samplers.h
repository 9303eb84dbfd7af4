// tests/data/index_samplers.h - samplers as a user writes them, and shorthands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/data/batch_samplers.h"
#include "accelerate/data/sampler_adaptors.h"
#include "accelerate/samplers.h"
#include "data/batch_plan.h"

namespace accelerate::test {

/// Counts up by 7, from the epoch on, modulo the size.
class StridingSampler {
 public:
  explicit StridingSampler(std::size_t size) : size_(size) {}

  void begin(std::int64_t epoch) {
    epoch_ = static_cast<std::size_t>(epoch);
    position_ = 0;
  }
  std::optional<std::size_t> next() {
    if (position_ == size_) return std::nullopt;
    return (epoch_ + 7 * position_++) % size_;
  }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::size_t epoch_ = 0;
  std::size_t position_ = 0;
};

/// Batches of the given sizes, numbered through. Knows no batch size.
class BatchesOfSizes {
 public:
  explicit BatchesOfSizes(std::vector<std::int64_t> sizes) : sizes_(std::move(sizes)) {}

  void begin(std::int64_t /*epoch*/) {
    position_ = 0;
    index_ = 0;
  }
  std::optional<IndexBatch> next() {
    if (position_ == sizes_.size()) return std::nullopt;
    IndexBatch batch;
    for (std::int64_t i = 0; i < sizes_[position_]; ++i) batch.push_back(index_++);
    ++position_;
    return batch;
  }
  [[nodiscard]] std::size_t size() const { return sizes_.size(); }

 private:
  std::vector<std::int64_t> sizes_;
  std::size_t position_ = 0;
  std::int64_t index_ = 0;
};

/// The same, with the words by which they say what a full batch is.
class SizedBatchesOfSizes : public BatchesOfSizes {
 public:
  SizedBatchesOfSizes(std::vector<std::int64_t> sizes, std::size_t batch_size,
                      bool drop_last = false)
      : BatchesOfSizes(std::move(sizes)), batch_size_(batch_size), drop_last_(drop_last) {}

  [[nodiscard]] std::size_t batch_size() const { return batch_size_; }
  [[nodiscard]] bool drop_last() const { return drop_last_; }

 private:
  std::size_t batch_size_;
  bool drop_last_;
};

inline std::shared_ptr<BatchIndexSampler> sequential_batches(std::int64_t length,
                                                             std::int64_t batch_size,
                                                             bool drop_last = false) {
  return std::make_shared<BatchSampler>(std::make_shared<SequentialSampler>(length), batch_size,
                                        drop_last);
}

inline std::vector<IndexBatch> rest_of(BatchIndexStream& stream) {
  std::vector<IndexBatch> batches;
  while (auto batch = stream.next()) batches.push_back(std::move(*batch));
  return batches;
}

inline std::vector<IndexBatch> batches_of(BatchIndexSampler& sampler, std::int64_t epoch = 0) {
  return rest_of(*sampler.begin(epoch));
}

inline std::vector<detail::data::PlannedBatch> rest_of(detail::data::BatchPlan& plan) {
  std::vector<detail::data::PlannedBatch> batches;
  while (auto batch = plan.next()) batches.push_back(std::move(*batch));
  return batches;
}

inline IndexBatch rest_of(IndexStream& stream) {
  IndexBatch indices;
  while (const auto index = next_index(stream)) indices.push_back(*index);
  return indices;
}

}  // namespace accelerate::test
