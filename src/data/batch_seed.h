// src/data/batch_seed.h - where the random numbers of one batch start.
#pragma once

#include <cstddef>
#include <cstdint>

#include "accelerate/data/worker_generator.h"

namespace accelerate::detail::data {

/// The seed of one batch.
[[nodiscard]] std::uint64_t batch_seed(std::uint64_t base_seed, std::int64_t epoch,
                                       std::int64_t sequence) noexcept;

/// While it lives, `worker_generator()` of this thread starts from `seed`. Scopes nest. The
/// generator is seeded when it is first asked for: most datasets never do.
class BatchSeedScope {
 public:
  explicit BatchSeedScope(std::uint64_t seed) noexcept;
  ~BatchSeedScope();
  BatchSeedScope(const BatchSeedScope&) = delete;
  BatchSeedScope& operator=(const BatchSeedScope&) = delete;

 private:
  friend at::Generator& accelerate::worker_generator();
  std::uint64_t seed_;
  bool seeded_ = false;
  BatchSeedScope* outer_;
  std::size_t depth_;
};

/// What the random numbers of a pass depend on.
struct PassSeed {
  std::uint64_t base_seed = 0;
  std::int64_t epoch = 0;
  /// The number of the first batch: batches that are skipped count.
  std::int64_t first_sequence = 0;

  [[nodiscard]] std::uint64_t of_batch(std::int64_t sequence) const noexcept {
    return batch_seed(base_seed, epoch, sequence);
  }
  /// What a stream draws while it reads ahead must not shift what the batch's own thread draws.
  [[nodiscard]] std::uint64_t of_reading(std::int64_t sequence) const noexcept {
    return batch_seed(base_seed, epoch, -1 - sequence);
  }
};

}  // namespace accelerate::detail::data
