#include "sharding/flat_unit.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "core/text.h"
#include "lazy/released_storage.h"
#include "modeling/tensors.h"

namespace accelerate::detail::sharding {
namespace {

constexpr std::size_t kSlotAlignment = 512;

at::ScalarType compute_dtype(const at::Tensor& parameter, const ShardSpec& spec) {
  const auto own = parameter.scalar_type();
  return at::isFloatingType(own) ? spec.precision.param_dtype.value_or(own) : own;
}

std::string released_text(const std::string& name, std::int64_t processes) {
  return str("The parameter '", name, "' is sharded over ", processes,
             " processes, and is whole only inside of model(...), backward and "
             "gathered_parameters. Use it there; save the model by its state_dict().");
}

std::string token_text(const std::string& name) {
  return str("The gradient of the parameter '", name,
             "' is sharded: each process has its part. Clip with clip_grad_norm_ of the "
             "accelerator, and step with a prepared optimizer.");
}

/// A tensor of a shape whose bytes throw `message`.
at::Tensor without_bytes(c10::IntArrayRef sizes, at::ScalarType dtype, c10::Device device,
                         const std::string& message) {
  const at::AutoDispatchBelowADInplaceOrView below;
  auto data = at::empty({0}, at::TensorOptions(dtype).device(device));
  const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * data.element_size();
  const auto storage = lazy::make_empty_storage(bytes, device);
  data.set_(c10::Storage(storage), 0, sizes, {});
  lazy::forbid(*storage, message);
  return data;
}

at::Tensor local_slice(const Flat& flat, std::size_t i, std::int64_t rank) {
  const auto& slice = flat.slices[i];
  // Detached: `Optimizer::zero_grad` refuses views.
  const auto at = flat.layout.place(i, rank);
  const auto part = slice.part.size() == 0 ? at::empty({0}, flat.shard.options())
                                           : flat.shard.narrow(0, at, slice.part.size());
  return part.detach().set_requires_grad(flat.is_trained);
}

}  // namespace

std::size_t Flat::leaf_count() const {
  std::size_t count = 0;
  for (const auto& slice : slices) count += slice.leaves.size();
  return count;
}

std::size_t Flat::whole_bytes() const {
  return static_cast<std::size_t>(layout.padded_size()) * c10::elementSize(compute_dtype);
}

std::unique_ptr<Unit> make_unit(PlannedUnit plan, const ShardSpec& spec, const Placement& placement,
                                std::size_t first_index) {
  auto unit = std::make_unique<Unit>();
  unit->name = std::move(plan.name);
  unit->stays = unit->name.empty() || !spec.reshard_after_forward;

  // Trained or not, resident or not, and types.
  using Kind = std::tuple<bool, bool, at::ScalarType, at::ScalarType>;
  std::map<Kind, std::vector<PlannedParameter>> kinds;
  for (auto& parameter : plan.parameters) {
    const auto& tensor = parameter.tensor();
    const bool resident =
        spec.level != ShardLevel::kParameters || tensor.numel() < spec.keep_gathered_below;
    kinds[{!tensor.requires_grad(), resident, tensor.scalar_type(), compute_dtype(tensor, spec)}]
        .push_back(std::move(parameter));
  }
  for (auto& [kind, parameters] : kinds) {
    auto flat = std::make_unique<Flat>();
    flat->index = first_index++;
    flat->is_trained = !std::get<0>(kind);
    flat->is_resident = std::get<1>(kind);
    flat->compute_dtype = std::get<3>(kind);
    flat->reduce_dtype = spec.precision.reduce_dtype.value_or(flat->compute_dtype);
    std::vector<std::int64_t> sizes;
    for (auto& parameter : parameters) {
      FlatSlice slice;
      slice.names = std::move(parameter.names);
      slice.sizes = parameter.tensor().sizes().vec();
      slice.size = parameter.tensor().numel();
      for (auto& leaf : parameter.leaves) slice.leaves.push_back({.tensor = std::move(leaf)});
      sizes.push_back(slice.size);
      flat->slices.push_back(std::move(slice));
    }
    flat->layout = FlatLayout(sizes, placement.processes);
    for (std::size_t i = 0; i < flat->slices.size(); ++i) {
      flat->slices[i].offset = flat->layout.offset(i);
      flat->slices[i].part = flat->layout.part(i, placement.rank);
    }
    if (!flat->is_resident) {
      flat->slot_offset = unit->slot_bytes;
      unit->slot_bytes += (flat->whole_bytes() + kSlotAlignment - 1) & ~(kSlotAlignment - 1);
    }
    unit->flats.push_back(std::move(flat));
  }
  return unit;
}

at::ScalarType master_dtype(const Flat& flat, const ShardSpec& spec) {
  const auto own = flat.slices.front().leaves.front().tensor.scalar_type();
  const bool raised = spec.precision.float32_masters && flat.is_trained && at::isFloatingType(own);
  return raised ? at::kFloat : own;
}

at::Tensor flatten(const Flat& flat, at::ScalarType dtype, c10::Device device) {
  auto whole = at::zeros({flat.layout.padded_size()}, at::TensorOptions(dtype).device(device));
  for (const auto& slice : flat.slices) {
    const auto& tensor = slice.leaves.front().tensor;
    if (tensor.is_meta()) continue;
    whole.narrow(0, slice.offset, slice.size).view(slice.sizes).copy_(tensor.detach());
  }
  return whole;
}

void take_over(Flat& flat, const Placement& placement) {
  for (std::size_t i = 0; i < flat.slices.size(); ++i) {
    auto& slice = flat.slices[i];
    slice.local = local_slice(flat, i, placement.rank);
    at::Tensor data;
    if (flat.is_resident) {
      data = flat.whole.narrow(0, slice.offset, slice.size).view(slice.sizes);
    } else {
      data = without_bytes(slice.sizes, flat.compute_dtype, placement.device,
                           released_text(slice.name(), placement.processes));
      slice.storage = data.storage().getWeakStorageImpl().lock();
    }
    if (flat.is_trained) {
      slice.token = without_bytes(slice.sizes, flat.compute_dtype, placement.device,
                                  token_text(slice.name()));
    }
    for (auto& leaf : slice.leaves) {
      leaf.tensor.mutable_grad().reset();
      modeling::replace_data(leaf.tensor, data, slice.name());
      // After the data, which takes the mark off.
      if (!flat.is_resident) lazy::mark(*leaf.tensor.unsafeGetTensorImpl());
    }
  }
}

at::Tensor memory_of(const lazy::Slot& slot, const Flat& flat) {
  return slot.memory
      .narrow(0, static_cast<std::int64_t>(flat.slot_offset),
              static_cast<std::int64_t>(flat.whole_bytes()))
      .view(flat.compute_dtype);
}

void allow_leaves(const Flat& flat, const lazy::Slot& slot) {
  auto* const begin = static_cast<std::byte*>(slot.memory.mutable_data_ptr()) + flat.slot_offset;
  const auto element = c10::elementSize(flat.compute_dtype);
  for (const auto& slice : flat.slices) {
    auto* const bytes = begin + static_cast<std::size_t>(slice.offset) * element;
    lazy::allow(*slice.storage, c10::DataPtr(bytes, slice.storage->device()));
  }
}

void forbid_leaves(const Flat& flat, std::int64_t processes) {
  for (const auto& slice : flat.slices) {
    lazy::forbid(*slice.storage, released_text(slice.name(), processes));
  }
}

}  // namespace accelerate::detail::sharding
