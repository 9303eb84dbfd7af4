// tests/modeling/stored_models.h - the random models of tests/reference/device_maps.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace accelerate::test {

/// A module whose class has any name.
struct NamedClass : torch::nn::Module {
  using torch::nn::Module::Module;
};

inline torch::ScalarType dtype_named(const std::string& name) {
  for (const auto type :
       {torch::kFloat32, torch::kFloat16, torch::kBFloat16, torch::kFloat64, torch::kInt64,
        torch::kInt8, torch::kUInt8, torch::kBool, torch::kComplexFloat, torch::kFloat8_e4m3fn,
        torch::kFloat8_e5m2, torch::kInt16}) {
    if (c10::getDtypeNames(type).first == name) return type;
  }
  throw std::invalid_argument(name);
}

using Json = nlohmann::ordered_json;

/// The root of a stored model, on the meta device. Numbers that come twice are one tensor.
inline std::shared_ptr<torch::nn::Module> build_stored_model(const Json& model) {
  std::vector<torch::Tensor> tensors;
  for (const auto& each : model["tensors"]) {
    tensors.push_back(torch::empty(
        each[1].get<std::vector<std::int64_t>>(),
        torch::TensorOptions(torch::kMeta).dtype(dtype_named(each[0].get<std::string>()))));
  }
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (const auto& each : model["modules"]) {
    modules.push_back(std::make_shared<NamedClass>(each["class"].get<std::string>()));
  }
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const auto each = [&](const char* kind, const auto& use) {
      for (const auto& part : model["modules"][i][kind]) {
        use(part[0].get<std::string>(), part[1].get<std::size_t>());
      }
    };
    each("parameters", [&](const std::string& name, std::size_t number) {
      modules[i]->register_parameter(name, tensors[number], /*requires_grad=*/false);
    });
    each("buffers", [&](const std::string& name, std::size_t number) {
      modules[i]->register_buffer(name, tensors[number]);
    });
    each("children", [&](const std::string& name, std::size_t number) {
      modules[i]->register_module(name, modules[number]);
    });
  }
  return modules.front();
}

}  // namespace accelerate::test
