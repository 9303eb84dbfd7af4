#include "accelerate/big_modeling/empty_weights.h"

#include <ATen/Functions.h>

#include "accelerate/environment.h"
#include "offload/released_storage.h"
#include "offload/trigger.h"

namespace accelerate {
namespace {

bool include_buffers(const InitOptions& options) {
  return options.include_buffers.value_or(parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS"));
}

}  // namespace

InitOnDeviceScope::InitOnDeviceScope(c10::Device device, const InitOptions& options) {
  const auto before = detail::offload::exchange_factory_device({device, include_buffers(options)});
  before_ = before.device;
  all_before_ = before.all_factories;
}

InitOnDeviceScope::~InitOnDeviceScope() {
  detail::offload::exchange_factory_device({before_, all_before_});
}

namespace detail::offload {

void finish_init(torch::nn::Module& model, c10::Device device, const InitOptions& options) {
  const at::NoGradGuard no_grad;
  const auto move = [&](const at::Tensor& tensor) {
    if (tensor.device() == device) return;
    rebind(tensor, at::empty_like(tensor.detach(), device).copy_(tensor.detach()));
  };
  for (const auto& parameter : model.parameters()) move(parameter);
  for (const auto& buffer : model.buffers()) {
    if (include_buffers(options)) {
      move(buffer);
    } else if (buffer.device() == device && device.is_meta()) {
      rebind(buffer, at::zeros(buffer.sizes(), buffer.options().device(c10::kCPU)));
    }
  }
}

}  // namespace detail::offload

}  // namespace accelerate
