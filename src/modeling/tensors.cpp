// The tensors of modules: identity, ties, places.
#include "modeling/tensors.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "core/text.h"
#include "state/accelerator_backend.h"
#include "state/tensor_device.h"

namespace accelerate {
namespace {

using torch::nn::Module;

/// Gives access to the parameters that `Module` keeps for classes that derive from it.
struct ParameterRegistry : Module {
  static torch::OrderedDict<std::string, at::Tensor>& of(Module& module) {
    return module.*(&ParameterRegistry::parameters_);
  }
};

/// Buffers that stay out of state dictionaries. Weak references: the address of a tensor that is
/// gone is not used again while one is here.
class NonPersistentBuffers {
 public:
  static NonPersistentBuffers& instance() {
    static NonPersistentBuffers buffers;
    return buffers;
  }
  void add(const at::Tensor& buffer) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(buffers_, [](const auto& entry) { return entry.second.expired(); });
    buffers_.try_emplace(buffer.unsafeGetTensorImpl(), buffer.getIntrusivePtr());
    any_ = true;
  }
  [[nodiscard]] bool contains(const at::Tensor& buffer) {
    if (!any_) return false;
    const std::scoped_lock lock(mutex_);
    return buffers_.contains(buffer.unsafeGetTensorImpl());
  }

