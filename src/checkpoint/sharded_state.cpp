#include "checkpoint/sharded_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>

#include "accelerate/constants.h"
#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "accelerate/torch_archive.h"
#include "checkpoint/save_job.h"
#include "checkpoint/stored_state.h"
#include "core/log.h"
#include "core/text.h"
#include "formats/dcp_writer.h"
#include "formats/zero_folder.h"

namespace accelerate::detail::checkpoint {
namespace {

namespace fs = std::filesystem;
using formats::element_count;

/// Up to ten of them.
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 10;
  if (names.size() <= kMost) return join(names);
  return str(join(std::span(names).first(kMost)), " and ", names.size() - kMost, " more");
}

void warn_of_unused(const std::vector<std::string>& names, std::string_view what) {
  if (names.empty()) return;
  warn(str("The checkpoint has ", what, " that are not needed: ", listed(names), "."));
}

void check_sizes(const std::string& name, const Value& stored,
                 const std::vector<std::int64_t>& expected) {
  if (!is_stored_tensor(stored)) {
    throw StateDictMismatch(str("'", name, "' is of kind ", stored.kind_name(),
                                " in the checkpoint and not a tensor."));
  }
  const auto sizes = stored_sizes(stored);
  if (sizes == expected) return;
  throw StateDictMismatch(str("size mismatch for ", name, ": copying a param with shape (",
                              join(sizes), ") from checkpoint, the shape in current model is (",
                              join(expected), ")."));
}

/// What Python's wrappers add to names.
std::string plain_name(std::string name) {
  for (const std::string_view added :
       {"_fsdp_wrapped_module.", "._checkpoint_wrapped_module", "._orig_mod"}) {
    for (auto at = name.find(added); at != name.npos; at = name.find(added)) {
      name.erase(at, added.size());
    }
  }
  for (const std::string_view prefix : {"module.", "_orig_mod."}) {
    if (name.starts_with(prefix)) name.erase(0, prefix.size());
  }
  return name;
}

/// The elements of a shard out of a stored tensor, on the CPU, in the shape of its values.
at::Tensor stored_part(const Value& stored, const LocalShard& shard) {
  if (shard.boxes.empty()) return stored_range(stored, shard.range()).view(shard.values.sizes());
  const auto strides = formats::dense_strides(shard.sizes);
  std::vector<at::Tensor> parts;
  for (const auto& box : shard.boxes) {
    if (element_count(box.sizes) == 0) continue;
    const auto extent = stored_range(stored, formats::extent_of(shard.sizes, box));
    parts.push_back(extent.as_strided(box.sizes, strides, extent.storage_offset()).reshape({-1}));
  }
  if (parts.empty()) return at::empty_like(shard.values, at::kCPU);
  return at::cat(parts).slice(0, shard.begin, shard.end).view(shard.values.sizes());
}

bool is_first_process() { return PartialState().process_index() == 0; }

// ---- models -------------------------------------------------------------------------------------

/// Tensors of a checkpoint by the names of the model.
class StoredNames {
 public:
  StoredNames(const Value& stored, const std::set<std::string>& wanted) {
    if (!stored.is_dict()) {
      throw StateDictMismatch(str("The checkpoint holds a value of kind ", stored.kind_name(),
                                  " and not the state dict of a model."));
    }
    for (const auto& [key, value] : stored.as_dict()) {
      auto name = key.to_string();
      if (!wanted.contains(name)) name = plain_name(name);
      if (!tensors_.emplace(name, &value).second || !wanted.contains(name)) {
        unused_.push_back(key.to_string());
      }
    }
  }

  [[nodiscard]] const Value* find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : found->second;
  }
  [[nodiscard]] const std::vector<std::string>& unused() const { return unused_; }

 private:
  std::map<std::string, const Value*> tensors_;
  std::vector<std::string> unused_;
};

class ModelShards final : public ShardedState {
 public:
  ModelShards(std::shared_ptr<ShardedModel> model, bool strict)
      : model_(std::move(model)), strict_(strict) {}

  [[nodiscard]] ShardedPart part() const override { return ShardedPart::kModel; }
  [[nodiscard]] StateDictType state_dict_type() const override { return model_->state_dict_type(); }
  [[nodiscard]] bool has_deepspeed_names() const override { return model_->has_deepspeed_names(); }

  [[nodiscard]] ShardItems items() override {
    ShardItems items{.root = "model", .shards = model_->local_shards()};
    if (!is_first_process()) return items;
    for (const auto& entry : model_->whole_tensors()) {
      items.values.as_dict().set(entry.key(), Value(entry.value()));
    }
    return items;
  }

