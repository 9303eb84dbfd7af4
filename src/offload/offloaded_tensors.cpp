#include "accelerate/big_modeling/offloaded_tensors.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "accelerate/errors.h"
#include "core/exception_text.h"
#include "core/log.h"
#include "core/text.h"
#include "lazy/trigger.h"
#include "modeling/tensors.h"
#include "offload/lazy_params.h"

namespace accelerate {
namespace {

using torch::nn::Module;
namespace offload = detail::offload;

std::vector<at::Tensor> own_tensors(const Module& module) {
  auto tensors = module.parameters(/*recurse=*/false);
  for (const auto& buffer : module.buffers(/*recurse=*/false)) tensors.push_back(buffer);
  std::erase_if(tensors, [](const at::Tensor& tensor) { return !tensor.defined(); });
  return tensors;
}

void replace(const at::Tensor& tensor, const at::Tensor& data) {
  detail::modeling::replace_data(tensor, data, "a tensor of the aligned module");
}

/// Also where a graph was recorded on the tensor meanwhile, on the meta device too: the values must
/// not be lost. The next graph gets a gradient accumulator of its own.
void put_back(const at::Tensor& tensor, const at::Tensor& data) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
  if (torch::autograd::impl::try_get_grad_accumulator(tensor)) {
    torch::autograd::impl::set_grad_accumulator(tensor, {});
  }
}

}  // namespace

bool is_offloaded(const at::Tensor& tensor) { return offload::is_offloaded(tensor); }

c10::ScalarType storage_dtype(const at::Tensor& tensor) { return offload::storage_dtype(tensor); }

bool has_offloaded_params(const Module& module) {
  return std::ranges::any_of(own_tensors(module), offload::is_offloaded);
}

StateDict get_state_dict_offloaded_model(const Module& model) {
  return offload::host_values(state_dict(model));
}

StateDict& get_state_dict_from_offload(Module& module, std::string_view module_name,
                                       StateDict& state_dict, c10::Device device_to_put_offload) {
  const auto dot = module_name.rfind('.');
  const auto parent =
      dot == module_name.npos ? std::string() : std::string(module_name.substr(0, dot + 1));
  const bool is_away = has_offloaded_params(module);
  for (const auto& item : accelerate::state_dict(module)) {
    auto* known = state_dict.find(parent + item.key());
    if (known == nullptr) continue;
    *known = is_away ? offload::host_value(item.value()).to(device_to_put_offload)
                     : item.value().detach();
  }
  return state_dict;
}

// -- a module in memory ---------------------------------------------------------------------------

/// What to undo for one tensor at the end.
struct AlignedModule::Held {
  explicit Held(at::Tensor of) : tensor(std::move(of)) {}
  Held(Held&&) noexcept = default;
  ~Held() {
    const at::NoGradGuard no_grad;
    if (pinned) pinned->unpin();
    if (before.defined()) put_back(tensor, before);
    if (!home || !tensor.defined()) return;
    try {
      replace(tensor, tensor.detach().to(*home));
    } catch (const std::exception&) {
      detail::warn(detail::str("A tensor of an aligned module stays on ", tensor.device().str(),
                               ", because it cannot be moved back to ", home->str(), ": ",
                               detail::current_exception_text().message));
    }
  }

  at::Tensor tensor;
  /// It is pinned.
  std::shared_ptr<detail::lazy::ManagedStorage> pinned = nullptr;
  /// It has other data meanwhile, changes of which are lost: this is what it had.
  at::Tensor before = {};
  /// It is an ordinary one that came from there.
  std::optional<c10::Device> home = std::nullopt;
};

AlignedModule::AlignedModule(Module& module, std::optional<c10::Device> device) {
  const at::NoGradGuard no_grad;
  for (const auto& tensor : own_tensors(module)) {
    const auto managed = detail::lazy::find_managed(tensor);
    const bool moves = device && tensor.device() != *device;
    if (managed != nullptr && (!device || managed->device() == *device)) {
      auto& held = held_.emplace_back(tensor);
      managed->pin(detail::lazy::Access::kRead);
      held.pinned = managed;
    } else if (managed != nullptr) {
      auto& held = held_.emplace_back(tensor);
      auto before = tensor.detach();
      replace(tensor, offload::host_value(tensor).to(*device));
      held.before = std::move(before);
    } else if (moves && device->is_meta()) {
      auto& held = held_.emplace_back(tensor);
      auto before = tensor.detach();
      replace(tensor, before.to(*device));
      held.before = std::move(before);
    } else if (moves) {
      if (tensor.is_meta()) {
        throw ArgumentError(
            detail::str("A tensor of the module is on the meta device, we need a value to put it "
                        "on ",
                        device->str(), ". Load a checkpoint first."));
      }
      auto& held = held_.emplace_back(tensor);
      const auto home = tensor.device();
      replace(tensor, tensor.detach().to(*device));
      held.home = home;
    }
  }
}

AlignedModule::~AlignedModule() = default;

}  // namespace accelerate
