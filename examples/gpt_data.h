// Text as bytes, cut into windows: what a language model is trained on.
#pragma once

#include <accelerate/errors.h>
#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "dice.h"

namespace examples {

/// The bytes of a file.
inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw accelerate::ConfigError("'" + path + "' cannot be read. Name a text file.");
  return {std::istreambuf_iterator<char>(file), {}};
}

/// `count` sentences of a small grammar: a text with something to learn, the same everywhere.
inline std::string make_text(std::int64_t count, std::uint64_t seed) {
  static constexpr std::array<std::string_view, 8> kNames = {
      "the old fox", "a small owl",  "the miller", "her sister",
      "the captain", "a tired mule", "the river",  "our teacher"};
  static constexpr std::array<std::string_view, 6> kVerbs = {"watches", "follows",    "remembers",
                                                             "carries", "listens to", "forgets"};
  static constexpr std::array<std::string_view, 6> kEnds = {
      "in the morning", "behind the mill", "without a word", "all summer", "", ""};
  std::string text;
  for (std::int64_t i = 0; i < count; ++i) {
    Dice dice(seed, static_cast<std::uint64_t>(i));
    const auto one_of = [&](const auto& words) { return words[dice.below(std::ssize(words))]; };
    const auto add = [&](std::string_view word) {
      if (!word.empty()) text.append(text.empty() || text.back() == '\n' ? "" : " ").append(word);
    };
    add(one_of(kNames));
    add(one_of(kVerbs));
    add(one_of(kNames));
    add(one_of(kEnds));
    text += ".\n";
  }
  return text;
}

/// The bytes of a text as tokens, [size].
inline torch::Tensor encode(std::string_view text) {
  auto tokens = torch::empty({std::ssize(text)}, torch::kInt64);
  auto* token = tokens.data_ptr<std::int64_t>();
  for (const char c : text) *token++ = static_cast<unsigned char>(c);
  return tokens;
}

/// A text in windows of `block` tokens, side by side. A sample is a window, and the same window one
/// token on: what the model sees and what it is to say.
class TextWindows {
 public:
  TextWindows(std::string_view text, std::int64_t block) : tokens_(encode(text)), block_(block) {
    if (size() < 1) {
      throw accelerate::ConfigError("The text has " + std::to_string(text.size()) +
                                    " bytes; a window needs " + std::to_string(block + 1) + ".");
    }
  }

  [[nodiscard]] std::int64_t size() const { return (tokens_.numel() - 1) / block_; }
  [[nodiscard]] std::pair<torch::Tensor, torch::Tensor> get(std::size_t index) const {
    const auto start = static_cast<std::int64_t>(index) * block_;
    return {tokens_.slice(0, start, start + block_),
            tokens_.slice(0, start + 1, start + block_ + 1)};
  }

 private:
  torch::Tensor tokens_;
  std::int64_t block_;
};

/// The last tenth of a text is kept back for evaluation.
inline std::pair<std::string_view, std::string_view> split_text(std::string_view text) {
  const auto cut = text.size() - text.size() / 10;
  return {text.substr(0, cut), text.substr(cut)};
}

}  // namespace examples
