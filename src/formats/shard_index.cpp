#include "formats/shard_index.h"

#include <set>

#include "accelerate/errors.h"
#include "accelerate/value.h"
#include "core/json.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/format_error.h"
#include "formats/pattern.h"

namespace accelerate::detail::formats {
ShardIndex read_shard_index(std::string_view text, std::string_view source) {
  const auto refuse = [source](const std::string& problem) {
    throw FormatError(str("'", source, "' is no index of a sharded checkpoint: ", problem, "."),
                      std::string(source));
  };
  if (text.size() > kMaxIndexBytes) {
    refuse(str("it has ", text.size(), " bytes, and ", kMaxIndexBytes, " are the limit"));
  }
  Value index;
  try {
    index = json_loads_unique(text, str("'", source, "'"));
  } catch (const ConfigError& error) {
    throw FormatError(error.what(), std::string(source));
  }
  if (!index.is_dict()) refuse(str("it is of kind ", index.kind_name(), " and no object"));
  const Value* map = index.as_dict().get("weight_map");
  if (map == nullptr) map = &index;
  if (!map->is_dict())
    refuse(str("its weight_map is of kind ", map->kind_name(), " and no object"));
  if (map->as_dict().empty()) refuse("its weight_map is empty");

  ShardIndex result;
  std::set<std::string> files;
  for (const auto& [key, value] : map->as_dict()) {
    const auto& name = key.as_string();
    if (name.empty() || name.size() > kMaxNameLength) {
      refuse(str("it has the name of a tensor with ", name.size(), " bytes; 1 to ", kMaxNameLength,
                 " are allowed"));
    }
    if (!value.is_string()) {
      refuse(str("the file of ", python_repr(name), " is of kind ", value.kind_name(),
                 " and no text"));
    }
    const auto& file = value.as_string();
    if (const auto problem = problem_with_inner_path(file); !problem.empty()) {
      refuse(str("the file name ", python_repr(std::string_view(file).substr(0, 200)), " of ",
                 python_repr(name), " ", problem));
    }
    files.insert(file);
    result.weight_map.emplace(name, file);
  }
  result.files.assign(files.begin(), files.end());
  return result;
}

std::string write_shard_index(const StateDictSplit& split) {
  Value::Dict weights;
  for (const auto& [tensor, file] : split.tensor_to_filename) weights.set(tensor, file);
  const Value index = Value::Dict{{"metadata", Value::Dict{{"total_size", split.total_size}}},
                                  {"weight_map", std::move(weights)}};
  return json_dumps(index, {.indent = 2, .sort_keys = true}) + "\n";
}

}  // namespace accelerate::detail::formats
