// accelerate/dispatch.h - process 0 reads, every process gets its part: Python's
// `DataLoaderDispatcher`.
//
// Internal to accelerate/prepared_loader.h. A round is what the processes are given together: one
// batch of the loader for each of them, or one cut into parts (split_batches). Per round there is
// one message that says what comes, and one with all tensors in it.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/collectives.h"
#include "accelerate/device_lane.h"
#include "accelerate/dispatch_messages.h"
#include "accelerate/dispatch_rounds.h"
#include "accelerate/from_value.h"
#include "accelerate/move_ahead.h"
#include "accelerate/name_collectives.h"
#include "accelerate/prepared_core.h"
#include "accelerate/tensor_operations.h"

namespace accelerate {

/// Which samples of a dispatched round a process takes.
struct DispatchSlice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  int process_index = 0;
  int num_processes = 1;
};

/// Cuts a round, in place of `slice_tensors`.
template <class Batch>
using SliceFunction = std::function<Batch(const Batch& round, const DispatchSlice& slice)>;

namespace detail {

template <class Batch>
class DispatchPass final : public Pass<Batch> {
 public:
  /// `reader` is null where another process reads.
  DispatchPass(std::unique_ptr<RoundReader<Batch>> reader, const Preparation& how,
               SliceFunction<Batch> slice, std::int64_t first_sequence)
      : reader_(std::move(reader)),
        how_(how),
        slice_(std::move(slice)),
        sequence_(first_sequence) {}

  std::optional<LoadedBatch<Batch>> next() override {
    if (over_) return std::nullopt;
    over_ = true;  // if it throws
    std::optional<Round<Batch>> round;
    std::exception_ptr failure;
    RoundMessage message;
    if (reader_) {
      try {
        round = reader_->next();
        if (round) message = describe(*round);
      } catch (...) {
        failure = std::current_exception();
        message = failure_message(failure);
      }
    }
    message = announce(std::move(message));
    if (failure) std::rethrow_exception(failure);
    throw_if_failed(message);
    if (message.kind == RoundMessage::Kind::kEnd) return std::nullopt;
    over_ = message.last;
    auto dataset_state = round ? std::move(round->dataset_state) : std::nullopt;
    return LoadedBatch<Batch>{delivered(std::move(round), message),
                              message.last,
                              sequence_++,
                              message.last ? message.genuine : -1,
                              message.last ? message.padded : -1,
                              message.samples_after,
                              message.batches_after,
                              std::move(dataset_state),
                              nullptr};
  }

 private:
  RoundMessage describe(const Round<Batch>& round) {
    RoundMessage message;
    message.kind = RoundMessage::Kind::kRound;
    message.last = round.last;
    message.genuine = round.genuine;
    message.padded = round.padded;
    message.samples_after = round.samples_after;
    message.batches_after = round.batches_after;
    if constexpr (PureTensorTree<Batch>) {
      if (is_alone(nullptr)) return message;
      auto structure = encode_structure(to_value(without_content(round.batch)),
                                        tree::leaves(round.batch, tree::Order::kSorted));
      if (structure != structure_) message.structure = structure_ = std::move(structure);
    }
    return message;
  }

  /// The part of this process. On the way to a device it may still be travelling.
  Batch delivered(std::optional<Round<Batch>> round, const RoundMessage& message) {
    const auto deliver = [&] { return part_of(received(std::move(round), message), message); };
    if (!DeviceLane::leads_to(*how_.device)) return deliver();
    const auto on_lane = DeviceLane::to(*how_.device).enter();
    return deliver();
  }

  /// The whole round, on every process.
  Batch received(std::optional<Round<Batch>> round, const RoundMessage& message) {
    if constexpr (PureTensorTree<Batch>) {
      const auto named = name_collectives(kDispatcherName);
      if (!round) return accelerate::broadcast(allocated(message));
      return accelerate::broadcast(send_to_device(std::move(round->batch), *how_.device,
                                                  {.non_blocking = how_.non_blocking}));
    } else {
      // Alone: the reader refuses such batches elsewhere.
      if constexpr (Sendable<Batch>) {
        return send_to_device(std::move(round->batch), *how_.device,
                              {.non_blocking = how_.non_blocking});
      } else {
        return std::move(round->batch);
      }
    }
  }

