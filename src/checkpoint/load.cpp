// Weights from files into models.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <system_error>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "accelerate/operations/objects.h"
#include "accelerate/value/fields.h"
#include "accelerate/value/from_value.h"
#include "accelerate/value/to_value.h"
#include "checkpoint/checkpoint_file.h"
#include "checkpoint/exchange.h"
#include "checkpoint/offload.h"
#include "checkpoint/recipes.h"
#include "comm/peers.h"
#include "core/byte_bar.h"
#include "core/json.h"
#include "core/log.h"
#include "core/python_text.h"
#include "core/text.h"
#include "modeling/stand_in.h"
#include "modeling/tensors.h"

namespace accelerate {

// How a report travels to other processes.
static auto value_fields(std::type_identity<MismatchedKey>) {
  return ACCELERATE_FIELDS(MismatchedKey, name, checkpoint_shape, model_shape);
}
static auto value_fields(std::type_identity<KeyMappingReport::Rule>) {
  return ACCELERATE_FIELDS(KeyMappingReport::Rule, rule, matched);
}
static auto value_fields(std::type_identity<KeyMappingReport>) {
  return ACCELERATE_FIELDS(KeyMappingReport, rules, unmatched, incomplete);
}
static auto value_fields(std::type_identity<LoadCheckpointReport>) {
  return ACCELERATE_FIELDS(LoadCheckpointReport, missing_keys, unexpected_keys, mismatched_keys,
                           key_mapping);
}

namespace {

namespace fs = std::filesystem;
using detail::join;
using detail::str;
using detail::checkpoint::CheckpointFile;
using detail::checkpoint::OffloadWriter;
using detail::checkpoint::TensorSources;
using detail::formats::TensorRecipe;
using detail::modeling::NamedStandIn;

std::vector<std::string> quoted(const std::vector<std::string>& names, const char* quote) {
  std::vector<std::string> result;
  for (const auto& name : names) result.push_back(str(quote, name, quote));
  return result;
}

using Recipes = std::unordered_map<std::string, const TensorRecipe*>;

/// What will be copied where, and what does not fit.
struct LoadPlan {
  /// Names of the model and the recipes of their tensors, in the order of the model.
  std::vector<std::pair<std::string, const TensorRecipe*>> copies = {};
  /// Parameters that other tensors stand for, and what the files have for them.
  std::vector<std::pair<const NamedStandIn*, Recipes>> packed = {};
  LoadCheckpointReport report = {};
};

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

/// Adds what the files have for packed weights; of those that they lack the name.
void plan_packed(const std::vector<NamedStandIn>& packed, const Recipes& recipes, LoadPlan& plan) {
  for (const auto& one : packed) {
    if (!recipes.contains(one.name)) {
      plan.report.missing_keys.push_back(one.name);
      continue;
    }
    Recipes parts;
    for (const auto& [name, recipe] : recipes) {
      if (one.stand_in->owns(name, one.name)) parts.emplace(name, recipe);
    }
    plan.packed.emplace_back(&one, std::move(parts));
  }
}

/// `own` has no packed weights.
LoadPlan compare(const StateDict& own, const std::vector<NamedStandIn>& packed,
                 const TensorSources& sources, const Recipes& recipes,
                 const std::vector<detail::formats::MappedTensor>& offered, bool strict) {
  LoadPlan plan;
  for (const auto& entry : own) {
    const auto recipe = recipes.find(entry.key());
    if (recipe == recipes.end()) continue;
    detail::modeling::refuse_codes(
        entry.key(), entry.value().scalar_type(),
        [&](const std::string& name) { return recipes.contains(name); },
        [&] { return sources.make(*recipe->second).scalar_type(); });
  }
  plan_packed(packed, recipes, plan);
  for (const auto& names : detail::modeling::same_elements(own)) {
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
    if (own.contains(tensor.name)) continue;
    if (detail::modeling::owner_of(tensor.name, packed) != nullptr) continue;
    plan.report.unexpected_keys.push_back(tensor.name);
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
  enum class Store : std::uint8_t {
    kResident,
    kOffloaded,  ///< in the offload folder
    kSpilled     ///< in files of this call, mapped
  };
  Store store = Store::kResident;
  c10::Device device;
  at::ScalarType dtype;
};

bool keeps_fp32(const std::string& name, const std::vector<std::string>& modules) {
  return std::ranges::any_of(modules, [&](const std::string& module) {
    return name == module || name.find(module + ".") != name.npos;
  });
}

/// Decides for each tensor of a model.
class Placements {
 public:
  Placements(const torch::nn::Module& model, const LoadCheckpointOptions& options)
      : options_(options) {
    for (const auto& name : model.named_buffers().keys()) buffers_.insert(name);
    for (const auto& [name, device] : options.device_map) {
      if (device.is_cpu() || device.is_disk()) continue;
      main_device_ = detail::modeling::torch_device(device);
      break;
    }
  }

  [[nodiscard]] Placement of(const std::string& name, const at::Tensor& tensor) const {
    auto place =
        options_.device_map.empty()
            ? Placement{.device = tensor.is_meta() ? c10::Device(c10::kCPU) : tensor.device(),
                        .dtype = tensor.scalar_type()}
            : mapped(name, tensor);
    if (options_.dtype && tensor.is_floating_point()) {
      place.dtype = keeps_fp32(name, options_.keep_in_fp32_modules) ? at::kFloat : *options_.dtype;
    }
    return place;
  }

 private:
  [[nodiscard]] Placement mapped(const std::string& name, const at::Tensor& tensor) const {
    const auto* const device = find_in_device_map(options_.device_map, name);
    if (device == nullptr) throw ArgumentError(str(name, " doesn't have any device set."));
    Placement place{.device = main_device_, .dtype = tensor.scalar_type()};
    if (!device->is_disk()) {
      place.device = detail::modeling::torch_device(*device);
      if (device->is_cpu() && options_.offload_state_dict) place.store = Placement::Store::kSpilled;
    } else if (options_.offload_buffers || !buffers_.contains(name)) {
      place.store = Placement::Store::kOffloaded;
    }
    return place;
  }

  const LoadCheckpointOptions& options_;
  std::unordered_set<std::string> buffers_;
  /// Where modules on disk run.
  c10::Device main_device_ = c10::kCPU;
};

void check_options(const LoadCheckpointOptions& options) {
  const bool on_disk = std::ranges::any_of(
      options.device_map, [](const auto& entry) { return entry.second.is_disk(); });
  if (on_disk && !options.offload_folder) {
    throw ArgumentError(
        "At least one of the model submodule will be offloaded to disk, please pass along an "
        "`offload_folder`.");
  }
  if (options.broadcast_from_rank0 && !options.device_map.empty()) {
    throw ArgumentError(
        "load_checkpoint_in_model: broadcast_from_rank0 loads a model where it is, and there is a "
        "device_map. Leave out one of them.");
  }
  if (options.dtype && !at::isFloatingType(*options.dtype)) {
    throw ArgumentError(str("load_checkpoint_in_model: dtype is ", at::toString(*options.dtype),
                            ". Choose a floating point type."));
  }
}

/// Gives a tensor memory on its device, if it has none there. The tensor object stays, so that
/// members and optimizers keep pointing to it.
void allocate(const at::Tensor& tensor, const Placement& place, const std::string& name) {
  if (tensor.device() == place.device && tensor.scalar_type() == place.dtype) return;
  const auto options = tensor.options().device(place.device).dtype(place.dtype);
  detail::modeling::replace_data(tensor, at::empty(tensor.sizes(), options), name);
}

/// A folder that is gone with its object. Mapped files in it live on.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    auto pattern = (fs::temp_directory_path() / "accelerate_state_dict.XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      throw CheckpointError(
          str("Cannot create a folder in '", fs::temp_directory_path().string(),
              "': ", std::generic_category().message(errno), ". Set TMPDIR to a place with room."),
          pattern);
    }
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// What a tensor counts in a progress bar; a packed weight as what it stands for.
std::int64_t bytes_of(const at::Tensor& tensor, const Placement& place) {
  return tensor.numel() * static_cast<std::int64_t>(c10::elementSize(place.dtype));
}

using Done = std::function<void(std::int64_t bytes)>;

void copy_all(torch::nn::Module& model, const StateDict& own, const LoadPlan& plan,
              const std::vector<Placement>& places, const TensorSources& sources,
              const LoadCheckpointOptions& options, const Done& done) {
  using Store = Placement::Store;
  const auto goes_to = [&](Store store) {
    return std::ranges::count(places, store, &Placement::store) > 0;
  };
  std::optional<OffloadWriter> offloaded;
  if (goes_to(Store::kOffloaded)) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (places[i].store == Store::kOffloaded) names.push_back(plan.copies[i].first);
    }
    offloaded.emplace(*options.offload_folder, names);
  }
  std::optional<TemporaryFolder> spilled;
  if (goes_to(Store::kSpilled)) spilled.emplace();
  OffloadIndex spilled_index;

  // Files next: a full disk leaves the model as it is.
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& [name, recipe] = plan.copies[i];
    if (places[i].store == Store::kResident) continue;
    const auto value = sources.make(*recipe).to(places[i].dtype);
    if (places[i].store == Store::kOffloaded) {
      offloaded->add(value, name);
    } else {
      offload_weight(value, name, spilled->path(), &spilled_index);
    }
    done(static_cast<std::int64_t>(value.nbytes()));
  }
  if (offloaded) offloaded->finish();

  TensorSources::Destinations destinations;
  std::unordered_set<const c10::TensorImpl*>
      residents;  // a tied one may be on disk by another name
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& [name, recipe] = plan.copies[i];
    if (places[i].store == Store::kResident) {
      allocate(own[name], places[i], name);
      residents.insert(own[name].unsafeGetTensorImpl());
      destinations.emplace_back(recipe, own[name].detach());
    } else if (!residents.contains(own[name].unsafeGetTensorImpl())) {
      allocate(own[name], {.device = c10::kMeta, .dtype = places[i].dtype}, name);
    }
  }
  sources.make_into(destinations, done);
  if (spilled) load_offloaded_weights(model, spilled_index, spilled->path());
}

