// src/data/batch_plan.h - one pass over a batch sampler, as one of several processes sees it.
//
// What `BatchSamplerShard` and the data loaders walk. It reads one round ahead, so that it knows
// which batch is the last, and any number of processes can resume it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/data/batch_samplers.h"
#include "accelerate/detail/data/loader_recipe.h"

namespace accelerate::detail::data {

/// The default is the batch sampler as it is, for a program of one process or data that is sharded
/// already.
struct PlanOptions {
  int num_processes = 1;
  int process_index = 0;
  bool split_batches = false;
  bool even_batches = false;

  bool operator==(const PlanOptions&) const = default;
};

/// Throws `ArgumentError` for a batch size that no memory could hold. Those that pass can be
/// multiplied by a number of processes.
void check_batch_size_is_possible(std::int64_t batch_size);
/// Throws `ArgumentError` unless `process_index` is one of `num_processes`.
void check_process(int num_processes, int process_index);
/// Throws `ArgumentError` where `options` contradict each other or the batch sampler.
void validate(const PlanOptions& options, const BatchIndexSampler& batch_sampler);

/// Where all processes together are. Does not depend on their number.
struct PlanPosition {
  std::int64_t samples = 0;
  std::int64_t batches = 0;
  at::Tensor generator_state = {};
};

struct PlannedBatch {
  IndexBatch indices = {};
  BatchFacts facts = {};
};

/// The batches of one process in one pass.
///
/// A round is what the processes are given together: one batch of the batch sampler for each, or
/// one cut into parts (split_batches). Rounds follow one another unchanged; only the last one,
/// where it is not complete, is dropped, filled up or left uneven. It is filled up by its samples
/// in a row, then those of the first round as often as needed, in parts of one length: the batch
/// size, or the longest batch of a round of short ones that lacks none. What is genuine in the
/// gathered round is therefore always at its front.
///
/// Batches without a common size are never filled up: a round that lacks some repeats whole batches
/// from the start.
class BatchPlan {
 public:
  BatchPlan(const std::shared_ptr<BatchIndexSampler>& batch_sampler, const PlanOptions& options,
            std::int64_t epoch, const PlanPosition& from = {});

  /// The next batch of this process, or nothing at the end.
  [[nodiscard]] std::optional<PlannedBatch> next();
  /// Leaves out batches of this process, and of every other one as many. Constant time where the
  /// order is known without walking it.
  void skip(std::int64_t batches);

  /// Genuine samples in the last round; 0 where it is complete. -1 until the last round is known,
  /// which it is with the last batch, and with drop_last.
  [[nodiscard]] std::int64_t remainder() const { return remainder_; }
  /// Samples that all processes hold in the last round, repeated ones included; known as
  /// `remainder` is, and -1 with drop_last.
  [[nodiscard]] std::int64_t padded_size() const { return padded_size_; }
  /// Batches of this process in a whole pass, where that is known.
  [[nodiscard]] std::optional<std::int64_t> size() const { return size_; }
  [[nodiscard]] at::Tensor generator_state() const { return stream_->generator_state(); }

 private:
  struct Round {
    std::vector<IndexBatch> batches;
    std::int64_t samples = 0;
    bool final = false;
  };

  [[nodiscard]] std::int64_t batches_per_round() const;
  [[nodiscard]] Round read_round();
  void leave_round();
  [[nodiscard]] std::int64_t full_length(const Round& round) const;
  [[nodiscard]] bool complete(const Round& round) const;
  [[nodiscard]] std::int64_t filled_size(const Round& round) const;
  [[nodiscard]] bool gives(const Round& round) const;
  [[nodiscard]] IndexBatch part_of(Round round) const;
  [[nodiscard]] IndexBatch filled_part_of(const Round& round) const;

  PlanOptions options_;
  std::optional<std::int64_t> batch_size_;
  bool drop_last_ = false;
  std::optional<std::int64_t> size_;
  std::unique_ptr<BatchIndexStream> stream_;
  std::optional<IndexBatch> ahead_;  // read to see whether a round is the last
  std::vector<IndexBatch> first_round_;
  Round round_;  // the one that is handed out next
  std::int64_t samples_ = 0;
  std::int64_t batches_ = 0;
  std::int64_t remainder_ = -1;
  std::int64_t padded_size_ = -1;
};

/// What `BatchPlan::size` says, without a pass.
[[nodiscard]] std::optional<std::int64_t> planned_size(const BatchIndexSampler& batch_sampler,
                                                       const PlanOptions& options);

}  // namespace accelerate::detail::data