 private:
  std::atomic<bool> any_ = false;
  std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, c10::weak_intrusive_ptr<at::TensorImpl>> buffers_;
};

struct NamedTensor {
  Module& owner;
  std::string local_name;
};

NamedTensor owner_of(Module& module, std::string_view name) {
  const auto dot = name.rfind('.');
  if (dot == name.npos) return {module, std::string(name)};
  return {get_submodule(module, name.substr(0, dot)), std::string(name.substr(dot + 1))};
}

at::Tensor tensor_at(Module& module, std::string_view name) {
  const auto [owner, local] = owner_of(module, name);
  for (const auto& tensors : {owner.named_parameters(false), owner.named_buffers(false)}) {
    if (const auto* tensor = tensors.find(local)) return *tensor;
  }
  throw ArgumentError(detail::str(module_class_name(owner),
                                  " does not have a parameter or a buffer named ", local,
                                  ". The whole name is '", name, "'."));
}

bool is_integral(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

/// The member of one of LibTorch's layers that is registered under a name, or null.
template <class... Layers>
at::Tensor* member_of(Module& module, const std::string& name) {
  at::Tensor* member = nullptr;
  const auto look = [&](auto* layer) {
    if (layer == nullptr) return;
    if (name == "weight") member = &layer->weight;
    if constexpr (requires { layer->bias; }) {
      if (name == "bias") member = &layer->bias;
    }
  };
  (look(dynamic_cast<Layers*>(&module)), ...);
  return member;
}

at::Tensor* layer_member(Module& module, const std::string& name) {
  namespace nn = torch::nn;
  return member_of<nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl,
                   nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl, nn::ConvTranspose1dImpl,
                   nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl, nn::LayerNormImpl,
                   nn::GroupNormImpl, nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl,
                   nn::InstanceNorm1dImpl, nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl>(module,
                                                                                           name);
}

TieKind tie(Module& model, const at::Tensor& source, const std::string& name) {
  const auto [owner, local] = owner_of(model, name);
  const auto tensor = get_parameter(model, name);
  if (tensor.is_same(source)) return TieKind::kIdentity;
  if (tensor.sizes() != source.sizes()) {
    throw ArgumentError(detail::str("tie_parameters: '", name, "' has shape ", tensor.sizes(),
                                    " and cannot be tied to a parameter of shape ", source.sizes(),
                                    "."));
  }
  auto* const member = layer_member(owner, local);
  // These containers have no member: they look into the registry.
  const bool is_container = dynamic_cast<torch::nn::ParameterListImpl*>(&owner) != nullptr ||
                            dynamic_cast<torch::nn::ParameterDictImpl*>(&owner) != nullptr;
  if (member == nullptr && !is_container) {
    detail::modeling::replace_data(tensor, source, name);
    return TieKind::kStorage;
  }
  ParameterRegistry::of(owner)[local] = source;
  if (member != nullptr) *member = source;
  return TieKind::kIdentity;
}

void append_tensors(const Module& module, const std::string& prefix, bool recurse, bool buffers,
                    std::unordered_set<const at::TensorImpl*>& seen,
                    std::vector<std::pair<std::string, at::Tensor>>& out) {
  const auto own = buffers ? module.named_buffers(false) : module.named_parameters(false);
  for (const auto& entry : own) {
    if (!entry.value().defined() || !seen.insert(entry.value().unsafeGetTensorImpl()).second) {
      continue;
    }
    out.emplace_back(prefix + entry.key(), entry.value());
  }
  if (!recurse) return;
  for (const auto& child : module.named_children()) {
    append_tensors(*child.value(), detail::str(prefix, child.key(), "."), true, buffers, seen, out);
  }
}

void append_non_persistent(const Module& module, const std::string& prefix, bool recurse, bool fqns,
                           std::set<std::string>& out) {
  for (const auto& entry : module.named_buffers(false)) {
    if (!detail::modeling::is_non_persistent(entry.value())) continue;
    out.insert(fqns ? prefix + entry.key() : entry.key());
  }
  if (!recurse) return;
  for (const auto& child : module.named_children()) {
    append_non_persistent(*child.value(), detail::str(prefix, child.key(), "."), true, fqns, out);
  }
}

}  // namespace

namespace detail::modeling {

const void* memory_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return tensor.unsafeGetTensorImpl();
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  // Without checks: the storage of an offloaded parameter throws when its data is asked for.
  const void* const data =
      tensor.is_meta() ? nullptr : storage->_mutable_data_ptr_no_checks().get();
  return data != nullptr ? data : storage;
}

bool same_view(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_same(b)) return true;
  return a.has_storage() && b.has_storage() && a.storage_offset() == b.storage_offset() &&
         a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

std::vector<std::vector<std::string>> same_elements(const StateDict& state) {
  std::vector<std::vector<std::string>> groups;
  std::unordered_multimap<const void*, std::size_t> by_memory;
  for (const auto& entry : state) {
    const auto& tensor = entry.value();
    auto [candidate, end] = by_memory.equal_range(memory_of(tensor));
    while (candidate != end && !same_view(state[groups[candidate->second].front()], tensor)) {
      ++candidate;
    }
    if (candidate != end) {
      groups[candidate->second].push_back(entry.key());
      continue;
    }
    if (tensor.numel() != 0) by_memory.emplace(memory_of(tensor), groups.size());
    groups.push_back({entry.key()});
  }
  return groups;
}

void replace_data(const at::Tensor& tensor, const at::Tensor& data, const std::string& name) {
  if (tensor.is_meta() == data.is_meta()) {
    tensor.set_data(data.detach());
    return;
  }
  // `set_data` refuses this one transition. A gradient accumulator would keep the old metadata.
  if (torch::autograd::impl::try_get_grad_accumulator(tensor)) {
    throw StateError(
        detail::str("'", name, "' cannot go from ", tensor.device(), " to ", data.device(),
                    ", because a graph was recorded on it. Place the weights of a model "
                    "before its first forward pass."));
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.detach().getIntrusivePtr());
}

c10::Device torch_device(const MapDevice& device) {
  if (device.is_gpu()) {
    const auto* backend = state::accelerator_backend();
    if (backend == nullptr && !at::hasCUDA()) {
      throw UnsupportedError(str("The device map has GPU ", device, ", and no GPU can be used: ",
                                 state::why_no_accelerator(), ". Use 'cpu' or 'disk'."));
    }
    if (backend != nullptr && device.index() >= backend->device_count()) {
      throw ArgumentError(str("The device map has GPU ", device, ", and this machine has ",
                              backend->device_count(), ". GPUs count from 0."));
    }
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(device.index())};
  }
  std::optional<c10::Device> named;
  try {
    named = c10::Device(device.to_string());
  } catch (const c10::Error&) {
    throw ArgumentError(str("The device map has '", device,
                            "', which is no device. Use 'cpu', 'cuda:0' or the number of a GPU."));
  }
  if (!named->is_cpu() && !named->is_meta()) {
    throw UnsupportedError(str("The device map has '", device,
                               "'; weights can be on CPUs and NVIDIA GPUs only. Use 'cpu', 'disk' "
                               "or the number of a GPU."));
  }
  return *named;
}

