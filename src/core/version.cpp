#include "core/version.h"

#include <algorithm>
#include <array>
#include <regex>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

// The regular expression needs stack by the length of the text.
constexpr std::size_t kLongestVersion = 1000;

// Epoch, release, word and number of a pre-release, post release (two forms), dev release, local.
const std::regex& pattern() {
  static const std::regex kPattern(R"(v?(?:(\d+)!)?(\d+(?:\.\d+)*))"
                                   R"((?:[-_.]?(alpha|a|beta|b|preview|pre|c|rc)[-_.]?(\d*))?)"
                                   R"((?:-(\d+)|[-_.]?(?:post|rev|r)[-_.]?(\d*))?)"
                                   R"((?:[-_.]?dev[-_.]?(\d*))?)"
                                   R"((?:\+([a-z0-9]+(?:[-_.][a-z0-9]+)*))?)");
  return kPattern;
}

Version::Number number(const std::string& digits) {
  const auto first = std::min(digits.find_first_not_of('0'), digits.size());
  return {digits.size() - first, digits.substr(first)};
}

int stage(const std::string& word) { return word[0] == 'a' ? 1 : word[0] == 'b' ? 2 : 3; }

}  // namespace

std::optional<Version> Version::try_parse(std::string_view text) {
  const auto lower = to_lower(trim(text));
  std::smatch match;
  if (lower.size() > kLongestVersion || !std::regex_match(lower, match, pattern()))
    return std::nullopt;
  const auto& [whole, epoch, release, pre, pre_number, post, post_word, dev, local] =
      std::to_array<std::ssub_match>({match[0], match[1], match[2], match[3], match[4], match[5],
                                      match[6], match[7], match[8]});
  Version version;
  version.epoch = number(epoch);
  for (const auto& part : split(release.str(), '.')) version.release.push_back(number(part));
  while (!version.release.empty() && version.release.back().first == 0) version.release.pop_back();
  if (post.matched || post_word.matched) version.post = number(post.str() + post_word.str());
  version.dev = {!dev.matched, number(dev)};
  version.pre = {pre.matched                    ? stage(pre)
                 : dev.matched && !version.post ? 0
                                                : 4,
                 number(pre_number)};
  if (!local.matched) return version;
  std::string parts = local;
  std::ranges::replace_if(parts, [](char c) { return c == '-' || c == '_'; }, '.');
  for (const auto& part : split(parts, '.')) {
    if (part.find_first_not_of("0123456789") == std::string::npos) {
      version.local.emplace_back(number(part));
    } else {
      version.local.emplace_back(part);
    }
  }
  return version;
}

Version Version::parse(std::string_view text) {
  if (auto version = try_parse(text)) return *std::move(version);
  throw ArgumentError(str("'", text,
                          "' is not a version. Expected numbers such as 2.11.0, 2.11.0rc1 or "
                          "2.11.0+cu130."));
}

bool compare(const Version& a, std::string_view operation, const Version& b) {
  const auto order = a <=> b;
  if (operation == ">") return order > 0;
  if (operation == ">=") return order >= 0;
  if (operation == "==") return order == 0;
  if (operation == "!=") return order != 0;
  if (operation == "<=") return order <= 0;
  if (operation == "<") return order < 0;
  throw ArgumentError(
      str("The operation must be one of >, >=, ==, !=, <=, <, not '", operation, "'."));
}

}  // namespace accelerate::detail::inline core
