// accelerate/big_modeling/empty_weights.h - build a model without memory for its weights.
//
//     auto net = accelerate::init_empty_weights([&] { return Net(config); });
//
// Part of accelerate/big_modeling.h.
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <concepts>
#include <optional>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/detail/modeling/module_of.h"
#include "accelerate/errors.h"

namespace accelerate {

struct InitOptions {
  /// Buffers too. Unset: ACCELERATE_INIT_INCLUDE_BUFFERS, else false.
  std::optional<bool> include_buffers = std::nullopt;
};

/// While it lives, tensors that this thread makes without naming a device are on `device`. Guards
/// nest. Without `include_buffers` that holds for torch::empty, rand and normal alone, of which
/// parameters are made: zeros, ones, full and arange, of which buffers are made, stay where they
/// are. A buffer that is made of torch::empty and filled afterwards has no value.
class ACCELERATE_API InitOnDeviceScope {
 public:
  [[nodiscard]] explicit InitOnDeviceScope(c10::Device device, const InitOptions& options = {});
  ~InitOnDeviceScope();
  InitOnDeviceScope(const InitOnDeviceScope&) = delete;
  InitOnDeviceScope& operator=(const InitOnDeviceScope&) = delete;

 private:
  std::optional<c10::Device> before_;
  bool all_before_;
};

namespace detail::offload {

/// What the scope alone cannot know: parameters that were made in another way go to the device, and
/// the statistics of LibTorch's norms get their values. Other buffers that landed on the meta
/// device have lost theirs and stay there: a model that is dispatched with one is refused.
ACCELERATE_API void finish_init(torch::nn::Module& model, c10::Device device,
                                const InitOptions& options);

}  // namespace detail::offload

/// Guards, for a part of a program. A model that is built by one function is better made by the
/// forms below, which also see parameters that were not made by torch::empty, rand or normal.
[[nodiscard]] inline InitOnDeviceScope init_on_device(c10::Device device,
                                                      const InitOptions& options = {}) {
  return InitOnDeviceScope(device, options);
}
/// On the meta device, where a tensor has a shape and no memory. `load_checkpoint_and_dispatch` and
/// `load_checkpoint_in_model` with a device map give it values.
[[nodiscard]] inline InitOnDeviceScope init_empty_weights(const InitOptions& options = {}) {
  return InitOnDeviceScope(c10::kMeta, options);
}

/// The model that `make` returns (a holder or a shared_ptr), with its parameters on `device`.
template <std::invocable Make>
[[nodiscard]] auto init_on_device(c10::Device device, Make&& make,
                                  const InitOptions& options = {}) {
  auto model = [&] {
    const InitOnDeviceScope scope(device, options);
    return std::forward<Make>(make)();
  }();
  const auto module = detail::modeling::ModuleOf<decltype(model)>::pointer(model);
  if (module == nullptr) throw ArgumentError("The function returned an empty model.");
  detail::offload::finish_init(*module, device, options);
  return model;
}
/// `init_on_device` for the meta device: without memory for parameters.
template <std::invocable Make>
[[nodiscard]] auto init_empty_weights(Make&& make, const InitOptions& options = {}) {
  return init_on_device(c10::kMeta, std::forward<Make>(make), options);
}

}  // namespace accelerate
