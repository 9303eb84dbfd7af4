// Any set of tensors of a file is taken as a weight in 8 bits or refused with a FormatError, and
// what is taken has the tensors, dtypes and sizes that kernels read by pointers. The text has a
// tensor in each line: name, dtype, sizes.
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "formats/quant_state.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  using namespace accelerate::detail::formats;
  const std::vector<std::int64_t> shape{48, 128};
  QuantTensors tensors;
  std::optional<std::int64_t> format;
  std::istringstream lines{std::string(fuzz::text(data, size))};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    QuantTensorFacts facts;
    words >> name >> facts.dtype;
    for (std::int64_t one = 0; words >> one;) facts.shape.push_back(one);
    if (name == "fc.weight_format") format = facts.shape.empty() ? 0 : facts.shape.back();
    tensors[name] = facts;
  }
  try {
    check_int8_tensors(shape, format, tensors, "fc.weight");
  } catch (const FormatError&) {
    return 0;
  }
  fuzz::check(tensors.at("fc.weight").shape == shape && tensors.at("fc.weight").dtype == "int8",
              "codes are a matrix of int8");
  std::int64_t scales = 1;
  for (const auto one : tensors.at("fc.SCB").shape) scales *= one;
  fuzz::check(scales == shape[0] && tensors.at("fc.SCB").dtype == "float32",
              "there is a scale for each row");
  fuzz::check(format.value_or(0) == 0, "rows come one after the other");
  fuzz::check(tensors.size() == 2U + tensors.count("fc.weight_format"), "nothing else is there");
  return 0;
}