  Batch allocated(const RoundMessage& message) {
    if (message.structure) description_ = decode_structure(*message.structure);
    return tree::unflatten(from_value<Batch>(description_.skeleton),
                           empty_leaves(description_, *how_.device), tree::Order::kSorted);
  }

  Batch part_of(Batch round, [[maybe_unused]] const RoundMessage& message) const {
    if constexpr (PureTensorTree<Batch>) {
      if (how_.num_processes == 1 && !slice_) return round;
      const auto range = part_range(message, how_);
      if (!slice_)
        return slice_tensors(std::move(round), {.start = range.start, .stop = range.end});
      return slice_(round, {range.start, range.end, how_.process_index, how_.num_processes});
    }
    return round;
  }

  std::unique_ptr<RoundReader<Batch>> reader_;
  Preparation how_;
  SliceFunction<Batch> slice_;
  std::int64_t sequence_;
  bool over_ = false;
  std::string structure_ = {};         // sent last
  BatchDescription description_ = {};  // received last
};

template <class Batch>
class DispatcherCore final : public PreparedCore<Batch> {
 public:
  DispatcherCore(std::shared_ptr<const LoaderRecipe<Batch>> recipe, Preparation preparation,
                 SliceFunction<Batch> slice)
      : PreparedCore<Batch>(std::move(recipe), std::move(preparation)), slice_(std::move(slice)) {}

 protected:
  [[nodiscard]] std::unique_ptr<Pass<Batch>> make_pass(PassStart& start) override {
    std::unique_ptr<RoundReader<Batch>> reader;
    if (rank_in(nullptr) != 0) {
      this->tell_dataset(start.epoch);
      // Python's other processes draw a base seed too, and the default generators stay in step.
      std::ignore = draw_base_seed(std::nullopt);
    }
    share_start(start, [&] { reader = begin_reading(start); });
    const auto& how = this->preparation();
    std::unique_ptr<Pass<Batch>> pass =
        std::make_unique<DispatchPass<Batch>>(std::move(reader), how, slice_, start.first_sequence);
    if (DeviceLane::leads_to(*how.device)) {
      pass = move_ahead(std::move(pass), *how.device, how.non_blocking);
    }
    return this->observed(std::move(pass));
  }
  [[nodiscard]] std::shared_ptr<LoaderCore<Batch>> like_this() const override {
    return std::make_shared<DispatcherCore>(this->recipe(), this->preparation(), slice_);
  }
  [[nodiscard]] std::optional<std::int64_t> whole_size() const override {
    const auto inner = this->shared_size(PlanOptions(), StreamShard());
    if (!inner) return inner;
    return (*inner + (drop_last() ? 0 : batches_per_round() - 1)) / batches_per_round();
  }

 private:
  [[nodiscard]] std::int64_t batches_per_round() const {
    return this->preparation().split_batches ? 1 : this->preparation().num_processes;
  }
  [[nodiscard]] bool drop_last() const {
    const auto& recipe = *this->recipe();
    return recipe.stream ? recipe.options.drop_last : recipe.batch_sampler->drop_last();
  }

  /// On process 0. `start` counts rounds, the reader batches of the loader.
  std::unique_ptr<RoundReader<Batch>> begin_reading(PassStart& start) {
    auto inner = start;
    inner.skip *= batches_per_round();
    inner.first_sequence = inner.from.batches + inner.skip;
    // Without the loader's generator, as in Python.
    auto pass = this->load_from(inner, PlanOptions(), StreamShard(), std::nullopt);
    start.base_seed = inner.base_seed;
    start.from.generator_state = inner.from.generator_state;
    return std::make_unique<RoundReader<Batch>>(
        std::move(pass),
        RoundRules{.batches_per_round = batches_per_round(),
                   .num_parts = this->preparation().num_processes,
                   .drop_last = drop_last(),
                   .equal_lengths = !slice_},
        inner.first_sequence == 0, [this, start] { return this->load_again(start); });
  }

  SliceFunction<Batch> slice_;
};

}  // namespace detail
}  // namespace accelerate
