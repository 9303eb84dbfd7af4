#include "formats/key_mapping.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "accelerate/errors.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "core/yaml.h"
#include "formats/key_rules.h"

namespace accelerate {
namespace {

using detail::did_you_mean;
using detail::join;
using detail::str;

constexpr std::size_t kMaxRulesFile = std::size_t{1} << 20;
constexpr std::size_t kMaxRules = 256;

/// The fields of one rule in a file, each of which must be asked for.
class RuleFields {
 public:
  explicit RuleFields(const Value& value) : fields_(value.as_dict()) {}

  [[nodiscard]] std::string text(const char* name) { return required(name).as_string(); }
  [[nodiscard]] std::vector<std::string> texts(const char* name) {
    std::vector<std::string> result;
    for (const auto& item : required(name).items()) result.push_back(item.as_string());
    return result;
  }
  [[nodiscard]] std::int64_t number(const char* name, std::int64_t fallback) {
    const auto* value = optional(name);
    return value == nullptr ? fallback : value->as_int();
  }
  [[nodiscard]] std::vector<std::int64_t> numbers(const char* name) {
    std::vector<std::int64_t> result;
    if (const auto* value = optional(name)) {
      for (const auto& item : value->items()) result.push_back(item.as_int());
    }
    return result;
  }
  /// Throws if a field was not asked for.
  void finish() const {
    for (const auto& [key, value] : fields_) {
      if (asked_.contains(key.to_string())) continue;
      const std::vector<std::string> known(asked_.begin(), asked_.end());
      throw ConfigError(str("it has no field '", key.to_string(), "'; its fields are ", join(known),
                            ".", did_you_mean(key.to_string(), known)));
    }
  }

 private:
  const Value* optional(const char* name) {
    asked_.insert(name);
    return fields_.get(name);
  }
  const Value& required(const char* name) {
    const auto* value = optional(name);
    if (value == nullptr) throw ConfigError(str("it needs the field '", name, "'."));
    return *value;
  }

  const Value::Dict& fields_;
  std::set<std::string> asked_;
};

void add_with_fields(KeyMapping& mapping, const std::string& kind, RuleFields fields) {
  if (kind == "rename") {
    mapping.rename(fields.text("from"), fields.text("to"));
  } else if (kind == "replace") {
    mapping.replace(fields.text("pattern"), fields.text("with"));
  } else if (kind == "transpose") {
    const auto pattern = fields.text("pattern");
    mapping.transpose(pattern, fields.number("dim0", 0), fields.number("dim1", 1));
  } else if (kind == "split") {
    const auto pattern = fields.text("pattern");
    mapping.split(pattern, fields.texts("into"),
                  {.dim = fields.number("dim", 0), .sizes = fields.numbers("sizes")});
  } else {
    const auto patterns = fields.texts("patterns");
    mapping.join(patterns, fields.text("into"), fields.number("dim", 0));
  }
  fields.finish();
}

/// One rule is a mapping of one key, its kind, to a text or to fields.
void add_rule(KeyMapping& mapping, const Value& rule) {
  static const std::vector<std::string> kKinds{"strip_prefix", "add_prefix", "rename", "replace",
                                               "transpose",    "split",      "join",   "drop"};
  if (!rule.is_dict() || rule.as_dict().size() != 1) {
    throw ConfigError("a rule has one key, its kind: strip_prefix, rename, ...");
  }
  const auto& [key, value] = *rule.as_dict().begin();
  const auto kind = key.to_string();
  if (kind == "strip_prefix") {
    mapping.strip_prefix(value.as_string());
  } else if (kind == "add_prefix") {
    mapping.add_prefix(value.as_string());
  } else if (kind == "drop") {
    mapping.drop(value.as_string());
  } else if (kind == "transpose" && value.is_string()) {
    mapping.transpose(value.as_string());
  } else if (std::ranges::find(kKinds, kind) != kKinds.end()) {
    add_with_fields(mapping, kind, RuleFields(value));
  } else {
    throw ConfigError(str("there is no kind of rule '", kind, "'; choose one of ", join(kKinds),
                          ".", did_you_mean(kind, kKinds)));
  }
}

}  // namespace

std::string KeyMappingReport::to_string() const {
  std::string text;
  for (const auto& rule : rules) {
    text += str(rule.rule, ": ", rule.matched, rule.matched == 1 ? " name" : " names", "\n");
  }
  const auto list = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty()) text += str(what, ": ", join(names), "\n");
  };
  list("matched by no rule", unmatched);
  list("parts of tensors that are not complete", incomplete);
  return text;
}