/// Fills packed weights one by one, so that the memory of one unpacked weight is enough. Those on
/// disk are written to the folder and become the pages of its files.
void load_packed(const LoadPlan& plan, const std::vector<Placement>& places,
                 const TensorSources& sources, const LoadCheckpointOptions& options,
                 const Done& done) {
  const at::NoGradGuard no_grad;
  std::optional<OffloadWriter> writer;
  for (std::size_t i = 0; i < plan.packed.size(); ++i) {
    const auto& [packed, recipes] = plan.packed[i];
    const auto& [name, parameter, stand_in] = *packed;
    const auto& place = places[i];
    const bool is_resident = place.store == Placement::Store::kResident;
    // A weight is quantized where it computes: a GPU is faster at it.
    if (is_resident) stand_in->move_to(place.device);
    StateDict parts("Tensor");
    for (const auto& [key, recipe] : recipes) {
      auto value = sources.make(*recipe);
      // Codes may be kept as floats (bnb_4bit_quant_storage): these are bytes, which stay.
      if (recipes.size() > 1 || !value.is_floating_point()) {
        value = value.clone();
      } else {
        value = (is_resident ? value.to(place.device) : value).to(place.dtype);
      }
      parts.insert(key, std::move(value));
    }
    stand_in->load(name, parts);
    done(bytes_of(parameter, place));
    if (place.store != Placement::Store::kOffloaded) continue;
    if (!writer) writer.emplace(*options.offload_folder);
    StateDict pages("Tensor");
    for (const auto& part : stand_in->state(name)) {
      writer->add(part.value(), part.key());
      pages.insert(part.key(),
                   load_offloaded_weight(*options.offload_folder / str(part.key(), ".dat"),
                                         *writer->index().find(part.key())));
    }
    stand_in->adopt(name, pages);
  }
  if (writer) writer->finish();
}

