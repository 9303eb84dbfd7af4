#include "formats/offload_index.h"

#include "accelerate/errors.h"
#include "accelerate/value.h"
#include "core/json.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/format_error.h"
#include "formats/shard_index.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::int64_t kMaxElements = std::int64_t{1} << 60;

/// One entry; `refuse` throws.
template <class Refuse>
OffloadedWeight parse_entry(const Value& value, const Refuse& refuse) {
  if (!value.is_dict()) refuse(str("is of kind ", value.kind_name(), " and no object"));
  const auto& fields = value.as_dict();
  const auto text = [&](const char* name) -> std::optional<std::string> {
    const auto* const field = fields.get(name);
    if (field == nullptr || field->is_none()) return std::nullopt;
    if (!field->is_string()) {
      refuse(str("has a ", name, " of kind ", field->kind_name(), " and no text"));
    }
    return field->as_string();
  };
  OffloadedWeight weight{.dtype = text("dtype").value_or(""), .weight_name = text("weight_name")};
  if (const auto file = text("safetensors_file")) weight.safetensors_file = *file;
  const auto* const shape = fields.get("shape");
  if (!weight.safetensors_file && (weight.dtype.empty() || shape == nullptr)) {
    refuse("has no dtype or no shape");
  }
  if (shape == nullptr) return weight;
  if (!shape->is_list()) refuse(str("has a shape of kind ", shape->kind_name(), " and no list"));
  std::int64_t elements = 1;
  for (const auto& size : shape->as_list()) {
    if (!size.is_int() || size.as_int() < 0) refuse("has a shape with something that is no size");
    weight.shape.push_back(size.as_int());
    if (__builtin_mul_overflow(elements, size.as_int(), &elements) || elements > kMaxElements) {
      refuse("has a shape of more elements than fit into memory");
    }
  }
  return weight;
}

}  // namespace

std::string_view problem_with_weight_name(std::string_view name) {
  if (name.empty()) return "is empty";
  if (name.find('/') != name.npos) return "has a '/'";
  return problem_with_inner_path(name);
}

OffloadIndex parse_offload_index(std::string_view text, std::string_view source) {
  const auto refuse = [source](const std::string& problem) {
    throw FormatError(str("'", source, "' is no index of an offload folder: ", problem,
                          ". Offload the weights again."),
                      std::string(source));
  };
  if (text.size() > kMaxIndexBytes) {
    refuse(str("it has ", text.size(), " bytes, and ", kMaxIndexBytes, " are the limit"));
  }
  Value content;
  try {
    content = json_loads_unique(text, str("'", source, "'"));
  } catch (const ConfigError& error) {
    throw FormatError(error.what(), std::string(source));
  }
  if (!content.is_dict()) refuse(str("it is of kind ", content.kind_name(), " and no object"));
  OffloadIndex index;
  for (const auto& [key, value] : content.as_dict()) {
    const auto& name = key.as_string();
    const auto entry = [&] { return str("the entry of ", python_repr(name.substr(0, 200)), " "); };
    const auto weight =
        parse_entry(value, [&](const std::string& problem) { refuse(entry() + problem); });
    if (const auto problem = problem_with_weight_name(name);
        !problem.empty() && !weight.safetensors_file) {
      refuse(str("the name ", python_repr(name.substr(0, 200)), " ", problem));
    }
    index.set(name, weight);
  }
  return index;
}

std::string write_offload_index(const OffloadIndex& index) {
  Value::Dict content;
  for (const auto& [name, weight] : index) {
    Value::Dict entry;
    if (weight.safetensors_file) {
      entry.set("safetensors_file", weight.safetensors_file->string());
      if (weight.weight_name) entry.set("weight_name", *weight.weight_name);
      if (!weight.dtype.empty()) entry.set("dtype", weight.dtype);
    } else {
      entry.set("dtype", weight.dtype);
      entry.set("shape", Value::List(weight.shape.begin(), weight.shape.end()));
    }
    content.set(name, std::move(entry));
  }
  return json_dumps(Value(std::move(content)), {.indent = 2});
}

}  // namespace accelerate::detail::formats
