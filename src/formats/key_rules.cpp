// The rules of a key mapping: what `KeyMapping` is told, and what it makes of the names in a file.
#include "formats/key_rules.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;
using detail::formats::KeyEntry;
using detail::formats::KeyRule;
using detail::formats::KeyTable;
using detail::formats::make_recipe;
using detail::formats::MatchBudget;
using detail::formats::Pattern;
using detail::formats::RecipePointer;
using detail::formats::Replacement;
using detail::formats::RulePointer;
using detail::formats::TensorRecipe;

constexpr std::size_t kMaxParts = 64;
/// What an entry of the table takes beside its name.
constexpr std::size_t kEntryBytes = 256;

RulePointer make_rule(std::string description, std::function<std::int64_t(KeyTable&)> apply) {
  return std::make_shared<KeyRule>(KeyRule{std::move(description), std::move(apply)});
}

/// Calls `change` for each entry; returns how often it returned true.
template <class Change>
std::int64_t change_each(KeyTable& table, const Change& change) {
  std::int64_t matched = 0;
  for (auto& entry : table.entries) {
    if (!change(entry)) continue;
    entry.matched = true;
    ++matched;
  }
  return matched;
}

/// Gives single names other names. `renamed` returns nullopt if the rule does not match.
template <class Renamed>
RulePointer renaming_rule(std::string description, Renamed renamed) {
  return make_rule(std::move(description), [renamed = std::move(renamed)](KeyTable& table) {
    return change_each(table, [&](KeyEntry& entry) {
      std::optional<std::string> name = renamed(entry.name, table.budget);
      if (!name) return false;
      table.make_room(name->size() - std::min(name->size(), entry.name.size()));
      entry.name = *std::move(name);
      return true;
    });
  });
}

struct JoinRule {
  std::string description;
  std::vector<Pattern> sources;
  std::vector<Replacement> targets;  ///< of each pattern
  std::int64_t dim;

  std::int64_t operator()(KeyTable& table) const {
    // Per new name: which entry is which part.
    Groups groups;
    for (std::size_t i = 0; i < table.entries.size(); ++i) note_part(table, i, groups);

    std::int64_t matched = 0;
    std::vector<bool> taken(table.entries.size(), false);
    for (auto& [name, parts] : groups) {
      const bool complete =
          std::ranges::all_of(parts, [](const auto& at) { return at.has_value(); });
      if (!complete) {
        for (const auto& at : parts) {
          if (at) table.incomplete.push_back(table.entries[*at].name);
        }
        continue;
      }
      std::vector<RecipePointer> of;
      for (const auto& at : parts) of.push_back(table.entries[*at].recipe);
      for (const auto& at : parts) taken[*at] = true;
      // Where the first part was, so that the order stays that of the file.
      const auto first = *std::ranges::min_element(parts);
      table.entries[*first] = {.name = name,
                               .recipe = make_recipe(TensorRecipe::Join{std::move(of), dim}),
                               .matched = true};
      taken[*first] = false;
      matched += static_cast<std::int64_t>(parts.size());
    }
    std::vector<KeyEntry> left;
    for (std::size_t i = 0; i < table.entries.size(); ++i) {
      if (!taken[i]) left.push_back(std::move(table.entries[i]));
    }
    table.entries = std::move(left);
    return matched;
  }

 private:
  using Groups = std::map<std::string, std::vector<std::optional<std::size_t>>>;

  void note_part(KeyTable& table, std::size_t index, Groups& groups) const {
    const auto& name = table.entries[index].name;
    for (std::size_t part = 0; part < sources.size(); ++part) {
      const auto match = sources[part].full_match(name, table.budget);
      if (!match) continue;
      auto target = targets[part].expand(*match);
      table.make_room(target.size() + sources.size() * sizeof(std::optional<std::size_t>));
      auto& parts = groups.try_emplace(std::move(target), sources.size()).first->second;
      if (parts[part]) {
        throw ConfigError(str("The rule ", description, " finds part ", part + 1, " of '",
                              targets[part].expand(*match), "' twice: '",
                              table.entries[*parts[part]].name, "' and '", name,
                              "'. Make its patterns more exact."));
      }
      parts[part] = index;
      return;
    }
  }
};

}  // namespace

void detail::formats::KeyTable::make_room(std::size_t bytes) {
  if (bytes > room) {
    throw ConfigError(
        "The rules of the key mapping make too many or too long names. Make their patterns more "
        "exact.");
  }
  room -= bytes;
}

KeyMapping& KeyMapping::strip_prefix(std::string prefix) {
  const auto description = str("strip_prefix '", prefix, "'");
  return add(renaming_rule(
      description, [prefix = std::move(prefix)](const std::string& name, MatchBudget&) {
        return name.starts_with(prefix) ? std::optional(name.substr(prefix.size())) : std::nullopt;
      }));
}

