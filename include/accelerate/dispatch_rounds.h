// accelerate/dispatch_rounds.h - the rounds that process 0 reads and dispatches.
//
// Internal to accelerate/dispatch.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/load_pipeline.h"
#include "accelerate/object_operations.h"
#include "accelerate/tensor_operations.h"

namespace accelerate::detail {

struct RoundRules {
  std::int64_t batches_per_round = 1;
  std::int64_t num_parts = 1;
  /// Leave out a round that lacks batches.
  bool drop_last = false;
  /// Every tensor must have as many rows as the first one.
  bool equal_lengths = true;
};

template <class Batch>
struct Round {
  Batch batch;
  bool last = false;
  /// Samples, without and with those that fill it up.
  std::int64_t genuine = 0;
  std::int64_t padded = 0;
  std::int64_t samples_after = 0;
  std::int64_t batches_after = 0;
  std::optional<Value> dataset_state = std::nullopt;
};

/// The leaves can be sent, and cut. Throws `ArgumentError` that names the leaf.
ACCELERATE_API void check_leaves(const tree::Flat& leaves, const RoundRules& rules);
/// `leaves` with `count` rows of `first`, taken over and over, behind those they have.
[[nodiscard]] ACCELERATE_API std::vector<at::Tensor> fill_up(const std::vector<at::Tensor>& leaves,
                                                             const std::vector<at::Tensor>& first,
                                                             std::int64_t count);
/// Copies of the first rows, `count` at most.
[[nodiscard]] ACCELERATE_API std::vector<at::Tensor> first_rows(std::vector<at::Tensor> leaves,
                                                                std::int64_t count);
/// Throws the exception being handled on with what to do about batches that do not fit together.
[[noreturn]] ACCELERATE_API void refuse_concatenation();

template <class Batch>
class RoundReader {
 public:
  /// `again` begins the pass anew, for who did not see its start.
  RoundReader(std::unique_ptr<Pass<Batch>> pass, const RoundRules& rules, bool at_start,
              std::function<std::unique_ptr<Pass<Batch>>()> again)
      : pass_(std::move(pass)), rules_(rules), at_start_(at_start), again_(std::move(again)) {}

  /// Throws what the loader throws, and `ArgumentError` for batches that cannot be dispatched.
  std::optional<Round<Batch>> next() {
    auto parts = ahead_ ? *std::exchange(ahead_, std::nullopt) : read();
    const bool drops = rules_.drop_last && rules_.batches_per_round > 1;
    if (drops && !parts.final) {
      ahead_ = read();
      parts.final = lacks_some(*ahead_);
    }
    if (parts.batches.empty() || (drops && lacks_some(parts))) return std::nullopt;

    Round<Batch> round{joined(parts.batches)};
    round.last = parts.final;
    round.samples_after = parts.samples_after;
    round.batches_after = parts.batches_after;
    round.dataset_state = std::move(parts.dataset_state);
    prepare(round);
    return round;
  }

 private:
  struct Parts {
    std::vector<Batch> batches = {};
    std::int64_t samples_after = 0;
    std::int64_t batches_after = 0;
    std::optional<Value> dataset_state = std::nullopt;
    bool final = false;
  };

  Parts read() {
    Parts parts;
    while (!parts.final && std::ssize(parts.batches) < rules_.batches_per_round) {
      auto loaded = pass_->next();
      parts.final = !loaded || loaded->last;
      if (!loaded) break;
      parts.samples_after = loaded->samples_after;
      parts.batches_after = loaded->batches_after;
      parts.dataset_state = std::move(loaded->dataset_state);
      parts.batches.push_back(std::move(loaded->batch));
    }
    return parts;
  }

  [[nodiscard]] bool lacks_some(const Parts& parts) const {
    return std::ssize(parts.batches) < rules_.batches_per_round;
  }

  static Batch joined(std::vector<Batch>& batches) {
    if (!is_alone(nullptr)) {
      for (const auto& batch : batches) refuse_others<at::Tensor>("dispatch_batches", batch);
    }
    if (batches.size() == 1) return std::move(batches.front());
    if constexpr (std::copy_constructible<Batch>) {
      try {
        return accelerate::concatenate(batches);
      } catch (...) {
        refuse_concatenation();
      }
    } else {
      refuse_other("dispatch_batches", "", typeid(Batch));
    }
  }

  /// Fills the round up where the parts would not be equal, or some would be empty.
  void prepare(Round<Batch>& round) {
    if constexpr (!PureTensorTree<Batch>) {
      round.genuine = round.padded = ignorant_find_batch_size(round.batch).value_or(-1);
    } else {
      if (is_alone(nullptr) && rules_.num_parts == 1) {
        round.genuine = round.padded = ignorant_find_batch_size(round.batch).value_or(-1);
        return;
      }
      auto leaves = tree::flatten(round.batch, tree::Order::kSorted);
      check_leaves(leaves, rules_);
      for (auto& leaf : leaves.tensors) leaf = leaf.contiguous();
      const auto size = find_batch_size(round.batch);
      round.genuine = round.padded = size;
      if (at_start_ && first_.empty()) first_ = first_rows(leaves.tensors, rules_.num_parts);
      const auto missing = (rules_.num_parts - size % rules_.num_parts) % rules_.num_parts;
      const bool fills = (round.last && !rules_.drop_last) || size < rules_.num_parts;
      if (fills && missing > 0) {
        if (first_.empty() && round.last) first_ = read_first();
        leaves.tensors = fill_up(leaves.tensors, first_.empty() ? leaves.tensors : first_, missing);
        round.padded += missing;
      }
      round.batch = tree::unflatten(std::move(round.batch), leaves.tensors, tree::Order::kSorted);
    }
  }

  /// The first samples of the pass, of which the last round is filled up. A dataset that is read
  /// from start to end is at its end by now.
  std::vector<at::Tensor> read_first() {
    const auto pass = again_();
    std::vector<Batch> batches;
    for (std::int64_t rows = 0; rows < rules_.num_parts;) {
      auto loaded = pass->next();
      if (!loaded) break;
      rows += find_batch_size(loaded->batch);
      batches.push_back(std::move(loaded->batch));
    }
    return first_rows(tree::leaves(joined(batches), tree::Order::kSorted), rules_.num_parts);
  }

  std::unique_ptr<Pass<Batch>> pass_;
  RoundRules rules_;
  bool at_start_;
  std::function<std::unique_ptr<Pass<Batch>>()> again_;
  std::optional<Parts> ahead_ = std::nullopt;
  std::vector<at::Tensor> first_ = {};
};

}  // namespace accelerate::detail
