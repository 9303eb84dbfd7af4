// accelerate/checkpoint/key_mapping.h - weights whose names or layouts differ between two models.
//
// Part of accelerate/checkpoint.h. Rules are applied in order to the names in a file; each rule
// sees what the ones before it made.
//
//     KeyMapping mapping;
//     mapping.strip_prefix("transformer.")
//         .replace(R"(^h\.(\d+)\.)", R"(blocks.\1.)")
//         .transpose(R"(.*\.(c_attn|c_proj)\.weight)")
//         .split(R"((.*)\.c_attn\.(weight|bias))", {R"(\1.q.\2)", R"(\1.k.\2)", R"(\1.v.\2)"});
//     auto report = load_checkpoint_in_model(*model, "gpt2", {.key_mapping = mapping});
//
// Patterns have Python's syntax, without what needs backtracking (docs/formats.md lists it), and
// take linear time. \d, \w, \s are ASCII. In replacements \1 to \9 are groups.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate {

namespace detail::formats {
class KeyRule;
}

/// What the rules of a mapping did.
struct ACCELERATE_API KeyMappingReport {
  struct Rule {
    std::string rule;          ///< for example "strip_prefix 'model.'"
    std::int64_t matched = 0;  ///< names; for `join` each part counts
    bool operator==(const Rule&) const = default;
  };
  std::vector<Rule> rules = {};  ///< in order
  /// Names that no rule has matched. They keep their names.
  std::vector<std::string> unmatched = {};
  /// Names that a `join` matched, while other parts of the same tensor are missing. They stay.
  std::vector<std::string> incomplete = {};

  /// A line per rule and per list, for people.
  [[nodiscard]] std::string to_string() const;
  bool operator==(const KeyMappingReport&) const = default;
};

struct SplitTensorOptions {
  std::int64_t dim = 0;
  /// The length of each part along `dim`. Empty: all parts are equal.
  std::vector<std::int64_t> sizes = {};
};

/// Rules that turn the names and tensors of a file into those of a model.
///
/// Each function that adds a rule throws `ConfigError` for a pattern or a replacement that cannot
/// be used. Patterns of `transpose`, `split`, `join` and `drop` must match the whole name.
class ACCELERATE_API KeyMapping {
 public:
  /// Takes the prefix off the names that have it.
  KeyMapping& strip_prefix(std::string prefix);
  /// Puts the prefix before every name.
  KeyMapping& add_prefix(std::string prefix);
  /// Exactly this name.
  KeyMapping& rename(std::string from, std::string to);
  /// Python's `re.sub(pattern, replacement, name)`.
  KeyMapping& replace(std::string_view pattern, std::string_view replacement);
  /// Swaps two dimensions; negative ones count from the last.
  KeyMapping& transpose(std::string_view pattern, std::int64_t dim0 = 0, std::int64_t dim1 = 1);
  /// Cuts a fused tensor into parts.
  KeyMapping& split(std::string_view pattern, const std::vector<std::string>& into,
                    const SplitTensorOptions& options = {});
  /// Concatenates tensors, one per pattern and in their order, that give one name.
  ///
  ///     mapping.join({R"((.*)\.q)", R"((.*)\.k)", R"((.*)\.v)"}, R"(\1.qkv)");
  KeyMapping& join(const std::vector<std::string>& patterns, std::string_view into,
                   std::int64_t dim = 0);
  /// Leaves the tensors out.
  KeyMapping& drop(std::string_view pattern);

  /// Rules from a YAML or JSON file (docs/formats.md). Throws `ConfigError` with the file, the rule
  /// and the problem.
  [[nodiscard]] static KeyMapping from_file(const std::filesystem::path& path);
  /// The same from the list in such a file. `source` names it in messages.
  [[nodiscard]] static KeyMapping from_value(const Value& rules,
                                             std::string_view source = "The key mapping");

  [[nodiscard]] bool empty() const noexcept { return rules_.empty(); }
  /// For this library.
  [[nodiscard]] const std::vector<std::shared_ptr<const detail::formats::KeyRule>>& _rules() const {
    return rules_;
  }

 private:
  KeyMapping& add(std::shared_ptr<const detail::formats::KeyRule> rule);

  std::vector<std::shared_ptr<const detail::formats::KeyRule>> rules_;
};

}  // namespace accelerate
