// src/formats/key_rules.h - the rules of a key mapping.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/key_mapping.h"
#include "formats/pattern.h"

namespace accelerate::detail::formats {

/// A tensor on its way through the rules.
struct KeyEntry {
  std::string name;
  RecipePointer recipe;
  bool matched = false;  ///< by a rule so far
};

/// What rules work on.
struct KeyTable {
  std::vector<KeyEntry> entries = {};
  std::vector<std::string> incomplete = {};
  MatchBudget budget;
  /// What all rules together may still add to the table, in bytes.
  std::size_t room;

  /// To be called before `bytes` are added. Throws `ConfigError` when the room is used up.
  void make_room(std::size_t bytes);
};

class KeyRule {
 public:
  KeyRule() = default;
  virtual ~KeyRule();
  KeyRule(const KeyRule&) = delete;
  KeyRule& operator=(const KeyRule&) = delete;

  /// As a report shows it.
  [[nodiscard]] virtual std::string describe() const = 0;
  /// Changes the table. Returns the number of names that it matched.
  virtual std::int64_t apply(KeyTable& table) const = 0;
};

using RulePointer = std::shared_ptr<const KeyRule>;

[[nodiscard]] RulePointer strip_prefix_rule(std::string prefix);
[[nodiscard]] RulePointer add_prefix_rule(std::string prefix);
[[nodiscard]] RulePointer rename_rule(std::string from, std::string to);
[[nodiscard]] RulePointer replace_rule(std::string_view pattern, std::string_view replacement);
[[nodiscard]] RulePointer transpose_rule(std::string_view pattern, std::int64_t dim0,
                                         std::int64_t dim1);
[[nodiscard]] RulePointer split_rule(std::string_view pattern, const std::vector<std::string>& into,
                                     const SplitTensorOptions& options);
[[nodiscard]] RulePointer join_rule(const std::vector<std::string>& patterns, std::string_view into,
                                    std::int64_t dim);
[[nodiscard]] RulePointer drop_rule(std::string_view pattern);

}  // namespace accelerate::detail::formats
