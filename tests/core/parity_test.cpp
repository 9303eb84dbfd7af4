// docs/parity.md has a row for every public name of Python Accelerate.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "support/reference_path.h"

namespace accelerate {
namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// The words in the first column of all tables of a Markdown file.
std::set<std::string> first_column_words(std::istream& markdown) {
  std::set<std::string> words;
  for (std::string line; std::getline(markdown, line);) {
    if (!line.starts_with('|')) continue;
    const auto end = std::find(line.begin() + 1, line.end(), '|');
    for (auto at = line.begin(); at != end;) {
      const auto begin = std::find_if(at, end, is_word);
      at = std::find_if_not(begin, end, is_word);
      words.emplace(begin, at);
    }
  }
  return words;
}

TEST(Parity, HasARowForEveryPublicNameOfPython) {
  std::ifstream stored(test::reference_path("names/names.json"));
  std::ifstream page(test::reference_path("../../docs/parity.md"));
  ASSERT_TRUE(stored && page);
  const auto rows = first_column_words(page);
  const auto packages = nlohmann::json::parse(stored);
  for (const auto* package : {"accelerate", "accelerate.utils"}) {
    const auto names = packages.at(package).get<std::vector<std::string>>();
    EXPECT_GE(names.size(), 25U) << package;
    for (const auto& name : names) {
      EXPECT_TRUE(rows.contains(name))
          << "docs/parity.md has no row for " << package << "." << name;
    }
  }
}

}  // namespace
}  // namespace accelerate
