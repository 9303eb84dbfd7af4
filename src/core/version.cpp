#include "core/version.h"

#include <array>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

constexpr std::string_view kDigits = "0123456789";

std::strong_ordering compare_release(const std::vector<Digits>& a, const std::vector<Digits>& b) {
  static const Digits zero;
  for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const auto& left = i < a.size() ? a[i] : zero;
    const auto& right = i < b.size() ? b[i] : zero;
    if (const auto order = left <=> right; order != 0) return order;
  }
  return std::strong_ordering::equal;
}

}  // namespace

Digits::Digits(std::string_view text) {
  const auto first = text.find_first_not_of('0');
  if (first != std::string_view::npos) text_ = text.substr(first);
}

std::strong_ordering Digits::operator<=>(const Digits& other) const noexcept {
  if (const auto order = text_.size() <=> other.text_.size(); order != 0) return order;
  return text_.compare(other.text_) <=> 0;
}

// Reads a version from left to right. Each `take_*` either takes its part or leaves the text alone.
class VersionParser {
 public:
  explicit VersionParser(std::string_view text) : lower_(to_lower(trim(text))), rest_(lower_) {}

  std::optional<Version> run() {
    Version version;
    take("v");
    if (!take_release(version)) return std::nullopt;
    take_pre(version);
    take_post(version);
    take_dev(version);
    if (take("+") && !take_local(version)) return std::nullopt;
    if (!rest_.empty()) return std::nullopt;
    return version;
  }

 private:
  bool take(std::string_view word) {
    if (!rest_.starts_with(word)) return false;
    rest_.remove_prefix(word.size());
    return true;
  }

  void take_separator() {
    if (!rest_.empty() && (rest_[0] == '.' || rest_[0] == '_' || rest_[0] == '-')) {
      rest_.remove_prefix(1);
    }
  }

  std::optional<Digits> take_number() {
    const auto length = std::min(rest_.find_first_not_of(kDigits), rest_.size());
    if (length == 0) return std::nullopt;
    Digits number(rest_.substr(0, length));
    rest_.remove_prefix(length);
    return number;
  }

  bool take_release(Version& version) {
    auto number = take_number();
    if (!number) return false;
    if (take("!")) {
      version.epoch_ = *std::move(number);
      number = take_number();
      if (!number) return false;
    }
    version.release_.push_back(*std::move(number));
    for (auto before = rest_; take("."); before = rest_) {
      number = take_number();
      if (!number) {
        rest_ = before;
        break;
      }
      version.release_.push_back(*std::move(number));
    }
    return true;
  }

  // [sep] one of `words` [sep] [number]; the number is 0 when it is missing.
  template <std::size_t N>
  std::optional<std::pair<std::size_t, Digits>> take_word(
      const std::array<std::string_view, N>& words) {
    const auto before = rest_;
    take_separator();
    for (std::size_t i = 0; i < N; ++i) {
      if (!take(words[i])) continue;
      take_separator();
      return std::pair{i, take_number().value_or(Digits())};
    }
    rest_ = before;
    return std::nullopt;
  }

  void take_pre(Version& version) {
    using Stage = Version::Pre::Stage;
    // Longer words first where one begins with another.
    static constexpr std::array<std::string_view, 8> kWords{"alpha",   "a",   "beta", "b",
                                                            "preview", "pre", "c",    "rc"};
    static constexpr std::array<Stage, 8> kStages{
        Stage::kAlpha,     Stage::kAlpha,     Stage::kBeta,      Stage::kBeta,
        Stage::kCandidate, Stage::kCandidate, Stage::kCandidate, Stage::kCandidate};
    if (auto taken = take_word(kWords)) {
      version.pre_ = {kStages[taken->first], std::move(taken->second)};
    }
  }

  void take_post(Version& version) {
    const auto before = rest_;
    if (take("-")) {
      version.post_ = take_number();
      if (version.post_) return;
      rest_ = before;
    }
    static constexpr std::array<std::string_view, 3> kWords{"post", "rev", "r"};
    if (auto taken = take_word(kWords)) version.post_ = std::move(taken->second);
  }

  void take_dev(Version& version) {
    static constexpr std::array<std::string_view, 1> kWords{"dev"};
    if (auto taken = take_word(kWords)) version.dev_ = std::move(taken->second);
  }

  bool take_local(Version& version) {
    do {
      const auto length =
          std::min(rest_.find_first_not_of("0123456789abcdefghijklmnopqrstuvwxyz"), rest_.size());
      if (length == 0) return false;
      const auto part = rest_.substr(0, length);
      rest_.remove_prefix(length);
      if (part.find_first_not_of(kDigits) == std::string_view::npos) {
        version.local_.emplace_back(Digits(part));
      } else {
        version.local_.emplace_back(std::string(part));
      }
    } while (take(".") || take("-") || take("_"));
    return true;
  }

  std::string lower_;
  std::string_view rest_;
};

std::optional<Version> Version::try_parse(std::string_view text) {
  return VersionParser(text).run();
}

Version Version::parse(std::string_view text) {
  if (auto version = try_parse(text)) return *std::move(version);
  throw ArgumentError(str("'", text,
                          "' is not a version. Expected numbers such as 2.11.0, 2.11.0rc1 or "
                          "2.11.0+cu130."));
}

std::string Version::public_part() const {
  std::string out;
  if (!epoch_.is_zero()) out += epoch_.text() + "!";
  for (std::size_t i = 0; i < release_.size(); ++i) {
    if (i > 0) out += '.';
    out += release_[i].text();
  }
  if (pre_) {
    static constexpr std::array<std::string_view, 3> kStages{"a", "b", "rc"};
    out += str(kStages[static_cast<std::size_t>(pre_->stage)], pre_->number.text());
  }
  if (post_) out += ".post" + post_->text();
  if (dev_) out += ".dev" + dev_->text();
  return out;
}

std::string Version::to_string() const {
  std::string out = public_part();
  for (std::size_t i = 0; i < local_.size(); ++i) {
    out += i == 0 ? '+' : '.';
    const auto* number = std::get_if<Digits>(&local_[i]);
    out += number != nullptr ? number->text() : std::get<std::string>(local_[i]);
  }
  return out;
}

std::strong_ordering Version::operator<=>(const Version& other) const {
  // A bare development release comes before all pre-releases, a final one after them.
  const auto pre_rank = [](const Version& v) {
    if (v.pre_) return 1 + static_cast<int>(v.pre_->stage);
    return v.dev_ && !v.post_ ? 0 : 4;
  };
  static const Digits zero;
  const auto pre_number = [](const Version& v) -> const Digits& {
    return v.pre_ ? v.pre_->number : zero;
  };
  if (const auto order = epoch_ <=> other.epoch_; order != 0) return order;
  if (const auto order = compare_release(release_, other.release_); order != 0) return order;
  if (const auto order = pre_rank(*this) <=> pre_rank(other); order != 0) return order;
  if (const auto order = pre_number(*this) <=> pre_number(other); order != 0) return order;
  if (const auto order = post_ <=> other.post_; order != 0) return order;  // none comes first
  if (dev_.has_value() != other.dev_.has_value())
    return other.dev_.has_value() <=> dev_.has_value();
  if (const auto order = dev_ <=> other.dev_; order != 0) return order;
  return local_ <=> other.local_;
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

}  // namespace accelerate::detail
