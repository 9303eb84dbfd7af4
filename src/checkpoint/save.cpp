// Who writes what: single files and models in folders.
#include <algorithm>
#include <filesystem>
#include <list>
#include <system_error>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "accelerate/safetensors.h"
#include "accelerate/state.h"
#include "checkpoint/write_file.h"
#include "core/folders.h"
#include "core/log.h"
#include "core/output_file.h"
#include "core/text.h"
#include "formats/shard_index.h"
#include "formats/shards.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::str;

bool writes_here(bool save_on_each_node) {
  const PartialState state;
  return save_on_each_node ? state.is_local_main_process() : state.is_main_process();
}

/// The names of one format.
struct WeightNames {
  std::string_view single;
  std::string_view pattern;
  std::string_view index;
};
constexpr WeightNames kSafeNames{kSafeWeightsName, kSafeWeightsPatternName, kSafeWeightsIndexName};
constexpr WeightNames kArchiveNames{kWeightsName, kWeightsPatternName, kWeightsIndexName};

bool holds_weights(const fs::path& folder, const WeightNames& names) {
  std::error_code error;
  return fs::exists(folder / names.single, error) || fs::exists(folder / names.index, error);
}

void remove_stale(const fs::path& file) {
  std::error_code error;  // another host may have removed it
  fs::remove(file, error);
  if (error) {
    throw CheckpointError(str("Cannot remove the stale file '", file.string(),
                              "': ", error.message(), ". Remove it before the folder is loaded."),
                          file);
  }
}

/// Removes what an earlier save of this format has left, now that the new files are complete: a
/// loader would take a stale single file for the model, and count stale shards.
void remove_stale(const fs::path& folder, const WeightNames& names, const StateDictSplit& split) {
  if (!split.is_sharded) remove_stale(folder / names.index);
  std::vector<fs::path> stale;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    const bool ours = name == names.single || detail::formats::is_shard_name(name, names.pattern);
    const bool written = split.filename_to_tensors.contains(name);
    if (ours && !written && entry.is_regular_file()) stale.push_back(entry.path());
  }
  for (const auto& file : stale) remove_stale(file);
}

void write_file(const StateDict& state, const fs::path& path, bool safe_serialization) {
  if (safe_serialization) {
    safetensors::save_file(state, path);
  } else {
    torch_save(state, path);
  }
}

/// The files of a model appear when all of them are on the disk. The index is away meanwhile, so
/// that old and new shards are never taken for one model.
void write_files(const StateDict& state, const fs::path& folder, const WeightNames& names,
                 const StateDictSplit& split, const SaveModelOptions& options) {
  detail::ByteBar bar("saving",
                      options.safe_serialization
                          ? detail::checkpoint::bytes_in_safetensors(state)
                          : detail::checkpoint::bytes_in_torch_archive(state),
                      options.progress);
  std::list<detail::OutputFile> files;
  for (const auto& [name, tensors] : split.filename_to_tensors) {
    StateDict shard("Tensor");
    for (const auto& tensor : tensors) shard.insert(tensor, state[tensor]);
    auto& file = files.emplace_back(folder / name);
    if (options.safe_serialization) {
      detail::checkpoint::write_safetensors(shard, {{"format", "pt"}}, file, bar);
    } else {
      detail::checkpoint::write_torch_archive(shard, file, bar);
    }
    file.finish();
  }
  if (split.is_sharded) {
    auto& index = files.emplace_back(folder / names.index);
    index.write(detail::formats::write_shard_index(split));
    index.finish();
    remove_stale(fs::weakly_canonical(folder / names.index));  // behind a link, as it is published
  }
  for (auto& file : files) file.publish();
}

void write_model(const StateDict& given, const fs::path& folder, const SaveModelOptions& options) {
  const auto& names = options.safe_serialization ? kSafeNames : kArchiveNames;
  const auto& other = options.safe_serialization ? kArchiveNames : kSafeNames;
  const auto state = options.safe_serialization ? clean_state_dict_for_safetensors(given) : given;
  const auto split = split_torch_state_dict_into_shards(
      state,
      {.filename_pattern = std::string(names.pattern), .max_shard_size = options.max_shard_size});
  detail::make_folders(folder);
  if (split.filename_to_tensors.empty()) {
    return detail::warn(str("The model has no tensors: nothing is written to '", folder.string(),
                            "', and weights that are there stay."));
  }
  write_files(state, folder, names, split, options);
  remove_stale(folder, names, split);

  if (split.is_sharded) {
    detail::info(str("The model is bigger than the maximum size per checkpoint and is split in ",
                     split.filename_to_tensors.size(),
                     " checkpoint shards. You can find where each parameter has been saved in the "
                     "index located at ",
                     (folder / names.index).string(), "."));
  } else {
    detail::info(str("Model weights saved in ", (folder / names.single).string()));
  }
  if (holds_weights(folder, other)) {
    detail::warn(str("'", folder.string(), "' also has weights of the other format, '",
                     other.single, "'. Loaders of folders, Python's too, prefer '", kWeightsName,
                     "': remove the files that you do not want."));
  }
}

}  // namespace

void save(const Value& object, const fs::path& path, const SaveOptions& options) {
  if (!writes_here(options.save_on_each_node)) return;
  if (!options.safe_serialization) return torch_save(object, path);
  StateDict state("Tensor");
  if (!object.is_dict()) {
    throw ArgumentError(str("save: a safetensors file holds tensors by name, and this is of kind ",
                            object.kind_name(),
                            ". Pass a state dict, or save without "
                            "safe_serialization."));
  }
  for (const auto& [key, value] : object.as_dict()) {
    if (!value.is_tensor() || !key.is_string()) {
      throw ArgumentError(str("save: a safetensors file holds tensors by name, and the entry ",
                              key.repr(), " is of kind ", value.kind_name(),
                              ". Leave it out, or save without safe_serialization."));
    }
    state.insert(key.as_string(), value.as_tensor());
  }
  write_file(state, path, /*safe_serialization=*/true);
}

void save(const StateDict& state, const fs::path& path, const SaveOptions& options) {
  if (!writes_here(options.save_on_each_node)) return;
  write_file(options.safe_serialization ? clean_state_dict_for_safetensors(state) : state, path,
             options.safe_serialization);
}

void save_model(const StateDict& state, const fs::path& save_directory,
                const SaveModelOptions& options, std::source_location where) {
  detail::checkpoint::save_model(state, /*values_of=*/nullptr, save_directory, options, where);
}

void detail::checkpoint::save_model(const StateDict& state, const ValuesOfState& values_of,
                                    const fs::path& save_directory, const SaveModelOptions& options,
                                    std::source_location where) {
  // What one process throws while it encodes its message, all throw.
  const auto write = [&]() -> std::string {
    std::error_code error;
    if (fs::is_regular_file(save_directory, error)) {
      throw ArgumentError(
          str("Provided path (", save_directory.string(), ") should be a directory, not a file"));
    }
    for (const auto& entry : state) {
      if (!values_of && entry.value().is_meta()) {
        throw StateError(
            str("You can't save the model since some parameters are on the meta "
                "device. '",
                entry.key(), "' is the first; load its weights before."));
      }
    }
    if (writes_here(options.save_on_each_node)) {
      write_model(values_of ? values_of(state) : state, save_directory, options);
    }
    return {};
  };
  if (comm::is_alone(/*group=*/nullptr)) {
    (void)write();
  } else {
    (void)comm::ObjectMessages::exchange(write, /*group=*/nullptr, "save_model", where);
  }
}

}  // namespace accelerate