  void load(const Value& stored) override {
    const auto shards = model_->local_shards();
    const auto whole = model_->whole_tensors();
    std::set<std::string> wanted;
    for (const auto& shard : shards) wanted.insert(shard.name);
    for (const auto& entry : whole) wanted.insert(entry.key());
    const StoredNames names(stored, wanted);

    const auto sources = sources_of(shards, names);
    // What is filled, and from what.
    std::vector<std::pair<LocalShard, const Value*>> found;
    std::vector<std::string> missing;
    const auto take = [&](LocalShard shard, const Value* source) {
      if (source == nullptr) return missing.push_back(shard.name);
      check_sizes(shard.name, *source, shard.sizes);
      found.emplace_back(std::move(shard), source);
    };
    for (const auto& shard : shards) {
      const auto source = sources.find(first_name(shard));
      take(shard, source == sources.end() ? nullptr : source->second);
    }
    for (const auto& entry : whole) {
      take({.name = entry.key(),
            .sizes = entry.value().sizes().vec(),
            .end = entry.value().numel(),
            .values = entry.value().detach()},
           names.find(entry.key()));
    }
    report_missing(missing);
    warn_of_unused(names.unused(), "tensors");

    const at::NoGradGuard no_grad;
    for (const auto& [shard, source] : found) {
      if (shard.begin == shard.end || !shard.tied_to.empty()) continue;
      shard.values.copy_(stored_part(*source, shard));
    }
    model_->loaded();
  }

  [[nodiscard]] Value state_dict() override {
    Value::Dict local;
    for (const auto& shard : model_->local_shards()) {
      local.set(shard.name, Value(shard.values.detach()));
    }
    for (const auto& entry : model_->whole_tensors()) local.set(entry.key(), Value(entry.value()));
    return Value(std::move(local));
  }

  void load_state_dict(const Value& local) override {
    const auto& tensors = local.as_dict();
    const auto stored = [&](const std::string& name, at::IntArrayRef sizes) -> const at::Tensor& {
      const auto* value = tensors.get(name);
      if (value == nullptr || !value->is_tensor() || value->as_tensor().sizes() != sizes) {
        throw StateDictMismatch(
            str("The file of this process has another part of '", name,
                "'. Load it with as many processes and the same units as it was saved with, or "
                "save with SHARDED_STATE_DICT."));
      }
      return value->as_tensor();
    };
    const auto shards = model_->local_shards();
    const auto whole = model_->whole_tensors();
    for (const auto& shard : shards) (void)stored(shard.name, shard.values.sizes());
    for (const auto& entry : whole) (void)stored(entry.key(), entry.value().sizes());
    const at::NoGradGuard no_grad;
    for (const auto& shard : shards) {
      shard.values.copy_(stored(shard.name, shard.values.sizes()));
    }
    for (const auto& entry : whole) {
      entry.value().detach().copy_(stored(entry.key(), entry.value().sizes()));
    }
    model_->loaded();
  }

 private:
  void report_missing(const std::vector<std::string>& missing) const {
    if (missing.empty()) return;
    const auto text = str("Missing key(s) in the checkpoint: ", listed(missing), ".");
    if (strict_) throw StateDictMismatch(text + " Load the checkpoint of the same model.");
    warn(text + " They keep their values.");
  }

  static const std::string& first_name(const LocalShard& shard) {
    return shard.tied_to.empty() ? shard.name : shard.tied_to;
  }

  /// The tensor of each parameter by its first name: under this one, or another one that it has.
  static std::map<std::string, const Value*> sources_of(const std::vector<LocalShard>& shards,
                                                        const StoredNames& names) {
    std::map<std::string, const Value*> sources;
    for (const bool first : {true, false}) {
      for (const auto& shard : shards) {
        const auto* found = shard.tied_to.empty() == first ? names.find(shard.name) : nullptr;
        if (found != nullptr) sources.emplace(first_name(shard), found);
      }
    }
    return sources;
  }

  std::shared_ptr<ShardedModel> model_;
  bool strict_;
};

// ---- optimizers ---------------------------------------------------------------------------------

class OptimizerShards final : public ShardedState {
 public:
  OptimizerShards(std::shared_ptr<ShardedModel> model, std::shared_ptr<Stateful> optimizer,
                  std::vector<std::string> names)
      : model_(std::move(model)), optimizer_(std::move(optimizer)), names_(std::move(names)) {}

