#include "formats/quant_state.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>

#include "accelerate/errors.h"
#include "accelerate/value.h"
#include "core/json.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/format_error.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::int64_t kMostElements = std::int64_t{1} << 40;
constexpr std::size_t kMostTextBytes = std::size_t{1} << 16;

/// The members of a quant_state; each is asked for once.
class Members {
 public:
  Members(const Value& content, const std::string& weight) : weight_(weight) {
    if (!content.is_dict()) {
      refuse_weight(weight,
                    str("its quant_state is of kind ", content.kind_name(), " and no object"));
    }
    members_ = &content.as_dict();
    for (const auto& [key, value] : *members_) unknown_.insert(key.as_string());
  }
  [[nodiscard]] bool has(const char* name) const { return members_->get(name) != nullptr; }
  const Value& at(const char* name, Value::Kind kind) {
    const auto* const value = members_->get(name);
    if (value == nullptr) refuse_weight(weight_, str("its quant_state has no ", name));
    const bool is_whole_number = kind == Value::Kind::kDouble && value->is_int();
    if (value->kind() != kind && !is_whole_number) {
      refuse_weight(weight_, str(name, " of its quant_state is of kind ", value->kind_name()));
    }
    unknown_.erase(name);
    return *value;
  }
  std::int64_t blocksize(const char* name) {
    const auto size = at(name, Value::Kind::kInt).as_int();
    if (size < 32 || size > 4096 || !std::has_single_bit(static_cast<std::uint64_t>(size))) {
      refuse_weight(weight_, str(name, " of its quant_state is ", size,
                                 ", and a power of two from 32 to 4096 is expected"));
    }
    return size;
  }
  void refuse_others() const {
    if (unknown_.empty()) return;
    refuse_weight(weight_, str("its quant_state has the unknown member ",
                               python_repr(unknown_.begin()->substr(0, 100))));
  }

 private:
  const std::string& weight_;
  const Value::Dict* members_ = nullptr;
  std::set<std::string> unknown_;
};

std::vector<std::int64_t> read_shape(const Value& value, const std::string& weight) {
  std::vector<std::int64_t> shape;
  std::int64_t elements = 1;
  for (const auto& size : value.as_list()) {
    if (!size.is_int() || size.as_int() < 1) {
      refuse_weight(weight, "the shape in its quant_state has something that is no size");
    }
    shape.push_back(size.as_int());
    if (__builtin_mul_overflow(elements, size.as_int(), &elements) || elements > kMostElements) {
      refuse_weight(weight, "the shape in its quant_state has more elements than fit into memory");
    }
  }
  if (shape.size() != 2) {
    refuse_weight(weight, str("the shape in its quant_state has ", shape.size(),
                              " sizes, and a matrix has 2"));
  }
  return shape;
}

/// -1 if they cannot be counted.
std::int64_t elements_of(const QuantTensorFacts& tensor) {
  std::int64_t count = 1;
  for (const auto size : tensor.shape) {
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) return -1;
  }
  return count;
}

bool is_quant_type(std::string_view type) { return type == "nf4" || type == "fp4"; }

}  // namespace

void refuse_weight(const std::string& weight, const std::string& problem) {
  throw FormatError(str("The quantized weight '", weight, "' cannot be read: ", problem,
                        ". Quantize the model again, or load its original weights."),
                    weight);
}

QuantStateText parse_quant_state(std::string_view text, const std::string& weight) {
  if (text.size() > kMostTextBytes) {
    refuse_weight(weight, str("its quant_state has ", text.size(), " bytes, and ", kMostTextBytes,
                              " are the limit"));
  }
  const Value content = json_content(text, str("quant_state of ", weight));
  Members members(content, weight);
  using Kind = Value::Kind;
  QuantStateText state;
  state.quant_type = members.at("quant_type", Kind::kString).as_string();
  if (!is_quant_type(state.quant_type)) {
    refuse_weight(weight, str("its quant_type is ", python_repr(state.quant_type.substr(0, 100)),
                              ", and nf4 or fp4 is expected"));
  }
  state.blocksize = members.blocksize("blocksize");
  state.dtype = members.at("dtype", Kind::kString).as_string();
  if (state.dtype != "float16" && state.dtype != "bfloat16" && state.dtype != "float32") {
    refuse_weight(weight, str("its dtype is ", python_repr(state.dtype.substr(0, 100)),
                              ", and float16, bfloat16 or float32 is expected"));
  }
  state.shape = read_shape(members.at("shape", Kind::kList), weight);
  if (members.has("nested_blocksize") || members.has("nested_dtype") ||
      members.has("nested_offset")) {
    auto& nested = state.nested.emplace(QuantStateText::Nested{});  // Clang 16 needs the argument
    nested.blocksize = members.blocksize("nested_blocksize");
    nested.dtype = members.at("nested_dtype", Kind::kString).as_string();
    if (nested.dtype != "float32") refuse_weight(weight, "its nested_dtype is not float32");
    nested.offset = members.at("nested_offset", Kind::kDouble).as_double();
    if (!std::isfinite(nested.offset))
      refuse_weight(weight, "its nested_offset is not a finite number");
  }
  members.refuse_others();
  return state;
}