bool is_non_persistent(const at::Tensor& buffer) {
  return NonPersistentBuffers::instance().contains(buffer);
}

const torch::OrderedDict<std::string, at::Tensor>& own_parameters(const Module& module) {
  return ParameterRegistry::of(const_cast<Module&>(module));
}

}  // namespace detail::modeling

TensorStorageId id_tensor_storage(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    throw ArgumentError(
        detail::str("id_tensor_storage: a tensor of layout ", tensor.layout(), " has no storage."));
  }
  const auto& storage = tensor.storage();
  return {.device = tensor.device(),
          .data = tensor.is_meta() ? nullptr : storage.data(),
          .bytes = static_cast<std::int64_t>(storage.nbytes())};
}

std::vector<std::pair<std::string, at::Tensor>> named_module_tensors(
    const Module& module, const ModuleTensorsOptions& options) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::unordered_set<const at::TensorImpl*> parameters;
  append_tensors(module, "", options.recurse, /*buffers=*/false, parameters, tensors);
  if (!options.include_buffers) return tensors;
  std::unordered_set<const at::TensorImpl*> buffers;
  append_tensors(module, "", options.recurse, /*buffers=*/true, buffers, tensors);
  if (options.remove_non_persistent) {
    std::erase_if(tensors, [](const auto& entry) {
      return detail::modeling::is_non_persistent(entry.second);
    });
  }
  return tensors;
}

void mark_non_persistent(Module& module, std::string_view buffer_name) {
  NonPersistentBuffers::instance().add(get_buffer(module, buffer_name));
}

std::set<std::string> get_non_persistent_buffers(const Module& module, bool recurse, bool fqns) {
  std::set<std::string> names;
  append_non_persistent(module, "", recurse, fqns, names);
  return names;
}

void set_module_tensor_to_device(Module& module, std::string_view tensor_name,
                                 const c10::Device& device, const SetModuleTensorOptions& options) {
  const auto tensor = tensor_at(module, tensor_name);
  const auto name = std::string(tensor_name);
  if (tensor.is_meta() && !device.is_meta() && !options.value) {
    throw ArgumentError(
        detail::str(name, " is on the meta device, we need a `value` to put in on ", device,
                    ". Load a checkpoint, or give SetModuleTensorOptions a value."));
  }
  const at::NoGradGuard no_grad;
  at::Tensor data = options.value.value_or(tensor).detach();
  if (data.sizes() != tensor.sizes()) {
    const auto local = name.substr(name.rfind('.') + 1);
    throw ArgumentError(
        detail::str("Trying to set a tensor of shape ", data.sizes(), " in \"", local,
                    "\" (which has shape ", tensor.sizes(), "), this looks incorrect.",
                    local == name ? "" : detail::str(" The whole name is '", name, "'.")));
  }
  if (options.value && !options.dtype) {
    data = data.to(tensor.scalar_type(), options.non_blocking);
  } else if (options.dtype && !is_integral(data) && (options.value || device.is_meta())) {
    data = data.to(*options.dtype, options.non_blocking);
  }
  data = data.to(detail::state::tensor_device(device), options.non_blocking);
  if (options.value || data.device() != tensor.device() ||
      data.scalar_type() != tensor.scalar_type()) {
    detail::modeling::replace_data(tensor, data, name);
  }
}

TieKind tie_parameters(Module& model, const std::vector<std::string>& names) {
  if (names.empty()) throw ArgumentError("tie_parameters: there are no names. Give at least two.");
  const auto source = get_parameter(model, names.front());
  auto kind = TieKind::kIdentity;
  for (std::size_t i = 1; i < names.size(); ++i) {
    if (tie(model, source, names[i]) == TieKind::kStorage) kind = TieKind::kStorage;
  }
  return kind;
}

void retie_parameters(Module& model, const std::vector<std::vector<std::string>>& tied_parameters) {
  for (auto names : tied_parameters) {
    const auto real = std::ranges::find_if(
        names, [&](const std::string& name) { return !get_parameter(model, name).is_meta(); });
    if (real == names.end()) continue;
    std::rotate(names.begin(), real, real + 1);
    tie_parameters(model, names);
  }
}

}  // namespace accelerate
