// accelerate/environment.h - environment variables: reading, patching, clearing.
//
// Checks of the machine and of this build (`is_cuda_available`, `is_torch_version`, ...) are in
// accelerate/checks.h.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

/// A set of environment variables: the process's, or one made by hand.
///
/// What reads variables takes one of these, so that tests and the launcher can ask "what would this
/// environment give" without touching the process. An empty value counts as unset.
class ACCELERATE_API Environment {
 public:
  Environment() = default;
  explicit Environment(std::map<std::string, std::string> variables);
  /// `Environment({{"NAME", "value"}})`.
  explicit Environment(std::initializer_list<std::pair<const std::string, std::string>> variables);

  /// A copy of the variables of this process, as they are now.
  [[nodiscard]] static Environment process();

  [[nodiscard]] std::optional<std::string> get(const std::string& name) const;
  [[nodiscard]] bool contains(const std::string& name) const { return get(name).has_value(); }

  /// The truth value of a variable, by `str_to_bool`. Throws `ConfigError` naming variable and
  /// value.
  [[nodiscard]] bool flag(const std::string& name, bool fallback = false) const;

  /// The first of `names` whose value is a number that is not negative.
  /// Throws `ConfigError` naming the variable whose value is not a number.
  [[nodiscard]] std::int64_t integer(std::span<const std::string> names,
                                     std::int64_t fallback) const;
  [[nodiscard]] std::int64_t integer(std::initializer_list<std::string> names,
                                     std::int64_t fallback) const;

  [[nodiscard]] const std::map<std::string, std::string>& variables() const { return variables_; }

 private:
  std::map<std::string, std::string> variables_;
};

/// Reads y, yes, t, true, on, 1 and n, no, f, false, off, 0 in any case. Blanks are not trimmed.
/// Anything else throws `ArgumentError` with the word.
[[nodiscard]] ACCELERATE_API bool str_to_bool(std::string_view text);

/// The truth value of a variable of this process.
[[nodiscard]] ACCELERATE_API bool parse_flag_from_env(const std::string& name,
                                                      bool fallback = false);

/// The text of a variable of this process, unchecked.
[[nodiscard]] ACCELERATE_API std::string parse_choice_from_env(const std::string& name,
                                                               const std::string& fallback = "no");

/// The first of several variables of this process that holds a number that is not negative.
[[nodiscard]] ACCELERATE_API std::int64_t get_int_from_env(const std::vector<std::string>& names,
                                                           std::int64_t fallback);

/// Sets variables until the end of the scope, then puts back what was there. Names are upper-cased.
/// Guards nest. `setenv` is not safe beside threads that read the environment: keep guards to the
/// start of a program and to tests.
///
///     auto patched = patch_environment({{"master_port", "29501"}});
class ACCELERATE_API PatchedEnvironment {
 public:
  [[nodiscard]] explicit PatchedEnvironment(
      std::vector<std::pair<std::string, std::string>> variables);
  ~PatchedEnvironment();
  PatchedEnvironment(const PatchedEnvironment&) = delete;
  PatchedEnvironment& operator=(const PatchedEnvironment&) = delete;

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> before_;
};

[[nodiscard]] inline PatchedEnvironment patch_environment(
    std::vector<std::pair<std::string, std::string>> variables) {
  return PatchedEnvironment(std::move(variables));
}

/// Empties the environment until the end of the scope, then restores it wholly: what was added in
/// between is gone.
class ACCELERATE_API ClearedEnvironment {
 public:
  [[nodiscard]] ClearedEnvironment();
  ~ClearedEnvironment();
  ClearedEnvironment(const ClearedEnvironment&) = delete;
  ClearedEnvironment& operator=(const ClearedEnvironment&) = delete;

 private:
  std::map<std::string, std::string> before_;
};

[[nodiscard]] inline ClearedEnvironment clear_environment() { return ClearedEnvironment(); }

/// Restores every ACCELERATE_* variable at the end of the scope: changed and removed ones get their
/// value back, new ones are removed.
class ACCELERATE_API PurgedEnvironment {
 public:
  [[nodiscard]] PurgedEnvironment();
  ~PurgedEnvironment();
  PurgedEnvironment(const PurgedEnvironment&) = delete;
  PurgedEnvironment& operator=(const PurgedEnvironment&) = delete;

 private:
  std::map<std::string, std::string> before_;
};

/// Runs `f` and restores the ACCELERATE_* variables afterwards, also when it throws.
template <class F>
decltype(auto) purge_accelerate_environment(F&& f) {
  PurgedEnvironment purged;
  return std::forward<F>(f)();
}

/// "KEY=value\n" per pair, in order. Pairs with an empty part, or with a blank, a line end or one
/// of ; < > in it, are left out with a warning.
[[nodiscard]] ACCELERATE_API std::vector<std::string> convert_dict_to_env_variables(
    const std::vector<std::pair<std::string, std::string>>& variables);

/// The parts of a path variable such as PATH plus `path`, joined by ':'.
[[nodiscard]] ACCELERATE_API std::string env_var_path_add(const std::string& name,
                                                          const std::string& path);

}  // namespace accelerate

// Checks of the machine are part of this header too.
#include "accelerate/checks.h"
