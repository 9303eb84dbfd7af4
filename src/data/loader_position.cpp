#include "data/loader_position.h"

#include <string_view>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::data {
namespace {

void validate(const DataLoaderState& state) {
  const auto check = [](std::string_view name, std::int64_t value) {
    if (value >= 0) return;
    throw ArgumentError(
        str("The state of a data loader says ", name, " = ", value, ", which is below 0."));
  };
  check("epoch", state.epoch.value_or(0));
  check("batches_yielded", state.batches_yielded);
  check("samples_yielded", state.samples_yielded.value_or(0));
  check("sampler_batches", state.sampler_batches);
}

}  // namespace

std::int64_t LoaderPosition::epoch() const {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

void LoaderPosition::set_epoch(std::int64_t epoch) {
  if (epoch < 0) {
    throw ArgumentError(str("The epoch is ", epoch, ", but epochs count from 0."));
  }
  const std::lock_guard lock(mutex_);
  epoch_ = epoch;
  given_.reset();
}

void LoaderPosition::end_epoch() {
  const std::lock_guard lock(mutex_);
  ++epoch_;
}

std::int64_t LoaderPosition::skip_batches() const {
  const std::lock_guard lock(mutex_);
  return skip_;
}

void LoaderPosition::follow(const LoaderPosition& other, std::int64_t batches) {
  const std::scoped_lock lock(mutex_, other.mutex_);
  epoch_ = other.epoch_;
  skip_ = other.skip_ + batches;
  order_ = other.order_;
}

PassStart LoaderPosition::next_start() {
  const std::lock_guard lock(mutex_);
  given_.reset();
  PassStart start;
  start.epoch = epoch_;
  start.skip = start.first_sequence = skip_;
  if (const auto before = std::exchange(before_, std::nullopt)) {
    start.order_before = before->generator;
  }
  const auto order = std::exchange(order_, nullptr);
  if (!pending_ && (!order || order->used.exchange(true))) return start;

  const bool resumes = pending_.has_value();
  const auto state = resumes ? *std::exchange(pending_, std::nullopt) : order->state;
  if (resumes) {
    start.first_sequence = state.batches_yielded;
    start.skip = state.samples_yielded ? 0 : state.batches_yielded;
  }
  if (resumes && state.samples_yielded) {
    start.from.samples = *state.samples_yielded;
    start.from.batches = state.sampler_batches;
  }
  // `set_epoch` may have asked for another order meanwhile.
  if (state.epoch.value_or(epoch_) == epoch_) {
    start.from.generator_state = state.generator;
    start.base_seed = state.base_seed;
    start.dataset_state = state.dataset_state;
  }
  return start;
}

void LoaderPosition::remember(const PassStart& start, std::int64_t sequence, BatchFacts facts,
                              int num_processes) {
  DataLoaderState given{.epoch = start.epoch,
                        .batches_yielded = sequence + 1,
                        .samples_yielded = facts.samples_after,
                        .sampler_batches = facts.batches_after,
                        .finished = facts.last,
                        .num_processes = num_processes,
                        .generator = start.from.generator_state,
                        .base_seed = start.base_seed,
                        .dataset_state = std::move(facts.dataset_state)};
  const std::lock_guard lock(mutex_);
  given_ = std::move(given);
}

DataLoaderState LoaderPosition::state() const {
  const std::lock_guard lock(mutex_);
  if (pending_) return *pending_;
  if (before_ && before_->epoch.value_or(epoch_) + 1 == epoch_) return *before_;
  // Also if a loader that skips batches of this one has used it: then that is under way.
  if (order_ && order_->state.epoch.value_or(epoch_) == epoch_) return order_->state;
  return given_.value_or(DataLoaderState{.epoch = epoch_});
}

void LoaderPosition::load(const DataLoaderState& state) {
  validate(state);
  const std::lock_guard lock(mutex_);
  if (state.epoch) epoch_ = *state.epoch + (state.finished ? 1 : 0);
  given_.reset();
  pending_.reset();
  order_ = nullptr;
  before_.reset();
  if (state.finished) {
    before_ = state;
  } else if (state.batches_yielded > 0) {
    pending_ = state;
  } else if (state.generator.defined() || state.base_seed) {
    order_ = std::make_shared<Order>(state);
  }
}

}  // namespace accelerate::detail::data
