#include "checkpoint/state_files.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "accelerate/checkpoint.h"
#include "accelerate/constants.h"
#include "accelerate/state.h"
#include "checkpoint/sharded_state.h"
#include "checkpoint/write_file.h"
#include "core/text.h"

namespace accelerate::detail::checkpoint {
namespace {

/// Whether every process has a file of its own, and no other one.
bool belongs_to_process(StateKind kind) {
  return kind == StateKind::kRandomStates || kind == StateKind::kGradients;
}

/// Nothing to be saved: no gradients were accumulated.
bool is_empty(const StateEntry& entry, const Value& state) {
  return entry.kind == StateKind::kGradients && state.as_dict().empty();
}

}  // namespace

std::string weights_file_name(std::size_t index, bool safe_serialization) {
  return str(safe_serialization ? kSafeModelName : kModelName, index == 0 ? "" : str("_", index),
             safe_serialization ? ".safetensors" : ".bin");
}

std::string state_file_name(const StateEntry& entry, int process_index, bool own) {
  switch (entry.kind) {
    case StateKind::kScaler:
      return std::string(kScalerName);
    case StateKind::kRandomStates:
      return str(entry.name, "_", process_index, ".pkl");
    case StateKind::kGradients:
      return str(entry.name, "_", process_index, ".bin");
    case StateKind::kCustom:
      return str(entry.name, ".pkl");
    default:
      return own ? str(entry.name, "_rank", process_index, ".bin") : str(entry.name, ".bin");
  }
}

std::vector<StateFile> files_of_process(std::span<const StateDict> model_states,
                                        std::span<const StateEntry> entries,
                                        const SaveAcceleratorStateOptions& options) {
  const PartialState state;
  const bool writes =
      options.save_on_each_node ? state.is_local_main_process() : state.is_main_process();
  std::vector<StateFile> files;
  for (std::size_t i = 0; writes && i < model_states.size(); ++i) {
    files.push_back({.name = weights_file_name(i, options.safe_serialization),
                     .content = options.safe_serialization
                                    ? clean_state_dict_for_safetensors(model_states[i])
                                    : model_states[i],
                     .safetensors = options.safe_serialization});
  }
  std::map<StateKind, std::size_t> counts;
  for (const auto& entry : entries) {
    const ShardedFileOptions sharded{.index = counts[entry.kind]++};
    if (auto* const state = dynamic_cast<ShardedState*>(entry.object.get())) {
      const auto exchange = exchange_by_collective("save_state", std::source_location::current());
      std::ranges::move(sharded_files(*state, sharded, exchange), std::back_inserter(files));
      continue;
    }
    if (entry.kind == StateKind::kModel) continue;
    const auto add = [&](bool own, Value content) {
      files.push_back({.name = state_file_name(entry, options.process_index, own),
                       .content = std::move(content)});
    };
    auto content = entry.object->state_dict();  // on all processes: it may be collective
    if (is_empty(entry, content)) continue;
    if (entry.per_process) add(/*own=*/true, content);
    if (writes || belongs_to_process(entry.kind)) add(/*own=*/false, std::move(content));
  }
  return files;
}

std::vector<formats::DcpEntry> write_state_file(const StateFile& file, OutputFile& output,
                                                ByteBar& bar) {
  if (const auto* items = std::get_if<ShardItems>(&file.content)) {
    return write_shard_items(*items, output, bar);
  }
  if (const auto* text = std::get_if<std::string>(&file.content)) {
    output.write(*text);
  } else if (const auto* value = std::get_if<Value>(&file.content)) {
    write_torch_archive(*value, output, bar);
  } else if (file.safetensors) {
    write_safetensors(std::get<StateDict>(file.content), {{"format", "pt"}}, output, bar);
  } else {
    write_torch_archive(std::get<StateDict>(file.content), output, bar);
  }
  return {};
}

std::int64_t bytes_in(std::span<const StateFile> files) {
  std::int64_t bytes = 0;
  for (const auto& file : files) {
    if (const auto* items = std::get_if<ShardItems>(&file.content)) {
      bytes += bytes_in(*items);
    } else if (const auto* value = std::get_if<Value>(&file.content)) {
      bytes += bytes_in_torch_archive(*value);
    } else if (const auto* state = std::get_if<StateDict>(&file.content)) {
      bytes += file.safetensors ? bytes_in_safetensors(*state) : bytes_in_torch_archive(*state);
    }
  }
  return bytes;
}

}  // namespace accelerate::detail::checkpoint
