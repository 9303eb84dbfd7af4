#include "accelerate/big_modeling/empty_weights.h"

#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <type_traits>

#include "accelerate/environment.h"
#include "lazy/trigger.h"
#include "modeling/tensors.h"

namespace accelerate {
namespace {

bool include_buffers(const InitOptions& options) {
  return options.include_buffers.value_or(parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS"));
}

template <class Norm>
bool reset_statistics(torch::nn::Module& module) {
  auto* norm = dynamic_cast<Norm*>(&module);
  if (norm == nullptr) return false;
  for (const auto& item : norm->named_buffers(/*recurse=*/false)) {
    const auto& buffer = item.value();
    if (!buffer.defined() || !buffer.is_meta()) continue;
    detail::modeling::replace_data(
        buffer, at::empty(buffer.sizes(), buffer.options().device(c10::kCPU)), item.key());
  }
  norm->reset_running_stats();
  return true;
}

/// LibTorch's norms make their statistics by torch::empty and fill them afterwards.
template <class... Norms>
void reset_statistics(torch::nn::Module& module, std::type_identity<Norms>...) {
  (reset_statistics<Norms>(module) || ...);
}

}  // namespace

InitOnDeviceScope::InitOnDeviceScope(c10::Device device, const InitOptions& options) {
  const auto before = detail::lazy::exchange_factory_device({device, include_buffers(options)});
  before_ = before.device;
  all_before_ = before.all_factories;
}

InitOnDeviceScope::~InitOnDeviceScope() {
  detail::lazy::exchange_factory_device({before_, all_before_});
}

namespace detail::offload {

void finish_init(torch::nn::Module& model, c10::Device device, const InitOptions& options) {
  const at::NoGradGuard no_grad;
  const auto move = [&](const auto& item) {
    const auto& tensor = item.value();
    if (!tensor.defined() || tensor.device() == device) return;
    modeling::replace_data(tensor, tensor.detach().to(device), item.key());
  };
  for (const auto& item : model.named_parameters()) move(item);
  if (include_buffers(options)) {
    for (const auto& item : model.named_buffers()) move(item);
  } else if (device.is_meta()) {
    using namespace torch::nn;
    for (const auto& module : model.modules()) {
      reset_statistics(
          *module, std::type_identity<BatchNorm1dImpl>(), std::type_identity<BatchNorm2dImpl>(),
          std::type_identity<BatchNorm3dImpl>(), std::type_identity<InstanceNorm1dImpl>(),
          std::type_identity<InstanceNorm2dImpl>(), std::type_identity<InstanceNorm3dImpl>());
    }
  }
}

}  // namespace detail::offload

}  // namespace accelerate
