#include "core/power_sgd_options.h"

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/value/from_value.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

using T = PowerSgdOptions;

// Python's names.
constexpr std::tuple kFields{
    field("matrix_approximation_rank", &T::matrix_approximation_rank),
    field("start_powerSGD_iter", &T::start_iter),
    field("min_compression_rate", &T::min_compression_rate),
    field("use_error_feedback", &T::use_error_feedback),
    field("warm_start", &T::warm_start),
    field("orthogonalization_epsilon", &T::orthogonalization_epsilon),
    field("random_seed", &T::random_seed),
    field("compression_stats_logging_frequency", &T::stats_logging_frequency),
    field("batch_tensors_with_same_shape", &T::batch_tensors_with_same_shape)};

void check_keys(const Value::Dict& options) {
  std::vector<std::string> known;
  for_each_field(T(), kFields, [&](const auto& f, const auto&) { known.emplace_back(f.name); });
  for (const auto& [key, value] : options) {
    const auto name = key.to_string();
    if (std::ranges::find(known, name) != known.end()) continue;
    throw ConfigError(str("comm_state_option has the unknown key '", name,
                          "'. Known are: ", join(known), ".", did_you_mean(name, known)));
  }
}

template <class Number>
void require(bool fits, std::string_view key, Number value, std::string_view wanted) {
  if (fits) return;
  throw ConfigError(
      str("comm_state_option has ", key, " = ", value, ", but it must be ", wanted, "."));
}

}  // namespace

PowerSgdOptions PowerSgdOptions::of(const Value::Dict& options) {
  check_keys(options);
  PowerSgdOptions result;
  for_each_field(result, kFields, [&](const auto& field, auto& member) {
    using Member = std::remove_cvref_t<decltype(member)>;
    const Value* value = options.get(field.name);
    if (value == nullptr) return;
    try {
      member = from_value<Member>(*value);
    } catch (const ArgumentError&) {
      throw ConfigError(str("comm_state_option has ", field.name, " = ", value->repr(),
                            ", which is not ",
                            std::is_same_v<Member, bool>     ? "true or false."
                            : std::is_same_v<Member, double> ? "a number."
                                                             : "a whole number."));
    }
  });
  const auto& [rank, start, rate, feedback, warm, epsilon, seed, frequency, batched] = result;
  require(rank >= 1, "matrix_approximation_rank", rank, "at least 1");
  require(rate >= 0, "min_compression_rate", rate, "at least 0");
  require(epsilon >= 0, "orthogonalization_epsilon", epsilon, "at least 0");
  require(seed >= 0 && seed <= std::numeric_limits<std::uint32_t>::max(), "random_seed", seed,
          "from 0 to 4294967295");
  if (start <= 1 && (feedback || warm)) {
    throw ConfigError(str("comm_state_option has start_powerSGD_iter = ", start, ", but error ",
                          "feedback and warm start need plain steps first. Set it to at least 2, ",
                          "or turn use_error_feedback and warm_start off."));
  }
  result.stats_logging_frequency = std::max<std::int64_t>(1, frequency);
  return result;
}

}  // namespace accelerate::detail::inline core