  [[nodiscard]] ShardedPart part() const override { return ShardedPart::kOptimizer; }
  [[nodiscard]] StateDictType state_dict_type() const override { return model_->state_dict_type(); }
  [[nodiscard]] bool has_deepspeed_names() const override { return model_->has_deepspeed_names(); }
  [[nodiscard]] Value state_dict() override { return optimizer_->state_dict(); }
  void load_state_dict(const Value& local) override { optimizer_->load_state_dict(local); }

  [[nodiscard]] ShardItems items() override {
    ShardItems items{.root = "optimizer"};
    const auto local = optimizer_->state_dict();
    const auto parameters = shards_by_name();
    for (const auto& [id, state] : local.at("state").as_dict()) {
      const auto& parameter = parameters.at(name_of(id));
      for (const auto& [key, value] : state.as_dict()) {
        add_state(items, parameter, key.to_string(), value);
      }
    }
    if (!is_first_process()) return items;
    auto groups = local.at("param_groups");
    for (auto& group : groups.as_list()) {
      for (auto& id : group.as_dict().at("params").as_list()) id = Value(name_of(id.as_int()));
    }
    items.values.as_dict().set("param_groups", std::move(groups));
    return items;
  }

  void load(const Value& stored) override {
    const auto own = optimizer_->state_dict();
    const auto parameters = shards_by_name();
    const auto states = states_by_name(stored);
    std::set<std::string> unused;
    for (const auto& [name, state] : states) unused.insert(name);
    Value::Dict loaded;
    for (std::size_t id = 0; id < names_.size(); ++id) {
      const auto found = states.find(names_[id]);
      if (found == states.end()) continue;  // it never had a gradient
      unused.erase(names_[id]);
      Value::Dict state;
      for (const auto& [key, value] : found->second->as_dict()) {
        state.set(key, local_state(parameters.at(names_[id]), key.to_string(), value));
      }
      loaded.set(id, Value(std::move(state)));
    }
    warn_of_unused({unused.begin(), unused.end()}, "states of parameters");
    optimizer_->load_state_dict(
        Value::Dict{{"state", std::move(loaded)},
                    {"param_groups", groups_of(stored, own.at("param_groups").as_list())}});
  }

 private:
  /// State that has an element for each element of the parameter. A counter of a parameter without
  /// dimensions looks alike.
  static bool is_elementwise(const std::string& key) { return key != "step"; }

  const std::string& name_of(const Value::Key& id) const { return name_of(id.as_int()); }
  [[nodiscard]] const std::string& name_of(std::int64_t id) const {
    return names_.at(static_cast<std::size_t>(id));
  }

  [[nodiscard]] std::map<std::string, LocalShard> shards_by_name() const {
    std::map<std::string, LocalShard> shards;
    for (auto& shard : model_->local_shards()) shards.emplace(shard.name, std::move(shard));
    // All processes have what is not sharded: the first one saves it.
    for (const auto& entry : model_->whole_tensors()) {
      const auto& tensor = entry.value();
      shards.emplace(entry.key(), LocalShard{.name = entry.key(),
                                             .sizes = tensor.sizes().vec(),
                                             .dtype = tensor.scalar_type(),
                                             .end = tensor.numel(),
                                             .values = tensor.detach(),
                                             .replica = !is_first_process()});
    }
    for (const auto& name : names_) {
      if (shards.contains(name)) continue;
      throw StateError(str("The optimizer has the parameter '", name,
                           "', of which the sharded model holds no part."));
    }
    return shards;
  }

  static void add_state(ShardItems& items, const LocalShard& parameter, const std::string& key,
                        const Value& value) {
    LocalShard shard{.name = parameter.name, .key = key, .replica = parameter.replica};
    if (value.is_tensor()) {
      const auto& tensor = value.as_tensor();
      shard.dtype = tensor.scalar_type();
      shard.values = tensor.detach().reshape({-1});
      if (is_elementwise(key) && tensor.sizes() == parameter.values.sizes()) {
        shard.sizes = parameter.sizes;
        shard.begin = parameter.begin;
        shard.end = parameter.end;
        shard.boxes = parameter.boxes;
        items.shards.push_back(std::move(shard));
        return;
      }
      shard.sizes = tensor.sizes().vec();
      shard.end = tensor.numel();
    }
    // What is no shard all processes have: the one with the first element saves it.
    const bool saves = element_count(parameter.sizes) == 0
                           ? is_first_process()
                           : parameter.has_first() && !parameter.replica;
    if (!saves) return;
    if (value.is_tensor()) {
      items.shards.push_back(std::move(shard));
      return;
    }
    auto& states = items.values.as_dict()["state"];
    if (states.is_none()) states = Value(Value::Dict());
    auto& state = states.as_dict()[parameter.name];
    if (state.is_none()) state = Value(Value::Dict());
    state.as_dict().set(key, value);
  }

