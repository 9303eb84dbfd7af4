// The few flags of an example program.
#pragma once

#include <accelerate/enums.h>
#include <accelerate/errors.h>

#include <charconv>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

namespace examples {

/// A flag and the variable that its value goes to: whole numbers from 0 on, text, or one of the
/// library's enumerations.
class Flag {
 public:
  template <class T>
  Flag(std::string name, T& target)
      : name_(std::move(name)),
        set_([this, &target](std::string_view text) { read(text, target); }) {}
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }
  void set(std::string_view text) const { set_(text); }

 private:
  void read(std::string_view text, std::string& target) const { target = text; }
  void read(std::string_view text, std::int64_t& target) const {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), target);
    if (error != std::errc() || end != text.data() + text.size() || target < 0) {
      throw accelerate::ConfigError(name_ + " is '" + std::string(text) +
                                    "', which is not a whole number from 0 on.");
    }
  }
  template <class E>
  requires std::is_enum_v<E>
  void read(std::string_view text, std::optional<E>& target) const {
    target = accelerate::from_string<E>(text, name_);
  }

  std::string name_;
  std::function<void(std::string_view)> set_;
};

/// Reads `--flag value` pairs. Throws `ConfigError`, which says what there is, for anything else.
inline void read_arguments(int argc, char** argv, std::initializer_list<Flag> flags) {
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
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
