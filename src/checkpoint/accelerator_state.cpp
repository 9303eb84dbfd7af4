// The state of a run in a folder, by one process: `save_state` and `load_state` do it for all.
#include "accelerate/checkpoint/accelerator_state.h"

#include <list>
#include <map>
#include <variant>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "checkpoint/sharded_state.h"
#include "checkpoint/state_files.h"
#include "checkpoint/stored_state.h"
#include "core/log.h"
#include "core/text.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::str;
namespace checkpoint = detail::checkpoint;

bool is_there(const fs::path& file) {
  std::error_code error;
  return fs::exists(file, error);
}

c10::Device device_of(std::optional<MapLocation> location) {
  return location == MapLocation::kCpu ? c10::Device(c10::kCPU) : PartialState().device();
}

/// The state of an optimizer, which copies what it takes: on the CPU the file need not be read.
Value read_for_optimizer(const fs::path& file, const LoadAcceleratorStateOptions& options) {
  return torch_load(file, {.map_location = device_of(options.map_location),
                           .mmap = true,
                           .progress = options.progress});
}

/// A tree of `open_stored_state` with whole tensors.
Value with_whole_tensors(const Value& stored) {
  if (checkpoint::is_stored_tensor(stored)) return Value(checkpoint::stored_whole(stored));
  if (stored.is_dict()) {
    Value::Dict whole;
    for (const auto& [key, value] : stored.as_dict()) whole.set(key, with_whole_tensors(value));
    return Value(std::move(whole));
  }
  if (!stored.is_list()) return stored;
  Value::List whole;
  for (const auto& value : stored.as_list()) whole.push_back(with_whole_tensors(value));
  return Value(std::move(whole));
}

/// Also of a run that saved the state in parts.
Value optimizer_state(const fs::path& folder, const fs::path& file, std::size_t index,
                      const LoadAcceleratorStateOptions& options) {
  const auto parts =
      folder / checkpoint::sharded_folder_name(checkpoint::ShardedPart::kOptimizer, index);
  if (is_there(file) || !is_there(parts)) return read_for_optimizer(file, options);
  return with_whole_tensors(checkpoint::open_stored_state(parts));
}

void load_weights(Stateful& model, std::size_t index, const fs::path& folder,
                  const LoadAcceleratorStateOptions& options) {
  auto file = checkpoint::first_in(folder, checkpoint::weights_names(index));
  if (file.empty()) file = folder / checkpoint::weights_file_name(index, false);
  auto* const direct = dynamic_cast<checkpoint::LoadsWeights*>(&model);
  if (direct != nullptr && direct->can_load_weights() && !options.map_location) {
    return direct->load_weights(file, options);
  }
  const auto state = load_state_dict(file, {{"", c10::str(device_of(options.map_location))}});
  Value::Dict tensors;
  for (const auto& entry : state) tensors.set(entry.key(), Value(entry.value()));
  model.load_state_dict(Value(std::move(tensors)));
}

/// Each part by itself, so that one which does not fit here leaves the others.
void load_random_states(Stateful& random, const fs::path& folder, const StateEntry& entry,
                        const LoadAcceleratorStateOptions& options) {
  auto file = folder / checkpoint::state_file_name(entry, options.process_index, false);
  const bool own = is_there(file);
  if (!own) file = folder / checkpoint::state_file_name(entry, 0, false);
  try {
    const Value state = torch_load(file);
    for (const auto& [key, part] : state.as_dict()) {
      // Of another process, only what is common to all.
      if (!own && key.to_string() != "step") continue;
      try {
        random.load_state_dict(Value::Dict{{key, part}});
      } catch (const std::exception& error) {
        if (options.strict_rng) throw;
        detail::warn_from_any_rank(str("The random state ", key.repr(), " of '", file.string(),
                                       "' is not restored: ", error.what()));
      }
    }
  } catch (const std::exception& error) {
    if (options.strict_rng) throw;
    return detail::warn_from_any_rank(
        str("Could not load random states of '", file.string(), "': ", error.what()));
  }
  if (own) return;
  const auto text = str("The checkpoint has no random states of process ", options.process_index,
                        ": it was saved by fewer processes. They stay as they are.");
  if (options.strict_rng) throw CheckpointError(text, folder);
  detail::warn_from_any_rank(text);
}

}  // namespace

fs::path save_accelerator_state(const fs::path& output_dir, std::span<const StateDict> model_states,
                                std::span<const StateEntry> entries,
                                const SaveAcceleratorStateOptions& options) {
  std::list<detail::OutputFile> written;
  const auto files = checkpoint::files_of_process(model_states, entries, options);
  for (const auto& file : files) {
    if (!std::holds_alternative<checkpoint::ShardItems>(file.content)) continue;
    throw UnsupportedError(
        "save_accelerator_state: a sharded model is saved by all processes together. Call "
        "Accelerator::save_state.");
  }
  detail::ByteBar bar("saving", checkpoint::bytes_in(files));
  for (const auto& file : files) {
    checkpoint::write_state_file(file, written.emplace_back(output_dir / file.name), bar);
    written.back().finish();
  }
  for (auto& file : written) file.publish();
  return output_dir;
}

void load_accelerator_state(const fs::path& input_dir, std::span<const StateEntry> entries,
                            const LoadAcceleratorStateOptions& options) {
  std::map<StateKind, std::size_t> counts;
  for (const auto& entry : entries) {
    const auto index = counts[entry.kind]++;
    if (auto* const sharded = dynamic_cast<checkpoint::ShardedState*>(entry.object.get())) {
      checkpoint::load_sharded_files(*sharded, input_dir, {.index = index});
      continue;
    }
    if (entry.kind == StateKind::kModel) {
      load_weights(*entry.object, index, input_dir, options);
      continue;
    }
    if (entry.kind == StateKind::kRandomStates) {
      load_random_states(*entry.object, input_dir, entry, options);
      continue;
    }
    auto file = input_dir / checkpoint::state_file_name(entry, options.process_index, false);
    if (entry.per_process) {
      const auto own = input_dir / checkpoint::state_file_name(entry, options.process_index, true);
      if (is_there(own)) file = own;
    }
    // Python writes positions of loaders only if it is told to, and never gradients.
    const bool optional =
        entry.kind == StateKind::kDataLoader || entry.kind == StateKind::kGradients;
    if (optional && !is_there(file)) continue;
    if (entry.kind == StateKind::kOptimizer && !checkpoint::is_from_deepspeed(input_dir)) {
      entry.object->load_state_dict(optimizer_state(input_dir, file, index, options));
      continue;
    }
    if (!is_there(file) && checkpoint::is_from_deepspeed(input_dir)) {
      detail::warn(str("The state '", entry.name, "' is not read from '", input_dir.string(),
                       "', a checkpoint of DeepSpeed. It stays as it is."));
      continue;
    }
    // Other objects get tensors of their own on the CPU, as in Python.
    entry.object->load_state_dict(entry.kind == StateKind::kOptimizer
                                      ? read_for_optimizer(file, options)
                                      : torch_load(file, {.progress = options.progress}));
  }
}

void save_custom_state(Stateful& object, const fs::path& path, std::int64_t index,
                       bool save_on_each_node) {
  save(object.state_dict(), path / str("custom_checkpoint_", index, ".pkl"),
       {.save_on_each_node = save_on_each_node});
}

void load_custom_state(Stateful& object, const fs::path& path, std::int64_t index) {
  object.load_state_dict(torch_load(path / str("custom_checkpoint_", index, ".pkl")));
}

}  // namespace accelerate