KeyMapping& KeyMapping::add_prefix(std::string prefix) {
  const auto description = str("add_prefix '", prefix, "'");
  return add(renaming_rule(description,
                           [prefix = std::move(prefix)](const std::string& name, MatchBudget&) {
                             return prefix + name;
                           }));
}

KeyMapping& KeyMapping::rename(std::string from, std::string to) {
  const auto description = str("rename '", from, "' to '", to, "'");
  return add(renaming_rule(description, [from = std::move(from), to = std::move(to)](
                                            const std::string& name, MatchBudget&) {
    return name == from ? std::optional(to) : std::nullopt;
  }));
}

KeyMapping& KeyMapping::replace(std::string_view pattern, std::string_view replacement) {
  const Pattern from(pattern);
  const Replacement to(replacement, from);
  return add(renaming_rule(str("replace '", pattern, "' by '", replacement, "'"),
                           [from, to](const std::string& name, MatchBudget& budget) {
                             return substitute(from, to, name, budget);
                           }));
}

KeyMapping& KeyMapping::transpose(std::string_view pattern, std::int64_t dim0, std::int64_t dim1) {
  const auto description = str("transpose '", pattern, "', dimensions ", dim0, " and ", dim1);
  return add(make_rule(description, [from = Pattern(pattern), dim0, dim1](KeyTable& table) {
    return change_each(table, [&](KeyEntry& entry) {
      if (!from.full_match(entry.name, table.budget)) return false;
      entry.recipe = make_recipe(TensorRecipe::Transpose{entry.recipe, dim0, dim1});
      return true;
    });
  }));
}

KeyMapping& KeyMapping::split(std::string_view pattern, const std::vector<std::string>& into,
                              const SplitTensorOptions& options) {
  const Pattern from(pattern);
  if (into.empty() || into.size() > kMaxParts) {
    throw ConfigError(str("The split of '", pattern, "' has ", into.size(),
                          " parts. Give the names of 1 to ", kMaxParts, "."));
  }
  if (!options.sizes.empty() && options.sizes.size() != into.size()) {
    throw ConfigError(str("The split of '", pattern, "' has ", into.size(), " parts and ",
                          options.sizes.size(), " sizes. Give one size per part, or none."));
  }
  if (std::ranges::any_of(options.sizes, [](std::int64_t size) { return size < 0; })) {
    throw ConfigError(str("The split of '", pattern, "' has the sizes ",
                          detail::join(options.sizes), ". Sizes are not negative."));
  }
  std::vector<Replacement> parts;
  for (const auto& part : into) parts.emplace_back(part, from);
  const auto description = str("split '", pattern, "' into ", into.size());
  return add(make_rule(description, [from, parts, options](KeyTable& table) {
    std::int64_t matched = 0;
    std::vector<KeyEntry> entries;
    for (auto& entry : table.entries) {
      const auto match = from.full_match(entry.name, table.budget);
      if (!match) {
        entries.push_back(std::move(entry));
        continue;
      }
      ++matched;
      for (std::size_t part = 0; part < parts.size(); ++part) {
        auto name = parts[part].expand(*match);
        table.make_room(name.size() + kEntryBytes);
        entries.push_back({.name = std::move(name),
                           .recipe = make_recipe(TensorRecipe::Part{entry.recipe, options.dim, part,
                                                                    parts.size(), options.sizes}),
                           .matched = true});
      }
    }
    table.entries = std::move(entries);
    return matched;
  }));
}

KeyMapping& KeyMapping::join(const std::vector<std::string>& patterns, std::string_view into,
                             std::int64_t dim) {
  if (patterns.empty() || patterns.size() > kMaxParts) {
    throw ConfigError(str("The join into '", into, "' has ", patterns.size(),
                          " patterns. Give 1 to ", kMaxParts, "."));
  }
  std::vector<Pattern> sources;
  std::vector<Replacement> targets;
  std::vector<std::string> quoted;
  for (const auto& pattern : patterns) {
    sources.emplace_back(pattern);
    targets.emplace_back(into, sources.back());
    quoted.push_back(str("'", pattern, "'"));
  }
  const auto description = str("join ", detail::join(quoted), " into '", into, "'");
  return add(
      make_rule(description, JoinRule{description, std::move(sources), std::move(targets), dim}));
}

KeyMapping& KeyMapping::drop(std::string_view pattern) {
  return add(make_rule(str("drop '", pattern, "'"), [from = Pattern(pattern)](KeyTable& table) {
    return static_cast<std::int64_t>(std::erase_if(table.entries, [&](const KeyEntry& entry) {
      return from.full_match(entry.name, table.budget).has_value();
    }));
  }));
}

}  // namespace accelerate
