// Weights from files into models.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "checkpoint/aliases.h"
#include "checkpoint/checkpoint_file.h"
#include "checkpoint/device_map.h"
#include "checkpoint/recipes.h"
#include "core/byte_bar.h"
#include "core/log.h"
#include "core/python_text.h"
#include "core/text.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::join;
using detail::str;
using detail::checkpoint::CheckpointFile;
using detail::checkpoint::TensorSources;
using detail::formats::TensorRecipe;

constexpr std::string_view kDisk = "disk";

std::vector<std::string> quoted(const std::vector<std::string>& names, const char* quote) {
  std::vector<std::string> result;
  for (const auto& name : names) result.push_back(str(quote, name, quote));
  return result;
}

/// What will be copied where, and what does not fit.
struct LoadPlan {
  /// Names of the model and the recipes of their tensors, in the order of the model.
  std::vector<std::pair<std::string, const TensorRecipe*>> copies = {};
  LoadCheckpointReport report = {};
};

using Recipes = std::unordered_map<std::string, const TensorRecipe*>;

/// A name that a safetensors file has beside another one of the same tensor: Python's strict
/// loading counts all but the first of them in alphabetical order as unexpected.
void note_second_names(const std::vector<std::string>& names, const Recipes& recipes,
                       const TensorSources& sources, std::vector<std::string>& unexpected) {
  std::vector<std::string> present;
  for (const auto& name : names) {
    const auto found = recipes.find(name);
    if (found == recipes.end()) continue;
    const auto* file = std::get_if<TensorRecipe::FromFile>(&found->second->step);
    if (file != nullptr && sources.file_of(file->key).is_safetensors()) present.push_back(name);
  }
  if (present.size() < 2) return;
  std::ranges::sort(present);
  unexpected.insert(unexpected.end(), present.begin() + 1, present.end());
}

LoadPlan compare(const StateDict& own, const TensorSources& sources, const Recipes& recipes,
                 const std::vector<detail::formats::MappedTensor>& offered, bool strict) {
  LoadPlan plan;
  for (const auto& names : detail::checkpoint::same_elements(own)) {
    const bool found =
        std::ranges::any_of(names, [&](const std::string& name) { return recipes.contains(name); });
    if (!found) plan.report.missing_keys.push_back(*std::ranges::min_element(names));
    if (strict) note_second_names(names, recipes, sources, plan.report.unexpected_keys);
  }
  for (const auto& entry : own) {
    const auto recipe = recipes.find(entry.key());
    if (recipe == recipes.end()) continue;
    auto shape = sources.shape_of(*recipe->second);
    if (entry.value().sizes() == shape) {
      plan.copies.emplace_back(entry.key(), recipe->second);
    } else {
      plan.report.mismatched_keys.push_back({.name = entry.key(),
                                             .checkpoint_shape = std::move(shape),
                                             .model_shape = entry.value().sizes().vec()});
    }
  }
  for (const auto& tensor : offered) {
    if (!own.contains(tensor.name)) plan.report.unexpected_keys.push_back(tensor.name);
  }
  std::ranges::sort(plan.report.missing_keys);
  std::ranges::sort(plan.report.unexpected_keys);
  return plan;
}

void refuse_mismatches(const LoadCheckpointReport& report, const LoadCheckpointOptions& options,
                       const torch::nn::Module& model, const fs::path& checkpoint) {
  std::string problems;
  const auto list = [&](const char* what, const std::vector<std::string>& names) {
    if (!options.strict || names.empty()) return;
    problems += str("\n\t", what, " key(s) in state_dict: ", join(quoted(names, "\"")), ".");
  };
  list("Missing", report.missing_keys);
  list("Unexpected", report.unexpected_keys);
  if (options.strict || !options.ignore_mismatched_sizes) {
    for (const auto& [name, theirs, ours] : report.mismatched_keys) {
      problems += str("\n\tsize mismatch for ", name, ": the checkpoint has shape [", join(theirs),
                      "], the model [", join(ours), "].");
    }
  }
  if (problems.empty()) return;
  throw StateDictMismatch(str("Error(s) in loading '", checkpoint.string(), "' into ",
                              module_class_name(model), ":", problems),
                          checkpoint);
}

/// Where a tensor goes and as what.
struct Placement {
  c10::Device device;
  at::ScalarType dtype;
};

bool keeps_fp32(const std::string& name, const std::vector<std::string>& modules) {
  return std::ranges::any_of(modules, [&](const std::string& module) {
    return name == module || name.find(module + ".") != name.npos;
  });
}