std::string write_quant_state(const QuantStateText& state) {
  Value::Dict content;
  content.set("quant_type", state.quant_type);
  content.set("blocksize", state.blocksize);
  content.set("dtype", state.dtype);
  content.set("shape", Value::List(state.shape.begin(), state.shape.end()));
  if (state.nested) {
    content.set("nested_blocksize", state.nested->blocksize);
    content.set("nested_dtype", state.nested->dtype);
    content.set("nested_offset", state.nested->offset);
  }
  return json_dumps(Value(std::move(content)));
}

std::string find_quant_state(const QuantTensors& tensors, const std::string& weight) {
  std::string found;
  for (const auto& [name, facts] : tensors) {
    if (!name.starts_with("quant_state")) continue;
    if (!name.starts_with(kQuantStateName) || !is_quant_type(name.substr(kQuantStateName.size()))) {
      refuse_weight(weight, str("its file has ", python_repr(str(weight, ".", name)),
                                ", and quant_state.bitsandbytes__nf4 or __fp4 is expected"));
    }
    if (!found.empty()) refuse_weight(weight, str("its file has both ", found, " and ", name));
    found = name;
  }
  if (found.empty())
    refuse_weight(weight, "its file has no quant_state.bitsandbytes__nf4 or __fp4");
  return found;
}

void check_quant_tensors(const QuantStateText& state, const QuantTensors& tensors,
                         const std::string& weight) {
  std::int64_t values = 1;
  for (const auto size : state.shape) values *= size;
  const auto blocks = (values + state.blocksize - 1) / state.blocksize;
  std::set<std::string> expected;
  const auto check = [&](const std::string& name, std::string_view dtype, std::int64_t elements) {
    expected.insert(name);
    const auto full = name.empty() ? weight : weight + "." + name;
    const auto found = tensors.find(name);
    if (found == tensors.end()) refuse_weight(weight, str("its file has no '", full, "'"));
    if (elements_of(found->second) != elements || found->second.dtype != dtype) {
      refuse_weight(weight, str("'", full, "' is of shape [", join(found->second.shape),
                                "] and dtype ", found->second.dtype, ", and ", elements,
                                " elements of ", dtype, " are expected"));
    }
  };
  check("", "uint8", (values + 1) / 2);
  check("absmax", state.nested ? "uint8" : "float32", blocks);
  check("quant_map", "float32", 16);
  if (state.nested) {
    check("nested_absmax", "float32",
          (blocks + state.nested->blocksize - 1) / state.nested->blocksize);
    check("nested_quant_map", "float32", 256);
  }
  expected.insert(find_quant_state(tensors, weight));
  if (*std::ranges::find_if(expected, [](const auto& name) {
        return name.starts_with(kQuantStateName);
      }) != str(kQuantStateName, state.quant_type)) {
    refuse_weight(weight, str("its quant_state is of type ", state.quant_type,
                              ", and the name of the tensor says another"));
  }
  for (const auto& [name, facts] : tensors) {
    if (!expected.contains(name)) {
      refuse_weight(weight, str("its file has the unknown member ",
                                python_repr(str(weight, ".", name.substr(0, 100)))));
    }
  }
}

void check_int8_tensors(const std::vector<std::int64_t>& shape,
                        std::optional<std::int64_t> weight_format, const QuantTensors& tensors,
                        const std::string& weight) {
  const auto prefix = weight.substr(0, weight.rfind('.') + 1);
  const auto scales = tensors.find(prefix + "SCB");
  if (scales == tensors.end()) refuse_weight(weight, str("its file has no '", prefix, "SCB'"));
  if (weight_format.value_or(0) != 0) {
    refuse_weight(weight, str("its weight_format is ", *weight_format,
                              ", a layout of old GPU kernels; 0, rows one after the other, is "
                              "expected"));
  }
  const auto codes = tensors.find(weight);
  if (codes == tensors.end() || codes->second.dtype != "int8" || codes->second.shape != shape) {
    refuse_weight(weight, str("it is no int8 of shape [", join(shape), "]"));
  }
  const auto rows = elements_of(scales->second);
  if (scales->second.dtype != "float32" || rows != shape.front()) {
    refuse_weight(weight, str("its SCB has ", rows, " elements of ", scales->second.dtype, ", and ",
                              shape.front(), " of float32 are expected"));
  }
  for (const auto& [name, facts] : tensors) {
    if (name == weight || name == scales->first || name == prefix + "weight_format") continue;
    refuse_weight(weight, str("it is in 8 bits, and its file has the unknown member ",
                              python_repr(name.substr(0, 200))));
  }
}

}  // namespace accelerate::detail::formats
