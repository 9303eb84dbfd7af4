// A model is taken over: its parameters become shards.
#include "sharding/sharded_state.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/logging/name_collectives.h"
#include "comm/sharded.h"
#include "core/log.h"
#include "core/text.h"
#include "lazy/released_storage.h"
#include "modeling/tensors.h"
#include "parallel/same_model.h"
#include "parallel/sparse_average.h"
#include "state/pending_messages.h"

namespace accelerate::detail::sharding {
namespace {

/// What the trigger knows of a parameter.
class SliceStorage final : public lazy::ManagedStorage {
 public:
  SliceStorage(ShardedState& state, Unit& unit, FlatSlice& slice, c10::Device device)
      : state_(state), unit_(unit), slice_(slice), device_(device) {}

  void pin(lazy::Access access) override { state_.pin(unit_, slice_, access); }
  void unpin() noexcept override { state_.unpin(unit_); }
  [[nodiscard]] c10::Device device() const override { return device_; }

 private:
  ShardedState& state_;
  Unit& unit_;
  FlatSlice& slice_;
  c10::Device device_;
};

void check_spec(const ShardSpec& spec) {
  if (spec.level == ShardLevel::kNone) {
    throw ArgumentError("prepare: level kNone shards nothing. Use data parallelism.");
  }
}

void check_module(const torch::nn::Module& module, const UnitPlan& plan) {
  const auto sparse = parallel::sparse_weights(module);
  for (const auto& unit : plan.units) {
    for (const auto& parameter : unit.parameters) {
      for (const auto& leaf : parameter.leaves) {
        if (modeling::is_marked(leaf)) {
          throw StateError(
              str("prepare: the parameter '", parameter.names.front(),
                  "' is sharded or offloaded already. Prepare the model once; to prepare it again, "
                  "build it anew and load its state_dict()."));
        }
        const auto same = [&](const at::Tensor& one) { return one.is_same(leaf); };
        if (std::ranges::none_of(sparse, same)) continue;
        throw UnsupportedError(
            str("prepare: the gradient of '", parameter.names.front(),
                "' is sparse, which a sharded model does not support. Make its Embedding with "
                "sparse(false), or ignore its module."));
      }
    }
  }
}

/// What all processes must have alike, line by line.
std::vector<std::string> facts_of(const UnitPlan& plan) {
  std::vector<std::string> facts;
  const auto add = [&](const std::string& unit, const PlannedParameter& parameter) {
    const auto& tensor = parameter.tensor();
    facts.push_back(parallel::described(
        str(tensor.requires_grad() ? "" : "the frozen ", join(parameter.names, " = ")), tensor,
        unit));
  };
  for (const auto& unit : plan.units) {
    for (const auto& parameter : unit.parameters) add(unit.name, parameter);
  }
  for (const auto& parameter : plan.whole) add("none", parameter);
  return facts;
}

/// Calls `init_empty` for modules that own parameters on the meta device.
void initialize(torch::nn::Module& module, const ShardSpec& spec) {
  if (!spec.init_empty) return;
  for (const auto& one : module.modules()) {
    const auto own = one->parameters(/*recurse=*/false);
    const auto is_meta = [](const at::Tensor& tensor) { return tensor.is_meta(); };
    if (std::ranges::any_of(own, is_meta)) spec.init_empty(*one);
  }
}

/// Of the first process, whose values all processes get.
void warn_of_missing_values(const UnitPlan& plan) {
  std::vector<std::string> names;
  for (const auto& unit : plan.units) {
    for (const auto& parameter : unit.parameters) {
      if (parameter.tensor().is_meta()) names.push_back(parameter.names.front());
    }
  }
  if (names.empty()) return;
  warn_once(str("prepare: ", names.size(), " parameters are on the meta device of the first ",
                "process, so that they begin as zeros: ", join(names),
                ". Build or load the model before prepare on that process, give the FSDP plugin a ",
                "param_init_fn, or load a checkpoint afterwards."));
}

Placement placement_of(const ShardSpec& spec, const ShardProcesses& groups, c10::Device device) {
  const auto& offload = spec.offload;
  const bool on_host =
      offload.parameters != OffloadTarget::kNone || offload.optimizer != OffloadTarget::kNone;
  // As tensors say it: "cpu", not "cpu:0".
  return {.device = at::empty({0}, at::TensorOptions().device(device)).device(),
          .masters_on_host = on_host,
          .pin_memory = on_host && offload.pin_memory && !device.is_cpu(),
          .processes = groups.shards(),
          .rank = groups.rank()};
}

struct Living {
  std::mutex mutex;
  std::vector<ShardedState*> states;
};

Living& living() {
  static auto& instance = *new Living;  // never destroyed: models may be static too
  return instance;
}

/// Whether this process has a part of the parameter only.
bool is_part(const at::Tensor& parameter) {
  return std::ranges::any_of(living_states(), [&](const ShardedState* state) {
    const auto* const place = state->find_leaf(parameter);
    return place != nullptr && !place->flat->is_resident;
  });
}

/// Collective. Completes the forwards that a member function of a model has begun.
void finish_forwards() {
  for (auto* state : living_states()) {
    const std::scoped_lock lock(state->mutex);
    const bool is_inside = state->forward_depth > 0 || state->in_backward;
    if (state->tape != nullptr && !is_inside) state->finish_forward();
  }
}

}  // namespace

std::vector<ShardedState*> living_states() {
  const std::scoped_lock lock(living().mutex);
  return living().states;
}

ShardedState::ShardedState(torch::nn::Module& net, ShardSpec wanted, ShardProcesses groups,
                           c10::Device device, std::int64_t drift_check)
    : module(net),
      spec(std::move(wanted)),
      placement(placement_of(spec, groups, device)),
      collectives(std::move(groups), device, spec.divide_before),
      ring(device) {
  const auto named = name_collectives("prepare");
  const at::NoGradGuard no_grad;
  check_spec(spec);
  const auto& offload = spec.offload;
  if (offload.parameters == OffloadTarget::kNvme || offload.optimizer == OffloadTarget::kNvme) {
    swap = std::make_unique<SwapFiles>(offload.folder);
    if (!offload.states_folder.empty() && offload.states_folder != offload.folder) {
      own_states_swap = std::make_unique<SwapFiles>(offload.states_folder);
    }
  }
  // Before the plan, which holds tensors that it may replace.
  if (collectives.is_first()) initialize(net, spec);
  registered = net.parameters();
  auto plan = plan_units(net, spec);
  check_module(net, plan);
  if (collectives.is_first()) warn_of_missing_values(plan);
  if (const auto& all = collectives.groups().all) parallel::check_same_model(facts_of(plan), all);
  whole = std::move(plan.whole);
  take_buffers(net);

  std::size_t largest = 0;
  for (auto& planned : plan.units) {
    units.push_back(make_unit(std::move(planned), spec, placement, flats.size()));
    auto& unit = *units.back();
    unit.index = units.size() - 1;
    for (const auto& flat : unit.flats) {
      flat->unit = unit.index;
      flats.push_back(flat.get());
      take_values(unit, *flat);
    }
    has_lazy_units = has_lazy_units || unit.comes_and_goes();
    if (!unit.stays) largest = std::max(largest, unit.slot_bytes);
  }
  const auto ahead = std::max(spec.forward_prefetch, spec.backward_prefetch);
  ring.resize(largest, 1 + static_cast<std::size_t>(ahead));
  for (const auto& entry : accelerate::state_dict(net)) {
    const auto* const place = find_leaf(entry.value());
    names.emplace_back(entry.key(), place);
    if (place == nullptr) whole_tensors.insert(entry.key(), entry.value());
  }
  install_hooks();
  if (collectives.groups().replicate && drift_check > 0) {
    parallel::Parameters shards;
    for (const auto* flat : flats) shards.add(units[flat->unit]->title(), flat->shard);
    drift = std::make_unique<parallel::DriftWatch>(std::move(shards),
                                                   collectives.groups().replicate, drift_check);
  }
  comm::set_shard_test(&is_part);
  state::set_send_pending(&finish_forwards);
  const std::scoped_lock lock(living().mutex);
  living().states.push_back(this);
}

ShardedState::~ShardedState() {
  {
    const std::scoped_lock lock(living().mutex);
    std::erase(living().states, this);
  }
  remove_hooks();
  for (const auto* flat : flats) {
    for (const auto& slice : flat->slices) {
      if (!slice.storage) continue;
      lazy::forget_storage(*slice.storage);
      lazy::forbid(*slice.storage, str("The parameter '", slice.name(),
                                       "' was sharded, and its model is no longer prepared."));
    }
  }
}

at::Tensor ShardedState::at_home(const at::Tensor& shard) const {
  if (swap) return swap->place(shard);
  if (!placement.masters_on_host || shard.is_cpu()) return shard;
  const auto on_host = shard.cpu();
  return placement.pin_memory ? on_host.pin_memory() : on_host;
}

void ShardedState::take_values(Unit& unit, Flat& flat) {
  const auto dtype = master_dtype(flat, spec);
  const auto size = flat.layout.shard_size();
  at::Tensor all;
  if (collectives.is_first()) all = flatten(flat, dtype, placement.device);
  if (flat.is_resident) {
    const auto options = at::TensorOptions(dtype).device(placement.device);
    if (!all.defined()) all = at::empty({flat.layout.padded_size()}, options);
    collectives.broadcast("prepare " + unit.title(), all, 0);
    flat.whole = all.to(flat.compute_dtype);
    const auto part = all.narrow(0, placement.rank * size, size);
    // The same memory if the types are the same.
    const bool is_copy = !flat.whole.is_alias_of(all);
    flat.shard = at_home(is_copy ? part.clone() : part);
  } else {
    auto part = at::empty({size}, at::TensorOptions(dtype).device(placement.device));
    collectives.scatter_from_first(unit.title(), all, part);
    flat.shard = at_home(part);
  }
  take_over(flat, placement);
  flat.sent_version = flat.shard._version();
  for (std::size_t i = 0; i < flat.slices.size(); ++i) {
    auto& slice = flat.slices[i];
    const SlicePlace place{.unit = &unit, .flat = &flat, .index = i};
    by_local.emplace(slice.local.unsafeGetTensorImpl(), place);
    for (const auto& leaf : slice.leaves) {
      by_leaf.emplace(leaf.tensor.unsafeGetTensorImpl(), place);
    }
    if (!slice.storage) continue;
    lazy::manage_storage(*slice.storage,
                         std::make_shared<SliceStorage>(*this, unit, slice, placement.device));
  }
}

/// Buffers, and parameters that are not sharded: on the device, with the values of the first
/// process.
void ShardedState::take_buffers(torch::nn::Module& module) {
  const auto take = [&](const at::Tensor& tensor, const std::string& name, bool casts) {
    const auto dtype = casts && tensor.is_floating_point()
                           ? spec.precision.buffer_dtype.value_or(tensor.scalar_type())
                           : tensor.scalar_type();
    const auto options = at::TensorOptions(dtype).device(placement.device);
    const auto data = tensor.is_meta() ? at::zeros(tensor.sizes(), options)
                                       : tensor.detach().to(options).contiguous();
    if (data.numel() > 0) collectives.broadcast("prepare " + name, data, 0);
    modeling::replace_data(tensor, data, name);
  };
  for (const auto& parameter : whole) {
    for (const auto& leaf : parameter.leaves) take(leaf, parameter.names.front(), false);
  }
  for (const auto& entry : module.named_buffers()) {
    if (entry.value().defined()) take(entry.value(), entry.key(), true);
  }
}

void ShardedState::check_leaves() const {
  const auto now = module.parameters();
  const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (!std::ranges::equal(now, registered, same)) {
    throw StateError(
        "The module has other parameters than when it was sharded: one was registered or replaced "
        "by another tensor, which is not trained. Change the module before prepare.");
  }
  for (const auto* flat : flats) {
    for (const auto& slice : flat->slices) {
      for (const auto& leaf : slice.leaves) {
        const auto& storage = *leaf.tensor.storage().unsafeGetStorageImpl();
        const bool is_here =
            flat->is_resident ? leaf.tensor.is_alias_of(flat->whole)
                              : &storage == slice.storage.get() && modeling::is_marked(leaf.tensor);
        if (!is_here || leaf.tensor.scalar_type() != flat->compute_dtype) {
          throw StateError(
              str("The parameter '", slice.name(),
                  "' was given other data after its model was sharded, by net->to(...) or "
                  "set_data: it is no longer trained. Move and convert a model before prepare."));
        }
        if (leaf.tensor.requires_grad() != flat->is_trained) {
          throw StateError(str("The parameter '", slice.name(), "' was ",
                               flat->is_trained ? "frozen" : "unfrozen",
                               " after its model was sharded, which does not change what is "
                               "trained. Call requires_grad_ before prepare."));
        }
      }
    }
  }
}

const SlicePlace* ShardedState::find_leaf(const at::Tensor& tensor) const {
  const auto found = by_leaf.find(tensor.unsafeGetTensorImpl());
  return found == by_leaf.end() ? nullptr : &found->second;
}

const SlicePlace* ShardedState::find_local(const at::Tensor& tensor) const {
  const auto found = by_local.find(tensor.unsafeGetTensorImpl());
  return found == by_local.end() ? nullptr : &found->second;
}

}  // namespace accelerate::detail::sharding
