// The few flags of an example program.
#pragma once

#include <accelerate/enums.h>
#include <accelerate/errors.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace examples {

/// A flag and the variable that its value goes to: numbers from `least` on, text, true or false, or
/// one of the library's enumerations.
class Flag {
 public:
  template <class T>
  Flag(std::string name, T& target, std::int64_t least = 1)
      : name_(std::move(name)),
        least_(least),
        usual_(describe(target)),
        set_([this, &target](std::string_view text) { read(text, target); }) {}
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }
  /// What the variable had before it was set.
  [[nodiscard]] const std::string& usual() const { return usual_; }
  void set(std::string_view text) const { set_(text); }

 private:
  void read(std::string_view text, std::string& target) const { target = text; }
  void read(std::string_view text, bool& target) const {
    if (text != "true" && text != "false") {
      throw accelerate::ConfigError(name_ + " is '" + std::string(text) +
                                    "'. Choose one of: true, false.");
    }
    target = text == "true";
  }
  void read(std::string_view text, std::int64_t& target) const {
    read_number(text, target, "a whole number");
  }
  void read(std::string_view text, double& target) const { read_number(text, target, "a number"); }
  template <class T>
  void read_number(std::string_view text, T& target, const std::string& kind) const {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), target);
    const bool is_one = error == std::errc() && end == text.data() + text.size();
    if (!is_one || !(target >= static_cast<T>(least_))) {
      throw accelerate::ConfigError(name_ + " is '" + std::string(text) + "', which is not " +
                                    kind + " from " + std::to_string(least_) + " on.");
    }
  }
  template <class E>
    requires std::is_enum_v<E>
  void read(std::string_view text, std::optional<E>& target) const {
    target = accelerate::from_string<E>(text, name_);
  }

  static std::string describe(const std::string& value) { return value; }
  static std::string describe(bool value) { return value ? "true" : "false"; }
  static std::string describe(std::int64_t value) { return std::to_string(value); }
  static std::string describe(double value) {
    std::ostringstream text;
    text << value;
    return text.str();
  }
  template <class E>
  static std::string describe(const std::optional<E>& value) {
    return value ? std::string(accelerate::to_string(*value)) : "";
  }

  std::string name_;
  std::int64_t least_;
  std::string usual_;
  std::function<void(std::string_view)> set_;
};

/// Reads `--flag value` pairs. Throws `ConfigError`, which says what there is, for anything else;
/// `--help` prints it and ends the program.
inline void read_arguments(int argc, char** argv, std::initializer_list<Flag> flags) {
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--help") {
      std::cout << "Flags, and what they are unless given:\n";
      for (const auto& flag : flags) {
        std::cout << "  " << flag.name() << ' '
                  << (flag.usual().empty() ? "(nothing)" : flag.usual()) << '\n';
      }
      std::exit(0);
    }
    const Flag* found = nullptr;
    std::string known;
    for (const auto& flag : flags) {
      if (flag.name() == name) found = &flag;
      known += (known.empty() ? "" : ", ") + flag.name();
    }
    if (!found) {
      throw accelerate::ConfigError("'" + std::string(name) + "' is not a flag of this program. " +
                                    "Choose from: " + known + ".");
    }
    if (i + 1 == argc) throw accelerate::ConfigError(found->name() + " needs a value behind it.");
    found->set(argv[i + 1]);
  }
}

}  // namespace examples
