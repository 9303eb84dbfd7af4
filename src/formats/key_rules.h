// src/formats/key_rules.h - what a rule of a key mapping works on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
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
  /// As a report shows it.
  std::string description;
  /// Changes the table. Returns the number of names that it matched.
  std::function<std::int64_t(KeyTable&)> apply;
};

using RulePointer = std::shared_ptr<const KeyRule>;

}  // namespace accelerate::detail::formats
