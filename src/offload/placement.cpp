#include "offload/placement.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "lazy/released_storage.h"
#include "modeling/outline.h"
#include "modeling/stand_in.h"
#include "modeling/tensors.h"
#include "offload/lazy_engine.h"

namespace accelerate::detail::offload {
namespace {

using torch::nn::Module;

std::string join_names(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// Tensors that share a storage share it on `device`, too.
void move_together(const std::vector<NamedTensor>& tensors, c10::Device device) {
  const at::NoGradGuard no_grad;
  const auto& [name, first] = tensors.front();
  if (tensors.size() == 1) {
    modeling::replace_data(first, first.detach().to(device), name);
    return;
  }
  const auto size = static_cast<std::int64_t>(first.storage().nbytes());
  const auto moved = at::empty({0}, first.options().dtype(at::kByte).requires_grad(false))
                         .set_(first.storage(), 0, {size}, {1})
                         .to(device);
  const auto storage =
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(moved.storage().unsafeGetStorageImpl());
  for (const auto& named : tensors) lazy::rebind(named.tensor, storage, named.name);
}

class Placer {
 public:
  Placer(Module& model, const PlacementOptions& options, LazyParams& engine)
      : options_(options), engine_(engine) {
    collect_ties(model);
    walk("", model, nullptr);
  }

 private:
  /// Tensors that share a storage, with all their names. They move together, to the place of the
  /// first.
  struct Tied {
    std::vector<NamedTensor> tensors;
    bool is_placed = false;
    bool is_buffer = false;
    /// Of a packed weight: `tensors` are what it is kept in.
    std::shared_ptr<modeling::StandIn> stand_in = nullptr;
  };
  struct Item {
    Tied* tied = nullptr;
    Place place;
  };

  void collect_ties(Module& model) {
    std::unordered_map<const c10::StorageImpl*, Tied*> by_storage;
    const auto take = [&](const auto& tensors, bool buffers) {
      for (const auto& item : tensors) {
        const auto& tensor = item.value();
        if (!tensor.defined()) continue;
        Tied* tied = nullptr;
        if (auto stand_in = modeling::find_stand_in(tensor)) {
          tied = ties_.emplace_back(std::make_unique<Tied>()).get();
          for (const auto& part : stand_in->placed(item.key())) {
            tied->tensors.push_back({part.key(), part.value()});
            by_name_.emplace(part.key(), std::make_pair(part.value(), tied));
          }
          tied->stand_in = std::move(stand_in);
          by_name_.insert_or_assign(
              item.key(),
              std::make_pair(tied->tensors.empty() ? tensor : tied->tensors.front().tensor, tied));
          continue;
        }
        if (tensor.has_storage()) {
          auto& known = by_storage[tensor.storage().unsafeGetStorageImpl()];
          if (known == nullptr) known = ties_.emplace_back(std::make_unique<Tied>()).get();
          tied = known;
        } else {
          tied = ties_.emplace_back(std::make_unique<Tied>()).get();
        }
        tied->is_buffer = buffers;
        tied->tensors.push_back({item.key(), tensor});
        by_name_.emplace(item.key(), std::make_pair(tensor, tied));
      }
    };
    take(model.named_parameters(), /*buffers=*/false);
    take(model.named_buffers(), /*buffers=*/true);
  }

  void walk(const std::string& name, Module& module, std::vector<Item>* block) {
    std::vector<Item> own;
    auto& items = block != nullptr ? *block : own;
    const auto take = [&](const auto& tensors, bool offloadable) {
      for (const auto& item : tensors) {
        if (!item.value().defined()) continue;
        const auto full = join_names(name, item.key());
        auto place = options_.place_of(full);
        if (!offloadable || (place.keep == Keep::kOnDisk && !can_be_on_disk(full, item.value()))) {
          place.keep = Keep::kResident;
        }
        items.push_back({by_name_.at(full).second, place});
      }
    };
    take(module.named_parameters(/*recurse=*/false), true);
    take(module.named_buffers(/*recurse=*/false), options_.offload_buffers);
    const bool is_block =
        block == nullptr && modeling::has_class(module, options_.preload_module_classes);
    if (block == nullptr && !is_block) put(name, items);
    for (const auto& child : module.named_children()) {
      walk(join_names(name, child.key()), *child.value(),
           block != nullptr || is_block ? &items : nullptr);
    }
    if (is_block) put(name, items);
  }

  bool can_be_on_disk(const std::string& name, const at::Tensor& tensor) const {
    // Folders are written from state dicts, which have no buffers of this kind.
    if (modeling::is_non_persistent(tensor)) return false;
    return options_.writable || !is_running_statistic(name);
  }

  static bool can_be_managed(const Tied& tied) {
    return !tied.tensors.empty() &&
           std::ranges::all_of(tied.tensors, offload::can_be_managed, &NamedTensor::tensor);
  }

  /// What cannot be managed stays on the device where it computes.
  void put(const std::string& name, const std::vector<Item>& items) {
    for (const auto keep : {Keep::kInHostMemory, Keep::kOnDisk}) {
      std::vector<NamedTensor> tensors;
      std::vector<std::pair<const Tied*, c10::Device>> behind;  // where it was
      auto device = c10::Device(c10::kCPU);
      for (const auto& [tied, place] : items) {
        if (place.keep != keep || tied->is_placed || !can_be_managed(*tied)) continue;
        tied->is_placed = true;
        tensors.insert(tensors.end(), tied->tensors.begin(), tied->tensors.end());
        device = place.device;
        // The parameter reports where it computes.
        if (tied->stand_in != nullptr) behind.emplace_back(tied, device_of(*tied));
      }
      engine_.manage(name, tensors, device,
                     [&](const GroupPlan& plan) { return make_store(plan, keep, device); });
      for (const auto& [tied, before] : behind) move_packed(*tied, before, device);
    }
    for (const auto& [tied, place] : items) {
      if (!std::exchange(tied->is_placed, true)) move(*tied, place.device);
    }
  }

  std::unique_ptr<Store> make_store(const GroupPlan& plan, Keep keep, c10::Device device) {
    if (keep == Keep::kOnDisk) {
      return make_file_store(plan, options_.ranges,
                             {.device = device, .writable = options_.writable});
    }
    return make_host_store(
        plan,
        [this](const std::string& name) {
          const auto* value = options_.values != nullptr ? options_.values->find(name) : nullptr;
          return value != nullptr ? *value : by_name_.at(name).first;
        },
        *options_.pinned);
  }

  void move(const Tied& tied, c10::Device device) {
    if (tied.stand_in != nullptr) return move_packed(tied, device_of(tied), device);
    const auto& [name, first] = tied.tensors.front();
    if (first.is_meta() && first.numel() > 0) {
      throw StateError(str("'", name,
                           "' has no value: it is on the meta device. Load a checkpoint first, or "
                           "use load_checkpoint_and_dispatch.",
                           tied.is_buffer
                               ? " A buffer that is made by torch::empty, rand or "
                                 "normal in init_empty_weights loses its values: make it "
                                 "by torch::full, zeros or arange."
                               : ""));
    }
    const at::NoGradGuard no_grad;
    if (first.is_meta()) {
      for (const auto& [alias, tensor] : tied.tensors) {
        modeling::replace_data(tensor, at::empty_like(tensor, tensor.options().device(device)),
                               alias);
      }
    } else if (const auto before = first.device(); before != device) {
      move_together(tied.tensors, device);
      move_back_later(tied.tensors, before, device);
    }
    if (options_.several_devices) engine_.manage_resident(tied.tensors);
  }

  void move_back_later(const std::vector<NamedTensor>& tensors, c10::Device before,
                       c10::Device device) {
    if (device.is_meta()) return;  // as a second device in tests: it has no values
    std::vector<Alias> moved;
    for (const auto& [name, tensor] : tensors) {
      moved.push_back({name, c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr())});
    }
    engine_.undo_with([moved = std::move(moved), before, device] {
      std::vector<NamedTensor> living;
      for (const auto& alias : moved) {
        auto tensor = alias.tensor.lock();
        if (!tensor || tensor->device() != device) continue;  // gone, or moved by others
        living.push_back({alias.name, at::Tensor(std::move(tensor))});
      }
      if (!living.empty()) move_together(living, before);
    });
  }

  static c10::Device device_of(const Tied& tied) {
    return tied.tensors.empty() ? c10::Device(c10::kCPU) : tied.tensors.front().tensor.device();
  }
  void move_packed(const Tied& tied, c10::Device before, c10::Device device) {
    tied.stand_in->move_to(device);
    engine_.undo_with([stand_in = std::weak_ptr(tied.stand_in), before] {
      if (const auto living = stand_in.lock()) living->move_to(before);
    });
  }

  const PlacementOptions& options_;
  LazyParams& engine_;
  std::vector<std::unique_ptr<Tied>> ties_;
  std::unordered_map<std::string, std::pair<at::Tensor, Tied*>> by_name_;
};

}  // namespace

bool is_running_statistic(std::string_view buffer_name) {
  const auto local = buffer_name.substr(buffer_name.rfind('.') + 1);
  return local == "running_mean" || local == "running_var" || local == "num_batches_tracked";
}

void place_model(Module& model, const PlacementOptions& options, LazyParams& engine) {
  Placer(model, options, engine);
}

}  // namespace accelerate::detail::offload
