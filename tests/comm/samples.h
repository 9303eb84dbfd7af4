// tests/comm/samples.h - the inputs that tests/reference/operations/write_reference.py uses too.
#pragma once

#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {

/// Different on every rank; small whole numbers for integer dtypes.
inline torch::Tensor sample(int rank, torch::ScalarType dtype, std::int64_t size = 37) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < size; ++i) {
    const auto step = static_cast<double>(7 * i + 13 * rank);
    const bool whole = !c10::isFloatingType(dtype) && !c10::isComplexType(dtype);
    values.push_back(whole ? std::fmod(step, 51) : std::fmod(step, 101) / 17.0 - 2.5);
  }
  return torch::tensor(values, torch::kFloat64).to(dtype);
}

inline const nlohmann::json& reference() {
  static const auto json = [] {
    std::ifstream file(test::reference_path("operations/operations.json"));
    return nlohmann::json::parse(file);
  }();
  return json;
}

inline std::vector<double> numbers(const torch::Tensor& tensor) {
  const auto flat = tensor.detach().to(torch::kFloat64).contiguous().view({-1});
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

/// The numbers of a nested JSON list, row by row.
inline std::vector<double> numbers(const nlohmann::json& json) {
  if (!json.is_array()) return {json.get<double>()};
  std::vector<double> all;
  for (const auto& item : json) {
    const auto part = numbers(item);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

using test::message_of;

}  // namespace accelerate