  static Value local_state(const LocalShard& parameter, const std::string& key,
                           const Value& value) {
    if (!is_stored_tensor(value)) return value;
    if (!is_elementwise(key) || stored_sizes(value) != parameter.sizes) {
      return Value(stored_whole(value));
    }
    return Value(stored_part(value, parameter));
  }

  /// States in a checkpoint, which are by name, or by number in one of a run that did not shard.
  [[nodiscard]] std::map<std::string, const Value*> states_by_name(const Value& stored) const {
    std::map<std::string, const Value*> states;
    if (!stored.is_dict()) {
      throw StateDictMismatch(str("The checkpoint holds a value of kind ", stored.kind_name(),
                                  " and not the state of an optimizer."));
    }
    const auto* all = stored.as_dict().get("state");  // none before the first step
    if (all == nullptr || all->is_none()) return states;
    for (const auto& [key, state] : all->as_dict()) {
      if (!key.is_int()) {
        states.emplace(plain_name(key.to_string()), &state);
      } else if (key.as_int() >= 0 && key.as_int() < std::ssize(names_)) {
        states.emplace(name_of(key), &state);
      }
    }
    return states;
  }

  /// The groups of the checkpoint with the numbers of the own parameters.
  [[nodiscard]] Value groups_of(const Value& stored, const Value::List& own) const {
    const auto& groups = stored.at("param_groups").as_list();
    if (groups.size() != own.size()) {
      throw StateDictMismatch(
          str("loaded state dict has a different number of parameter groups: ", groups.size(),
              " in the checkpoint and ", own.size(), " in the optimizer."));
    }
    Value::List result;
    for (std::size_t g = 0; g < own.size(); ++g) {
      const auto& ids = own[g].at("params").as_list();
      check_group(g, groups[g].at("params").as_list(), ids);
      auto group = groups[g];
      group.as_dict().set("params", Value(ids));
      result.push_back(std::move(group));
    }
    return Value(std::move(result));
  }

  void check_group(std::size_t g, const Value::List& stored, const Value::List& ids) const {
    std::vector<std::string> missing;
    std::set<std::string> names;
    for (const auto& one : stored) {
      names.insert(one.is_int() ? name_of(one.as_int()) : plain_name(one.as_string()));
    }
    for (const auto& id : ids) {
      if (!names.contains(name_of(id.as_int()))) missing.push_back(name_of(id.as_int()));
    }
    if (missing.empty() && stored.size() == ids.size()) return;
    throw StateDictMismatch(
        str("loaded state dict contains a parameter group that doesn't match the size of ",
            "optimizer's group: group ", g, " has ", stored.size(), " parameters and not ",
            ids.size(), missing.empty() ? "" : str("; it lacks ", listed(missing)), "."));
  }

  std::shared_ptr<ShardedModel> model_;
  std::shared_ptr<Stateful> optimizer_;
  std::vector<std::string> names_;
};

// ---- files --------------------------------------------------------------------------------------

StateDictType type_of(const ShardedState& state, const ShardedFileOptions& options) {
  return options.type.value_or(state.state_dict_type());
}

/// The name of the file of this process, if the state is in such files. LOCAL_STATE_DICT has no
/// form for optimizers.
std::optional<std::string> local_name(const ShardedState& state,
                                      const ShardedFileOptions& options) {
  const auto type = type_of(state, options);
  const bool is_sharded = type == StateDictType::kShardedStateDict;
  const bool is_local =
      type == StateDictType::kLocalStateDict && state.part() == ShardedPart::kModel;
  if (!is_local && (!is_sharded || options.use_dcp)) return std::nullopt;
  return local_file_name(state.part(), options.index, PartialState().process_index(),
                         /*first_has_number=*/is_sharded);
}

bool is_dcp_folder(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / formats::kDcpMetadataName, error);
}

/// What of a whole state is written; models in the order of their tensors.
StateContent full_content(const ShardItems& items, Value state) {
  if (items.root != "model") return state;
  StateDict tensors("Tensor");
  for (const auto& shard : items.shards)
    tensors.insert(shard.name, state.at(shard.name).as_tensor());
  for (const auto& [key, value] : items.values.as_dict()) {
    tensors.insert(key.to_string(), value.as_tensor());
  }
  return tensors;
}

}  // namespace

std::shared_ptr<ShardedState> sharded_state(std::shared_ptr<ShardedModel> model, bool strict) {
  return std::make_shared<ModelShards>(std::move(model), strict);
}

