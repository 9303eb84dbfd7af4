#include "accelerate/data/state.h"

#include <ATen/Functions.h>

#include <string_view>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;

// What Python does not know and does not look at.
constexpr std::string_view kOurs = "_accelerate";

[[noreturn]] void refuse(std::string_view key, const Value& value, std::string_view wanted) {
  throw ArgumentError(str("The state of a data loader has ", value.repr(), " under '", key,
                          "', where ", wanted, " belongs. It was not written by a data loader."));
}

const Value& entry(const Value::Dict& dict, std::string_view key) {
  if (const auto* value = dict.get(key)) return *value;
  throw ArgumentError(str("The state of a data loader lacks the key '", key,
                          "'. Pass what state_dict() of a loader returned, or the dictionary of "
                          "Python's StatefulDataLoader."));
}

std::int64_t number(const Value::Dict& dict, std::string_view key) {
  const auto& value = entry(dict, key);
  if (!value.is_int() || value.as_int() < 0) refuse(key, value, "a number of 0 or more");
  return value.as_int();
}

bool truth(const Value::Dict& dict, std::string_view key) {
  const auto& value = entry(dict, key);
  if (!value.is_bool()) refuse(key, value, "a bool");
  return value.as_bool();
}

/// The dictionary under `key`; null where there is none.
const Value::Dict* inner(const Value::Dict& dict, std::string_view key) {
  const auto* value = dict.get(key);
  if (value == nullptr || value->is_none()) return nullptr;
  if (!value->is_dict()) refuse(key, *value, "a dict");
  return &value->as_dict();
}

at::Tensor tensor(const Value::Dict& dict, std::string_view key) {
  const auto* value = dict.get(key);
  if (value == nullptr || value->is_none()) return {};
  if (!value->is_tensor() || value->as_tensor().scalar_type() != at::kByte) {
    refuse(key, *value, "a tensor of bytes");
  }
  return value->as_tensor().cpu();
}

/// What torchdata keeps of its own batch sampler: all samples of an unsharded loader.
void read_sampler(const Value::Dict& sampler, DataLoaderState& state) {
  state.samples_yielded = number(sampler, "samples_yielded");
  if (const auto* iterator = inner(sampler, "sampler_iter_state")) {
    state.generator = tensor(*iterator, "generator");
  }
}

void read_ours(const Value::Dict& ours, DataLoaderState& state) {
  state.epoch = number(ours, "epoch");
  state.samples_yielded = number(ours, "samples_yielded");
  state.sampler_batches = number(ours, "sampler_batches");
  state.num_processes = static_cast<int>(number(ours, "num_processes"));
  state.generator = tensor(ours, "generator");
  // In two's complement: a Value holds numbers with a sign.
  const auto& base_seed = entry(ours, "base_seed");
  if (base_seed.is_int()) state.base_seed = static_cast<std::uint64_t>(base_seed.as_int());
}

/// The dictionary with the numbers of the main process: inside of a snapshot if there were workers.
std::int64_t batches_of(const Value::Dict& dict, const Value::Dict*& main) {
  if (const auto* snapshot = inner(dict, "_snapshot")) {
    main = inner(*snapshot, "_main_snapshot");
    return number(*snapshot, "_snapshot_step") + number(dict, "_steps_since_snapshot");
  }
  main = &dict;
  return number(dict, "_num_yielded");
}

}  // namespace

DataLoaderState::operator Value() const {
  const auto samples = samples_yielded.value_or(0);
  Value sampler;
  if (num_processes == 1 && samples_yielded && batches_yielded > 0) {
    Value::Dict state{{"samples_yielded", samples}};
    // Where the key is there, torchdata insists on a sampler that has a state, and that is a random
    // one.
    if (generator.defined()) {
      state.set("sampler_iter_state", Value::Dict{{"yielded", samples}, {"generator", generator}});
    }
    sampler = std::move(state);
  }
  Value::Dict dict{{"_index_sampler_state", nullptr},
                   {"_sampler_iter_state", std::move(sampler)},
                   {"_sampler_iter_yielded", batches_yielded},
                   {"_num_yielded", batches_yielded},
                   {"_IterableDataset_len_called", nullptr},
                   {"_shared_seed", nullptr},
                   {"fetcher_state", nullptr},
                   {"dataset_state", dataset_state.value_or(Value())},
                   {"_iterator_finished", finished}};
  if (samples_yielded) {
    Value seed;
    if (base_seed) seed = static_cast<std::int64_t>(*base_seed);
    Value order;
    if (generator.defined()) order = generator;
    dict.set(kOurs, Value::Dict{{"epoch", epoch.value_or(0)},
                                {"samples_yielded", samples},
                                {"sampler_batches", sampler_batches},
                                {"num_processes", num_processes},
                                {"generator", std::move(order)},
                                {"base_seed", std::move(seed)}});
  }
  return dict;
}

DataLoaderState from_value(std::type_identity<DataLoaderState>, const Value& value) {
  if (!value.is_dict()) {
    throw ArgumentError(
        str("The state of a data loader is a dict, but this is a ", value.kind_name(), "."));
  }
  const auto& dict = value.as_dict();
  DataLoaderState state;
  if (dict.empty()) return state;

  const Value::Dict* main = nullptr;
  state.batches_yielded = batches_of(dict, main);
  state.sampler_batches = state.batches_yielded;
  state.samples_yielded = std::nullopt;
  if (dict.contains("_iterator_finished")) state.finished = truth(dict, "_iterator_finished");
  if (main != nullptr) {
    const auto* dataset = main->get("dataset_state");
    if (dataset != nullptr && !dataset->is_none()) state.dataset_state = *dataset;
    // Older files have it under the other key.
    for (const auto* key : {"_index_sampler_state", "_sampler_iter_state"}) {
      const auto* sampler = inner(*main, key);
      if (sampler != nullptr && sampler->contains("samples_yielded")) read_sampler(*sampler, state);
    }
  }
  if (const auto* ours = inner(dict, kOurs)) read_ours(*ours, state);
  return state;
}

}  // namespace accelerate
