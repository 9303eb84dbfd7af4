#include "checkpoint/checkpoint_file.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <system_error>

#include "accelerate/constants.h"
#include "accelerate/errors.h"
#include "accelerate/torch_archive.h"
#include "checkpoint/stored_state.h"
#include "core/files.h"
#include "core/log.h"
#include "core/text.h"
#include "formats/shard_index.h"
#include "formats/zero_folder.h"

namespace accelerate::detail::checkpoint {
namespace {

namespace fs = std::filesystem;

safetensors::File open_safetensors(const fs::path& path) {
  auto file = safetensors::File::open(path);
  const auto& metadata = file.metadata();
  if (metadata.empty()) {
    warn(str("The safetensors archive passed at ", path.string(),
             " does not contain metadata. Make sure to save your model with the `save_pretrained` "
             "method. Defaulting to 'pt' metadata."));
    return file;
  }
  const auto format = metadata.find("format");
  if (format == metadata.end() ||
      (format->second != "pt" && format->second != "tf" && format->second != "flax")) {
    throw FormatError(str("The safetensors archive passed at ", path.string(),
                          " does not contain the valid metadata. Make sure you save your model "
                          "with the `save_pretrained` method."),
                      path);
  }
  if (format->second != "pt") {
    throw FormatError(str("The checkpoint passed was saved with ", format->second,
                          ", we need a the pt format. It is '", path.string(), "'."),
                      path);
  }
  return file;
}

StateDict open_archive(const fs::path& path) {
  const auto value = torch_load(path, {.mmap = true});
  if (!value.is_dict()) {
    throw FormatError(str("'", path.string(), "' is of kind ", value.kind_name(),
                          " and not the state dict of a model."),
                      path);
  }
  StateDict state("Tensor");
  for (const auto& [key, entry] : value.as_dict()) {
    if (!key.is_string() || !entry.is_tensor()) {
      throw FormatError(str("'", path.string(), "' is not the state dict of a model: its entry ",
                            key.repr(), " is of kind ", entry.kind_name(), " and not a tensor."),
                        path);
    }
    state.insert(key.as_string(), entry.as_tensor().detach());
  }
  return state;
}

std::vector<fs::path> files_of_index(const fs::path& index) {
  const auto text = [&] {
    try {
      return read_whole_file(index, formats::kMaxIndexBytes);
    } catch (const ConfigError& error) {
      throw CheckpointError(error.what(), index);
    }
  }();
  std::vector<fs::path> files;
  for (const auto& name : formats::read_shard_index(text, index.string()).files) {
    files.push_back(index.parent_path() / name);
    std::error_code error;
    if (!fs::is_regular_file(files.back(), error)) {
      throw CheckpointError(str("The index '", index.string(), "' names the file '", name,
                                "', which is not there. Copy all files of the checkpoint."),
                            files.back());
    }
  }
  return files;
}

std::vector<fs::path> files_of_folder(const fs::path& folder) {
  std::vector<fs::path> indices;
  std::error_code error;
  for (const auto name : {kWeightsName, kSafeWeightsName}) {
    if (fs::exists(folder / name, error)) return {folder / name};
  }
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().filename().string().ends_with(".index.json")) indices.push_back(entry.path());
  }
  if (error) {
    throw CheckpointError(str("Cannot list '", folder.string(), "': ", error.message(), "."),
                          folder);
  }
  if (indices.empty() &&
      (fs::exists(folder / ".metadata", error) || formats::find_zero_folder(folder))) {
    return {folder};
  }
  if (indices.empty()) {
    throw ArgumentError(str(folder.string(),
                            " is not a folder containing a `.index.json` file or a ", kWeightsName,
                            " or a ", kSafeWeightsName, " file"));
  }
  if (indices.size() > 1) {
    throw ArgumentError(str(folder.string(),
                            " containing more than one `.index.json` file, delete ",
                            "the irrelevant ones."));
  }
  return files_of_index(indices.front());
}

}  // namespace

CheckpointFile::CheckpointFile(const fs::path& path) : content_(open(path)) {}

CheckpointFile::Content CheckpointFile::open(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return open_folder(path);
  if (path.extension() == ".safetensors") return open_safetensors(path);
  return open_archive(path);
}

CheckpointFile::Folder CheckpointFile::open_folder(const fs::path& path) {
  Folder folder;
  const auto state = open_stored_state(path);
  // Beside an optimizer a model is below this key.
  const auto* model = state.as_dict().get("model");
  for (const auto& [key, entry] :
       (model != nullptr && model->is_dict() ? *model : state).as_dict()) {
    if (!is_stored_tensor(entry)) {
      throw FormatError(str("'", path.string(), "' is not the state dict of a model: its entry ",
                            key.repr(), " is of kind ", entry.kind_name(), " and not a tensor."),
                        path);
    }
    folder.emplace(key.to_string(), entry);
  }
  return folder;
}

std::vector<std::string> CheckpointFile::names() const {
  if (const auto* file = std::get_if<safetensors::File>(&content_)) return file->offset_keys();
  if (const auto* folder = std::get_if<Folder>(&content_)) {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : *folder) names.push_back(name);
    return names;
  }
  return std::get<StateDict>(content_).keys();
}

std::vector<std::int64_t> CheckpointFile::shape(const std::string& name) const {
  if (const auto* folder = std::get_if<Folder>(&content_)) return stored_sizes(folder->at(name));
  return get(name).sizes().vec();
}

at::Tensor CheckpointFile::get(const std::string& name, c10::Device device) const {
  if (const auto* file = std::get_if<safetensors::File>(&content_)) return file->get(name, device);
  if (const auto* folder = std::get_if<Folder>(&content_)) {
    return stored_whole(folder->at(name)).to(device);
  }
  return std::get<StateDict>(content_)[name].to(device);
}

void CheckpointFile::read_into(const Destinations& destinations,
                               const std::function<void(std::int64_t bytes)>& done) const {
  if (const auto* file = std::get_if<safetensors::File>(&content_)) {
    return file->read_into(destinations, done);
  }
  for (const auto& [name, destination] : destinations) {
    destination.copy_(get(name));
    done(static_cast<std::int64_t>(destination.nbytes()));
  }
}

std::vector<fs::path> checkpoint_files(const fs::path& checkpoint) {
  std::error_code error;
  if (fs::is_regular_file(checkpoint, error)) {
    if (checkpoint.extension() == ".json") return files_of_index(checkpoint);
    return {checkpoint};
  }
  if (fs::is_directory(checkpoint, error)) return files_of_folder(checkpoint);
  throw ArgumentError(str(
      "`checkpoint` should be the path to a file containing a whole state dict, or the index of "
      "a sharded checkpoint, or a folder containing a sharded checkpoint or the whole state "
      "dict, but got ",
      checkpoint.string(), "."));
}

}  // namespace accelerate::detail::checkpoint
