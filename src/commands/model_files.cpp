#include "commands/model_files.h"

#include <algorithm>
#include <filesystem>

#include "accelerate/errors.h"
#include "core/config.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "formats/mapped_file.h"
#include "formats/safetensors_header.h"
#include "formats/shard_index.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;
using formats::Dtype;

constexpr std::string_view kTensors = ".safetensors";
constexpr std::string_view kIndex = ".safetensors.index.json";
constexpr std::string_view kConfig = "config.json";

// All but BOOL and the integers, I8 to U64.
bool is_floating(Dtype dtype) {
  const auto name = to_string(dtype);
  return dtype != Dtype::kBool && !name.starts_with('I') && !name.starts_with('U');
}

SizedTensor sized(const formats::TensorEntry& entry) {
  SizedTensor tensor{.name = entry.name, .elements = 1};
  for (const auto size : entry.shape) tensor.elements *= size;
  tensor.trainable = is_floating(entry.dtype);
  // As Python counts: floating types in 32 bits, a bool as one bit.
  tensor.bytes = tensor.trainable ? tensor.elements * 4 : entry.bytes();
  if (entry.dtype == Dtype::kBool) tensor.bytes = tensor.elements / 8;
  return tensor;
}

Value::Dict read_json(const fs::path& path) {
  auto value = json_loads(read_whole_file(path), str("'", path.string(), "'"));
  if (value.is_dict()) return std::move(value).as_dict();
  throw ConfigError(str("'", path.string(), "' must hold a JSON object."));
}

void read_tensors(const fs::path& path, ModelOnDisk& model) {
  const auto header = formats::read_safetensors_header(*formats::MappedFile::open(path));
  for (const auto& entry : header.tensors) model.layout.tensors.push_back(sized(entry));
  model.files.push_back(path.string());
}

void read_index(const fs::path& path, ModelOnDisk& model) {
  const auto index =
      formats::read_shard_index(read_whole_file(path, formats::kMaxIndexBytes), path.string());
  for (const auto& shard : index.files) read_tensors(path.parent_path() / shard, model);
}

std::vector<fs::path> files_ending_with(const fs::path& folder, std::string_view ending) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().ends_with(ending)) files.push_back(it->path());
  }
  std::ranges::sort(files);
  return files;
}

// The index or the single file with the weights; "" if there is none.
fs::path weights_in(const fs::path& folder) {
  for (const auto& ending : {kIndex, kTensors}) {
    const auto files = files_ending_with(folder, ending);
    auto usual = folder / str("model", ending);
    if (std::ranges::find(files, usual) != files.end()) return usual;
    if (files.size() == 1) return files.front();
    if (files.size() > 1) {
      throw ConfigError(str("The folder '", folder.string(), "' has ", files.size(), " files *",
                            ending, " and none of them is model", ending, ". Name one of them."));
    }
  }
  return {};
}

ModelOnDisk read_folder(const fs::path& folder) {
  ModelOnDisk model;
  const auto weights = weights_in(folder);
  const auto config = folder / kConfig;
  std::error_code ignored;
  if (fs::exists(config, ignored)) {
    try {
      model.layout = layout_of_config(read_json(config), str("'", config.string(), "'"));
      model.files.push_back(config.string());
    } catch (const ConfigError&) {
      if (weights.empty()) throw;  // with weights, only the activations are missing
    }
  } else if (weights.empty()) {
    throw ConfigError(str("The folder '", folder.string(),
                          "' has no .safetensors file, no index of ",
                          "such files and no config.json. Weights of torch.save (.bin) are not ",
                          "looked into: convert them to safetensors."));
  }
  if (weights.empty()) return model;
  model.layout.tensors.clear();
  model.files.clear();
  weights.filename().string().ends_with(kIndex) ? read_index(weights, model)
                                                : read_tensors(weights, model);
  return model;
}

// The folders that Python's huggingface_hub keeps models in.
fs::path hub_cache(const Environment& environment) {
  if (const auto cache = environment.get("HF_HUB_CACHE")) return expand_user(*cache, environment);
  return default_config_file(environment).parent_path().parent_path() / "hub";
}

// The newest revision of a model in the cache; "" if it is not there.
fs::path cached_model(const std::string& name, const fs::path& cache) {
  const bool possible = !name.empty() && name.find("..") == std::string::npos &&
                        name.find_first_of("\\:~ ") == std::string::npos &&
                        std::ranges::count(name, '/') <= 1 && !name.starts_with('/');
  if (!possible) return {};
  const fs::path folder = cache / str("models--", join(split(name, '/'), "--"));
  std::error_code ignored;
  if (!fs::exists(folder / "refs" / "main", ignored)) return {};
  const std::string revision(trim(read_whole_file(folder / "refs" / "main")));
  const auto snapshot = folder / "snapshots" / fs::path(revision).filename();
  return fs::is_directory(snapshot, ignored) ? snapshot : fs::path();
}

}  // namespace

ModelOnDisk find_model(const std::string& model, const Environment& environment) {
  std::error_code ignored;
  const fs::path path = expand_user(model, environment);
  if (fs::is_directory(path, ignored)) return read_folder(path);
  const std::string name = path.filename().string();
  if (fs::exists(path, ignored)) {
    ModelOnDisk result;
    if (name.ends_with(kIndex)) {
      read_index(path, result);
    } else if (name.ends_with(kTensors)) {
      read_tensors(path, result);
    } else if (name.ends_with(".json")) {
      result.layout = layout_of_config(read_json(path), str("'", path.string(), "'"));
      result.files.push_back(path.string());
    } else {
      throw ConfigError(str("'", model, "' is neither a .safetensors file nor a config.json. Name ",
                            "one of these, or the folder of a model."));
    }
    return result;
  }
  const auto cache = hub_cache(environment);
  if (const auto snapshot = cached_model(model, cache); !snapshot.empty()) {
    return read_folder(snapshot);
  }
  throw ConfigError(str("There is no file or folder '", model,
                        "', and no model of that name in the ", "cache '", cache.string(),
                        "'. Nothing is downloaded: fetch the model first, ",
                        "e.g. with `hf download ", model, "`, or name its folder."));
}

}  // namespace accelerate::detail::commands
