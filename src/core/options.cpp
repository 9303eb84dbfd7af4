#include "core/options.h"

#include <algorithm>

#include "core/numbers.h"

namespace accelerate::detail::inline core {

void require_at_least(std::int64_t least, std::string_view name, std::int64_t value) {
  if (value >= least) return;
  throw ConfigError(str(name, " is ", value, ", but it must be at least ", least, "."));
}

void require_one_of(const std::vector<std::string>& choices, std::string_view name,
                    const std::string& value) {
  if (std::ranges::find(choices, value) != choices.end()) return;
  throw ConfigError(str(name, " is '", value, "'. Choose one of: ", join(choices), ".",
                        did_you_mean(value, choices)));
}

std::int64_t read_integer(std::string_view text, std::string_view source) {
  if (const auto value = parse_signed_number<std::int64_t>(text)) return *value;
  throw ConfigError(str(source, " is '", text, "', which is not a whole number."));
}

double read_double(std::string_view text, std::string_view source) {
  if (const auto value = parse_signed_number<double>(text)) return *value;
  throw ConfigError(str(source, " is '", text, "', which is not a number."));
}

bool read_true_word(const Environment& environment, const std::string& variable,
                    Warnings& warnings) {
  const auto text = environment.get(variable);
  const bool value = environment.flag(variable);
  if (text && value && to_lower(*text) != "true") {
    warnings.push_back(str(variable, " is '", *text, "', which counts as true. Python Accelerate ",
                           "takes only the word 'true' here and would read it as false."));
  }
  return value;
}

}  // namespace accelerate::detail::inline core
