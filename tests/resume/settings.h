// tests/resume/settings.h - "name=value" words of a program.
#pragma once

#include <map>
#include <string>

namespace accelerate::test {

struct Settings {
  Settings(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      given[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
    }
  }

  [[nodiscard]] std::string text(const std::string& name, const std::string& otherwise) const {
    const auto found = given.find(name);
    return found == given.end() ? otherwise : found->second;
  }
  [[nodiscard]] int number(const std::string& name, int otherwise) const {
    return std::stoi(text(name, std::to_string(otherwise)));
  }

  std::map<std::string, std::string> given = {};
};

}  // namespace accelerate::test