Placement placement_of(const std::string& name, const at::Tensor& tensor,
                       const LoadCheckpointOptions& options) {
  if (tensor.is_meta()) {
    throw UnsupportedError(
        str("load_checkpoint_in_model: '", name,
            "' is on the meta device, and this version cannot load models without memory yet. "
            "Build the model on the CPU or a GPU."));
  }
  Placement place{.device = tensor.device(), .dtype = tensor.scalar_type()};
  if (!options.device_map.empty()) {
    const auto* device = detail::checkpoint::find_in_device_map(options.device_map, name);
    if (device == nullptr) throw ArgumentError(str(name, " doesn't have any device set."));
    place.device = detail::checkpoint::device_from_text(*device);
  }
  if (options.dtype && tensor.is_floating_point()) {
    const bool kept = *options.dtype == at::kHalf && keeps_fp32(name, options.keep_in_fp32_modules);
    place.dtype = kept ? at::kFloat : *options.dtype;
  }
  return place;
}

void check_options(const LoadCheckpointOptions& options) {
  for (const auto& [name, device] : options.device_map) {
    if (device == kDisk) {
      throw UnsupportedError(str("load_checkpoint_in_model: the device map puts '", name,
                                 "' on disk, and this version has no offload yet. Use 'cpu'."));
    }
  }
  if (options.dtype && !at::isFloatingType(*options.dtype)) {
    throw ArgumentError(str("load_checkpoint_in_model: dtype is ", at::toString(*options.dtype),
                            ". Choose a floating point type."));
  }
}

void copy_all(const StateDict& own, const LoadPlan& plan, const TensorSources& sources,
              const LoadCheckpointOptions& options) {
  // All placements first: nothing has changed if one cannot be had.
  std::vector<Placement> places;
  for (const auto& [name, recipe] : plan.copies) {
    places.push_back(placement_of(name, own[name], options));
  }
  const at::NoGradGuard no_grad;
  TensorSources::Destinations destinations;
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < plan.copies.size(); ++i) {
    const auto& [name, recipe] = plan.copies[i];
    const auto& tensor = own[name];
    if (tensor.device() != places[i].device || tensor.scalar_type() != places[i].dtype) {
      // The tensor object stays, so that members and optimizers keep pointing to it.
      tensor.set_data(at::empty(tensor.sizes(),
                                tensor.options().device(places[i].device).dtype(places[i].dtype)));
    }
    destinations.emplace_back(recipe, tensor.detach());
    bytes += static_cast<std::int64_t>(tensor.nbytes());
  }
  detail::ByteBar bar("loading", bytes, options.progress);
  sources.make_into(destinations, [&](std::int64_t done) { bar.add(done); });
}

}  // namespace

StateDict load_state_dict(const fs::path& checkpoint_file, const DeviceMap& device_map) {
  const CheckpointFile file(checkpoint_file);
  StateDict state("Tensor");
  for (const auto& name : file.names()) {
    const auto* text = detail::checkpoint::find_in_device_map(device_map, name);
    const bool on_cpu = text == nullptr || *text == kDisk;
    state.insert(name, file.get(name, on_cpu ? c10::Device(c10::kCPU)
                                             : detail::checkpoint::device_from_text(*text)));
  }
  return state;
}

LoadCheckpointReport load_checkpoint_in_model(torch::nn::Module& model, const fs::path& checkpoint,
                                              const LoadCheckpointOptions& options) {
  check_options(options);
  std::vector<CheckpointFile> files;
  for (const auto& path : detail::checkpoint::checkpoint_files(checkpoint))
    files.emplace_back(path);
  const TensorSources sources(files);
  auto mapped = detail::formats::map_keys(options.key_mapping, sources.names());
  Recipes recipes;
  for (const auto& [name, recipe] : mapped.tensors) recipes.emplace(name, recipe.get());

  const auto own = state_dict(model);
  auto plan = compare(own, sources, recipes, mapped.tensors, options.strict);
  if (!options.key_mapping.empty()) plan.report.key_mapping = std::move(mapped.report);
  refuse_mismatches(plan.report, options, model, checkpoint);
  copy_all(own, plan, sources, options);

  if (!plan.report.unexpected_keys.empty()) {
    detail::warn(str("Some weights of the model checkpoint at ", checkpoint.string(),
                     " were not used when initializing ", module_class_name(model), ": {",
                     join(quoted(plan.report.unexpected_keys, "'")),
                     "}. This may or may not be an issue - make sure that the checkpoint does not "
                     "have unnecessary parameters, or that the model definition correctly "
                     "corresponds to the checkpoint."));
  }
  return std::move(plan.report);
}

}  // namespace accelerate
