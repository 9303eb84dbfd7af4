// src/data/loader_position.h - which epoch a data loader is in, and where in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "accelerate/data/state.h"
#include "data/stages.h"

namespace accelerate::detail::data {

/// For several threads at once: passes may be under way side by side.
class LoaderPosition {
 public:
  [[nodiscard]] std::int64_t epoch() const;
  /// Throws `ArgumentError` for a negative one.
  void set_epoch(std::int64_t epoch);
  /// A pass is complete.
  void end_epoch();

  /// Batches of this process that every pass leaves out.
  [[nodiscard]] std::int64_t skip_batches() const;
  /// The epoch of another loader, and `batches` more to be left out than it does.
  void follow(const LoaderPosition& other, std::int64_t batches);

  /// Where the next pass begins.
  [[nodiscard]] PassStart next_start();
  /// The user has been given the batch with these facts, in a pass with this start.
  void remember(const PassStart& start, std::int64_t sequence, BatchFacts facts, int num_processes);

  /// What the user has been given so far; after `load` what was loaded.
  [[nodiscard]] DataLoaderState state() const;
  /// The next pass goes on from there; with no batch yielded it has the same order of samples, and
  /// so has a loader that skips batches of this one. Throws `ArgumentError` for numbers that make
  /// no sense.
  void load(const DataLoaderState& state);

 private:
  /// The order of one pass, of this loader or of one that follows it.
  struct Order {
    DataLoaderState state;
    std::atomic<bool> used = false;
  };

  mutable std::mutex mutex_;
  std::int64_t epoch_ = 0;
  std::int64_t skip_ = 0;
  std::optional<DataLoaderState> given_ = std::nullopt;    // in the pass that moved on last
  std::optional<DataLoaderState> pending_ = std::nullopt;  // where the next pass goes on
  std::optional<DataLoaderState> before_ = std::nullopt;   // of a complete pass, before the next
  std::shared_ptr<Order> order_ = nullptr;
};

}  // namespace accelerate::detail::data
