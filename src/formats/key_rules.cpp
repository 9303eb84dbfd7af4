#include "formats/key_rules.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::size_t kMaxParts = 64;
/// What an entry of the table takes beside its name.
constexpr std::size_t kEntryBytes = 256;

/// Rules that give single names other names.
class RenamingRule : public KeyRule {
 public:
  std::int64_t apply(KeyTable& table) const override {
    std::int64_t matched = 0;
    for (auto& entry : table.entries) {
      auto name = renamed(entry.name, table.budget);
      if (!name) continue;
      table.make_room(name->size() - std::min(name->size(), entry.name.size()));
      entry.name = std::move(*name);
      entry.matched = true;
      ++matched;
    }
    return matched;
  }

 protected:
  /// nullopt if the rule does not match.
  [[nodiscard]] virtual std::optional<std::string> renamed(const std::string& name,
                                                           MatchBudget& budget) const = 0;
};

class StripPrefix final : public RenamingRule {
 public:
  explicit StripPrefix(std::string prefix) : prefix_(std::move(prefix)) {}
  [[nodiscard]] std::string describe() const override {
    return str("strip_prefix '", prefix_, "'");
  }

 private:
  [[nodiscard]] std::optional<std::string> renamed(const std::string& name,
                                                   MatchBudget&) const override {
    if (!name.starts_with(prefix_)) return std::nullopt;
    return name.substr(prefix_.size());
  }
  std::string prefix_;
};

class AddPrefix final : public RenamingRule {
 public:
  explicit AddPrefix(std::string prefix) : prefix_(std::move(prefix)) {}
  [[nodiscard]] std::string describe() const override { return str("add_prefix '", prefix_, "'"); }

 private:
  [[nodiscard]] std::optional<std::string> renamed(const std::string& name,
                                                   MatchBudget&) const override {
    return prefix_ + name;
  }
  std::string prefix_;
};

class Rename final : public RenamingRule {
 public:
  Rename(std::string from, std::string to) : from_(std::move(from)), to_(std::move(to)) {}
  [[nodiscard]] std::string describe() const override {
    return str("rename '", from_, "' to '", to_, "'");
  }

 private:
  [[nodiscard]] std::optional<std::string> renamed(const std::string& name,
                                                   MatchBudget&) const override {
    return name == from_ ? std::optional(to_) : std::nullopt;
  }
  std::string from_;
  std::string to_;
};

class Replace final : public RenamingRule {
 public:
  Replace(std::string_view pattern, std::string_view replacement)
      : pattern_(pattern), replacement_(replacement, pattern_) {}
  [[nodiscard]] std::string describe() const override {
    return str("replace '", pattern_.text(), "' by '", replacement_.text(), "'");
  }

 private:
  [[nodiscard]] std::optional<std::string> renamed(const std::string& name,
                                                   MatchBudget& budget) const override {
    return substitute(pattern_, replacement_, name, budget);
  }
  Pattern pattern_;
  Replacement replacement_;
};

class Transpose final : public KeyRule {
 public:
  Transpose(std::string_view pattern, std::int64_t dim0, std::int64_t dim1)
      : pattern_(pattern), dim0_(dim0), dim1_(dim1) {}
  [[nodiscard]] std::string describe() const override {
    return str("transpose '", pattern_.text(), "', dimensions ", dim0_, " and ", dim1_);
  }
  std::int64_t apply(KeyTable& table) const override {
    std::int64_t matched = 0;
    for (auto& entry : table.entries) {
      if (!pattern_.full_match(entry.name, table.budget)) continue;
      entry.recipe = make_recipe(TensorRecipe::Transpose{entry.recipe, dim0_, dim1_});
      entry.matched = true;
      ++matched;
    }
    return matched;
  }

 private:
  Pattern pattern_;
  std::int64_t dim0_;
  std::int64_t dim1_;
};

class Split final : public KeyRule {
 public:
  Split(std::string_view pattern, const std::vector<std::string>& into,
        const SplitTensorOptions& options)
      : pattern_(pattern), options_(options) {
    if (into.empty() || into.size() > kMaxParts) {
      throw ConfigError(str("The split of '", pattern, "' has ", into.size(),
                            " parts. Give the names of 1 to ", kMaxParts, "."));
    }
    if (!options.sizes.empty() && options.sizes.size() != into.size()) {
      throw ConfigError(str("The split of '", pattern, "' has ", into.size(), " parts and ",
                            options.sizes.size(), " sizes. Give one size per part, or none."));
    }
    if (std::ranges::any_of(options.sizes, [](std::int64_t size) { return size < 0; })) {
      throw ConfigError(str("The split of '", pattern, "' has the sizes ", join(options.sizes),
                            ". Sizes are not negative."));
    }
    for (const auto& part : into) into_.emplace_back(part, pattern_);
  }
  [[nodiscard]] std::string describe() const override {
    return str("split '", pattern_.text(), "' into ", into_.size());
  }
  std::int64_t apply(KeyTable& table) const override {
    std::int64_t matched = 0;
    std::vector<KeyEntry> entries;
    for (auto& entry : table.entries) {
      const auto match = pattern_.full_match(entry.name, table.budget);
      if (!match) {
        entries.push_back(std::move(entry));
        continue;
      }
      ++matched;
      for (std::size_t part = 0; part < into_.size(); ++part) {
        auto name = into_[part].expand(*match);
        table.make_room(name.size() + kEntryBytes);
        entries.push_back({.name = std::move(name),
                           .recipe = make_recipe(TensorRecipe::Part{
                               entry.recipe, options_.dim, part, into_.size(), options_.sizes}),
                           .matched = true});
      }
    }
    table.entries = std::move(entries);
    return matched;
  }

