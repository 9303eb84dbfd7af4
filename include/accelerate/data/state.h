// accelerate/data/state.h - where a data loader stands.
//
//     const auto state = loader.state_dict();   // while a batch is held: the next one follows
//     ...
//     loader.load_state_dict(state);            // the next pass goes on from there
//
// Part of accelerate/data_loader.h. `to_value(state)` and `from_value<DataLoaderState>(value)` turn
// it into the dictionary that Python's `StatefulDataLoader` writes and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <type_traits>

#include "accelerate/api.h"
#include "accelerate/value.h"
#include "accelerate/value/from_value.h"

namespace accelerate {

/// What the user has been given, whatever was loaded ahead. Holds for any number of processes: the
/// order of all of them together goes on.
struct DataLoaderState {
  /// Unset in what Python wrote.
  std::optional<std::int64_t> epoch = std::nullopt;
  /// Batches that this process has been given in the pass.
  std::int64_t batches_yielded = 0;
  /// Samples that all processes together have been given, repeated ones not counted. Unset where
  /// Python wrote the state of several processes: then as many batches are left out as it says.
  std::optional<std::int64_t> samples_yielded = 0;
  /// Batches of the batch sampler, or groups of an iterable dataset, that these samples were in.
  std::int64_t sampler_batches = 0;
  /// The pass is over: the next one starts afresh.
  bool finished = false;
  /// How many processes shared the data.
  int num_processes = 1;
  /// The state (uint8) that the generator of the order had when the pass began; not defined where
  /// there is none.
  at::Tensor generator = {};
  /// What the random numbers of the batches depend on.
  std::optional<std::uint64_t> base_seed = std::nullopt;
  /// What `state_dict()` of an iterable dataset said behind the last batch, where it has one. Used
  /// where one process reads the data by itself; processes that share out a stream, and others with
  /// no such state, read it from its start.
  std::optional<Value> dataset_state = std::nullopt;

  /// `to_value(state)`: the dictionary of `StatefulDataLoader` without workers, which Python can
  /// load; what only we know is under one more key.
  ACCELERATE_API explicit operator Value() const;
};

/// Reads both forms, with workers and without; an empty dictionary is a fresh start. Throws
/// `ArgumentError` that names the key that is missing, or holds something else.
[[nodiscard]] ACCELERATE_API DataLoaderState from_value(std::type_identity<DataLoaderState>,
                                                        const Value& value);

}  // namespace accelerate