KeyMapping& KeyMapping::add(std::shared_ptr<const detail::formats::KeyRule> rule) {
  if (rules_.size() == kMaxRules) {
    throw ConfigError(str("A key mapping has at most ", kMaxRules, " rules."));
  }
  rules_.push_back(std::move(rule));
  return *this;
}

KeyMapping KeyMapping::from_file(const std::filesystem::path& path) {
  const auto text = detail::read_whole_file(path, kMaxRulesFile);
  const auto source = str("'", path.string(), "'");
  return from_value(path.extension() == ".json" ? detail::json_loads_unique(text, source)
                                                : detail::yaml_loads_unique(text, source),
                    source);
}

KeyMapping KeyMapping::from_value(const Value& rules, std::string_view source) {
  if (!rules.is_list()) {
    throw ConfigError(
        str(source, " must be a list of rules, and is of kind ", rules.kind_name(), "."));
  }
  KeyMapping mapping;
  for (std::size_t i = 0; i < rules.items().size(); ++i) {
    try {
      add_rule(mapping, rules.items()[i]);
    } catch (const Error& error) {
      throw ConfigError(str(source, ", rule ", i + 1, ": ", error.what()));
    }
  }
  return mapping;
}

namespace detail::formats {
namespace {

/// Of one tensor: a split whose parts are joined again doubles them.
constexpr std::size_t kMaxRecipeSteps = 4096;

void check_table(const KeyTable& table, const std::string& rule) {
  for (const auto& entry : table.entries) {
    if (entry.name.empty()) throw ConfigError(str("The rule ", rule, " leaves a name empty."));
    if (entry.name.size() > kMaxNameLength) {
      throw ConfigError(str("The rule ", rule, " makes a name of ", entry.name.size(), " bytes; ",
                            kMaxNameLength, " are the limit."));
    }
    if (entry.recipe->steps > kMaxRecipeSteps) {
      throw ConfigError(str("After the rule ", rule, ", the tensor '", entry.name, "' takes ",
                            entry.recipe->steps, " steps; ", kMaxRecipeSteps, " are the limit."));
    }
  }
}

/// What a step is made of.
std::vector<RecipePointer> inputs_of(const decltype(TensorRecipe::step)& step) {
  if (const auto* transpose = std::get_if<TensorRecipe::Transpose>(&step)) return {transpose->of};
  if (const auto* part = std::get_if<TensorRecipe::Part>(&step)) return {part->of};
  if (const auto* whole = std::get_if<TensorRecipe::Join>(&step)) return whole->of;
  return {};
}

/// The names in the file that a recipe reads.
void add_sources(const TensorRecipe& recipe, std::vector<std::string>& keys) {
  if (const auto* file = std::get_if<TensorRecipe::FromFile>(&recipe.step))
    keys.push_back(file->key);
  for (const auto& input : inputs_of(recipe.step)) add_sources(*input, keys);
}

}  // namespace

RecipePointer make_recipe(decltype(TensorRecipe::step) step) {
  std::size_t steps = 1;
  for (const auto& input : inputs_of(step)) steps += input->steps;
  return std::make_shared<const TensorRecipe>(TensorRecipe{std::move(step), steps});
}

MappedTensors map_keys(const KeyMapping& mapping, const std::vector<std::string>& names,
                       const KeyMappingLimits& limits) {
  KeyTable table{.budget = MatchBudget(limits.steps), .room = limits.bytes};
  for (const auto& name : names) {
    table.entries.push_back({.name = name, .recipe = make_recipe(TensorRecipe::FromFile{name})});
  }
  MappedTensors result;
  for (const auto& rule : mapping._rules()) {
    const auto matched = rule->apply(table);
    result.report.rules.push_back({.rule = rule->description, .matched = matched});
    check_table(table, rule->description);
  }
  std::unordered_map<std::string_view, const KeyEntry*> seen;
  for (const auto& entry : table.entries) {
    const auto [other, is_new] = seen.emplace(entry.name, &entry);
    if (!is_new) {
      std::vector<std::string> keys;
      add_sources(*other->second->recipe, keys);
      add_sources(*entry.recipe, keys);
      throw ConfigError(str("The key mapping gives the name '", entry.name,
                            "' to two tensors, made of ", join(keys),
                            ". Drop one, or make the patterns more exact."));
    }
    if (!entry.matched) result.report.unmatched.push_back(entry.name);
  }
  result.report.incomplete = std::move(table.incomplete);
  for (auto& entry : table.entries) {
    result.tensors.push_back({std::move(entry.name), std::move(entry.recipe)});
  }
  return result;
}

}  // namespace detail::formats
}  // namespace accelerate
