#include "accelerate/big_modeling/empty_weights.h"

#include <ATen/Functions.h>

#include "accelerate/environment.h"
#include "lazy/trigger.h"
#include "modeling/tensors.h"

namespace accelerate {
namespace {

bool include_buffers(const InitOptions& options) {
  return options.include_buffers.value_or(parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS"));
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
  for (const auto& item : model.named_buffers()) {
    const auto& buffer = item.value();
    if (include_buffers(options)) {
      move(item);
    } else if (buffer.defined() && buffer.is_meta() && device.is_meta()) {
      const auto real = at::zeros(buffer.sizes(), buffer.options().device(c10::kCPU));
      modeling::replace_data(buffer, real, item.key());
    }
  }
}

}  // namespace detail::offload

}  // namespace accelerate