void warn_of_unexpected(const std::vector<std::string>& names, const torch::nn::Module& model,
                        const fs::path& checkpoint) {
  if (names.empty()) return;
  detail::warn(str("Some weights of the model checkpoint at ", checkpoint.string(),
                   " were not used when initializing ", module_class_name(model), ": {",
                   join(quoted(names, "'")),
                   "}. This may or may not be an issue - make sure that the checkpoint does not "
                   "have unnecessary parameters, or that the model definition correctly "
                   "corresponds to the checkpoint."));
}

struct Loaded {
  LoadCheckpointReport report;
  /// The tensors that were filled, in the order of the model.
  std::vector<std::string> names = {};
};

auto value_fields(std::type_identity<Loaded>) { return ACCELERATE_FIELDS(Loaded, report, names); }

/// Reads the files and fills the model.
Loaded load_here(torch::nn::Module& model, const fs::path& checkpoint,
                 const LoadCheckpointOptions& options) {
  std::vector<CheckpointFile> files;
  for (const auto& path : detail::checkpoint::checkpoint_files(checkpoint))
    files.emplace_back(path);
  const TensorSources sources(files);
  auto mapped = detail::formats::map_keys(options.key_mapping, sources.names());
  Recipes recipes;
  for (const auto& [name, recipe] : mapped.tensors) recipes.emplace(name, recipe.get());

  const auto packed = detail::modeling::stand_ins(model);
  StateDict own("Tensor");
  for (const auto& entry : state_dict(model)) {
    if (detail::modeling::owner_of(entry.key(), packed) == nullptr) {
      own.insert(entry.key(), entry.value());
    }
  }
  auto plan = compare(own, packed, sources, recipes, mapped.tensors, options.strict);
  if (!options.key_mapping.empty()) plan.report.key_mapping = std::move(mapped.report);
  refuse_mismatches(plan.report, options, model, checkpoint);

  // All placements first: nothing has changed if one cannot be had.
  const Placements placements(model, options);
  std::int64_t bytes = 0;
  const auto placed = [&](const std::string& name, const at::Tensor& tensor) {
    auto place = placements.of(name, tensor);
    bytes += bytes_of(tensor, place);
    return place;
  };
  std::vector<Placement> places, packed_places;
  for (const auto& [name, recipe] : plan.copies) places.push_back(placed(name, own[name]));
  for (const auto& [one, parts] : plan.packed) {
    packed_places.push_back(placed(one->name, one->parameter));
  }
  detail::ByteBar bar("loading", bytes, options.progress);
  const Done done = [&](std::int64_t more) { bar.add(more); };
  copy_all(model, own, plan, places, sources, options, done);
  load_packed(plan, packed_places, sources, options, done);
  warn_of_unexpected(plan.report.unexpected_keys, model, checkpoint);
  Loaded loaded{.report = std::move(plan.report)};
  for (const auto& [name, recipe] : plan.copies) loaded.names.push_back(name);
  return loaded;
}