std::shared_ptr<ShardedState> sharded_optimizer_state(std::shared_ptr<ShardedModel> model,
                                                      std::shared_ptr<Stateful> optimizer,
                                                      std::vector<std::string> names) {
  return std::make_shared<OptimizerShards>(std::move(model), std::move(optimizer),
                                           std::move(names));
}

std::vector<StateFile> sharded_files(ShardedState& state, const ShardedFileOptions& options,
                                     const Exchange& exchange) {
  if (const auto name = local_name(state, options)) {
    return {{.name = *name, .content = state.state_dict()}};
  }
  auto items = state.items();
  if (type_of(state, options) == StateDictType::kFullStateDict) {
    auto whole = gathered_state(items, exchange);
    if (!is_first_process()) return {};
    return {{.name = full_file_name(state.part(), options.index),
             .content = full_content(items, std::move(whole))}};
  }
  const auto rank = PartialState().process_index();
  if (!state.has_deepspeed_names() || options.type) {
    return {{.name = str(sharded_folder_name(state.part(), options.index), "/",
                         formats::dcp_file_name(rank)),
             .content = std::move(items)}};
  }
  // Both parts are in one folder, in files of their own.
  const bool is_model = state.part() == ShardedPart::kModel;
  const auto folder = deepspeed_folder_name(options.index);
  std::vector<StateFile> files{
      {.name = str(folder, "/", formats::dcp_file_name(rank, is_model ? 0 : 1)),
       .content = std::move(items)}};
  if (is_model && is_first_process()) files.push_back({.name = "latest", .content = folder});
  return files;
}

void save_sharded_files(ShardedState& state, const fs::path& folder,
                        const ShardedFileOptions& options, const char* operation,
                        std::source_location where) {
  const auto exchange = exchange_by_collective(operation, where);
  SaveJob job({.folder = folder, .manifest = false}, {});
  job.open(exchange);
  exchange([&] {
    job.add(sharded_files(state, options, exchange));
    return std::string();
  });
  job.run(exchange, /*buffers=*/nullptr);
}

void load_sharded_files(ShardedState& state, const fs::path& folder,
                        const ShardedFileOptions& options) {
  if (const auto name = local_name(state, options)) {
    return state.load_state_dict(torch_load(folder / *name, {.mmap = true}));
  }
  const bool is_model = state.part() == ShardedPart::kModel;
  const auto shards = sharded_folder_name(state.part(), options.index);
  const auto full = full_file_name(state.part(), options.index);
  std::vector<std::string> names{shards, full};
  if (type_of(state, options) == StateDictType::kFullStateDict) std::swap(names[0], names[1]);
  const auto deepspeed = deepspeed_folder_name(options.index);
  if (!is_model && is_dcp_folder(folder / deepspeed)) names.push_back(deepspeed);
  for (const auto& name : is_model ? weights_names(options.index) : std::vector<std::string>()) {
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  // The name of the folder itself, not of one above it, in which the same words may occur.
  const auto named = folder.has_filename() ? folder : folder.parent_path();
  const auto path = named.filename() == shards ? named : first_in(folder, names);
  if (path.empty() && !is_model && is_from_deepspeed(folder)) {
    return warn(str("The state of optimizer ", options.index, " is not read from '",
                    folder.string(), "', a checkpoint of DeepSpeed. It begins anew."));
  }
  if (path.empty()) {
    throw CheckpointError(str("'", folder.string(), "' has no ", is_model ? "model " : "optimizer ",
                              options.index, ": none of ", join(names), " is there."),
                          folder);
  }
  info(str("Loading ", is_model ? "model" : "optimizer", " from ", path.string()));
  const auto stored = open_stored_state(path);
  // A folder with both parts has them below their keys.
  const auto* part =
      stored.is_dict() ? stored.as_dict().get(is_model ? "model" : "optimizer") : nullptr;
  state.load(part != nullptr && part->is_dict() ? *part : stored);
}

std::vector<std::string> weights_names(std::size_t index) {
  return {weights_file_name(index, /*safe_serialization=*/true),
          weights_file_name(index, /*safe_serialization=*/false),
          sharded_folder_name(ShardedPart::kModel, index),
          full_file_name(ShardedPart::kModel, index), deepspeed_folder_name(index)};
}

fs::path first_in(const fs::path& folder, const std::vector<std::string>& names) {
  std::error_code error;
  for (const auto& name : names) {
    if (fs::exists(folder / name, error)) return folder / name;
  }
  return {};
}

bool is_from_deepspeed(const fs::path& folder) {
  return formats::find_zero_folder(folder).has_value();
}

}  // namespace accelerate::detail::checkpoint
