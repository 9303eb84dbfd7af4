#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/modeling/tensors.h"
#include "accelerate/sharding.h"
#include "core/text.h"

namespace accelerate {
namespace {

void check_device(const torch::nn::Module& model, const std::vector<std::string>& names,
                  const c10::Device& device) {
  const auto parameters = model.named_parameters();
  for (const auto& name : names) {
    const auto* const parameter = parameters.find(name);
    if (parameter == nullptr || parameter->is_meta() || parameter->device() == device) continue;
    throw ArgumentError(detail::str("ensure_weights_retied: param_init_fn has put the parameter '",
                                    name, "' on ", parameter->device().str(), ", not on ",
                                    device.str(), "."));
  }
}

}  // namespace

Callback<void(torch::nn::Module&)> ensure_weights_retied(
    Callback<void(torch::nn::Module&)> param_init_fn, torch::nn::Module& model,
    const c10::Device& device) {
  auto tied = find_tied_parameters(model);
  if (tied.empty()) return param_init_fn;
  // As tensors say it: "cpu", not "cpu:0".
  const auto where = at::empty({0}, at::TensorOptions().device(device)).device();
  return [init = std::move(param_init_fn), tied = std::move(tied), &model,
          where](torch::nn::Module& module) {
    init(module);
    for (const auto& names : tied) check_device(model, names, where);
    retie_parameters(model, tied);
  };
}

}  // namespace accelerate