 private:
  Pattern pattern_;
  std::vector<Replacement> into_;
  SplitTensorOptions options_;
};

class Join final : public KeyRule {
 public:
  Join(const std::vector<std::string>& patterns, std::string_view into, std::int64_t dim)
      : dim_(dim) {
    if (patterns.empty() || patterns.size() > kMaxParts) {
      throw ConfigError(str("The join into '", into, "' has ", patterns.size(),
                            " patterns. Give 1 to ", kMaxParts, "."));
    }
    for (const auto& pattern : patterns) {
      parts_.emplace_back(pattern);
      into_.emplace_back(into, parts_.back());
    }
  }
  [[nodiscard]] std::string describe() const override {
    std::vector<std::string> patterns;
    for (const auto& part : parts_) patterns.push_back(str("'", part.text(), "'"));
    return str("join ", join(patterns), " into '", into_.front().text(), "'");
  }

  std::int64_t apply(KeyTable& table) const override {
    // Per new name: which entry is which part.
    std::map<std::string, std::vector<std::optional<std::size_t>>> groups;
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
                               .recipe = make_recipe(TensorRecipe::Join{std::move(of), dim_}),
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
    for (std::size_t part = 0; part < parts_.size(); ++part) {
      const auto match = parts_[part].full_match(name, table.budget);
      if (!match) continue;
      auto target = into_[part].expand(*match);
      table.make_room(target.size() + parts_.size() * sizeof(std::optional<std::size_t>));
      auto& parts = groups.try_emplace(std::move(target), parts_.size()).first->second;
      if (parts[part]) {
        throw ConfigError(str("The rule ", describe(), " finds part ", part + 1, " of '",
                              into_[part].expand(*match), "' twice: '",
                              table.entries[*parts[part]].name, "' and '", name,
                              "'. Make its patterns more exact."));
      }
      parts[part] = index;
      return;
    }
  }

  std::vector<Pattern> parts_;
  std::vector<Replacement> into_;
  std::int64_t dim_;
};

class Drop final : public KeyRule {
 public:
  explicit Drop(std::string_view pattern) : pattern_(pattern) {}
  [[nodiscard]] std::string describe() const override {
    return str("drop '", pattern_.text(), "'");
  }
  std::int64_t apply(KeyTable& table) const override {
    return static_cast<std::int64_t>(std::erase_if(table.entries, [&](const KeyEntry& entry) {
      return pattern_.full_match(entry.name, table.budget).has_value();
    }));
  }

 private:
  Pattern pattern_;
};

}  // namespace

void KeyTable::make_room(std::size_t bytes) {
  if (bytes > room) {
    throw ConfigError(
        "The rules of the key mapping make too many or too long names. Make their patterns more "
        "exact.");
  }
  room -= bytes;
}

KeyRule::~KeyRule() = default;

RulePointer strip_prefix_rule(std::string prefix) {
  return std::make_shared<StripPrefix>(std::move(prefix));
}
RulePointer add_prefix_rule(std::string prefix) {
  return std::make_shared<AddPrefix>(std::move(prefix));
}
RulePointer rename_rule(std::string from, std::string to) {
  return std::make_shared<Rename>(std::move(from), std::move(to));
}
RulePointer replace_rule(std::string_view pattern, std::string_view replacement) {
  return std::make_shared<Replace>(pattern, replacement);
}
RulePointer transpose_rule(std::string_view pattern, std::int64_t dim0, std::int64_t dim1) {
  return std::make_shared<Transpose>(pattern, dim0, dim1);
}
RulePointer split_rule(std::string_view pattern, const std::vector<std::string>& into,
                       const SplitTensorOptions& options) {
  return std::make_shared<Split>(pattern, into, options);
}
RulePointer join_rule(const std::vector<std::string>& patterns, std::string_view into,
                      std::int64_t dim) {
  return std::make_shared<Join>(patterns, into, dim);
}
RulePointer drop_rule(std::string_view pattern) { return std::make_shared<Drop>(pattern); }

}  // namespace accelerate::detail::formats