/// Collective. Rank 0 loads, then its tensors travel in the order of their names.
LoadCheckpointReport load_and_broadcast(torch::nn::Module& model, const fs::path& checkpoint,
                                        const LoadCheckpointOptions& options,
                                        std::source_location where) {
  constexpr auto kName = "load_checkpoint_in_model";
  const detail::comm::Peers peers(kName, {nullptr, where});
  const auto answers = detail::checkpoint::exchange_by_collective(kName, where)([&] {
    if (peers.rank() != 0) return std::string();
    auto loaded = load_here(model, checkpoint, options);
    std::ranges::sort(loaded.names);
    return detail::json_dumps(to_value(loaded));
  });
  auto loaded = from_value<Loaded>(detail::json_loads(answers.front()));
  const auto own = state_dict(model);
  const Placements placements(model, options);
  const at::NoGradGuard no_grad;
  for (const auto& name : loaded.names) {
    const auto& tensor = own[name];
    allocate(tensor, placements.of(name, tensor), name);
    const auto message = tensor.detach().contiguous();
    peers.broadcast(message, 0);
    if (peers.rank() != 0 && !message.is_alias_of(tensor)) tensor.detach().copy_(message);
  }
  return std::move(loaded.report);
}

}  // namespace

StateDict load_state_dict(const fs::path& checkpoint_file, const DeviceMap& device_map) {
  const CheckpointFile file(checkpoint_file);
  StateDict state("Tensor");
  for (const auto& name : file.names()) {
    const auto* const device = find_in_device_map(device_map, name);
    const bool on_cpu = device == nullptr || device->is_disk();
    state.insert(name, file.get(name, on_cpu ? c10::Device(c10::kCPU)
                                             : detail::modeling::torch_device(*device)));
  }
  return state;
}

LoadCheckpointReport load_checkpoint_in_model(torch::nn::Module& model, const fs::path& checkpoint,
                                              const LoadCheckpointOptions& options,
                                              std::source_location where) {
  check_options(options);
  const auto tied = find_tied_parameters(model);
  if (options.broadcast_from_rank0 && !detail::comm::is_alone(/*group=*/nullptr)) {
    if (!detail::modeling::stand_ins(model).empty()) {
      throw UnsupportedError(
          "load_checkpoint_in_model: broadcast_from_rank0 does not send quantized weights. Leave "
          "it "
          "out, so that each process reads the files.");
    }
    auto report = load_and_broadcast(model, checkpoint, options, where);
    retie_parameters(model, tied);
    return report;
  }
  if (!options.device_map.empty()) check_tied_parameters_on_same_device(tied, options.device_map);
  auto loaded = load_here(model, checkpoint, options);
  retie_parameters(model, tied);
  return std::move(loaded.report);
}

}  // namespace accelerate
