// accelerate estimate-memory
#include "accelerate/errors.h"
#include "cli/commands.h"
#include "commands/memory_estimate.h"
#include "commands/model_files.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::cli {
namespace {

using detail::str;

std::int64_t positive(std::string_view flag, std::string_view text) {
  const auto number = detail::parse_number<std::int64_t>(detail::trim(text));
  if (number && *number >= 1 && *number <= 1'000'000'000) return *number;
  throw ConfigError(str("--", flag, " is '", text, "', expected a number from 1 to 1000000000."));
}

detail::commands::EstimateOptions options_of(const detail::launch::Arguments& arguments) {
  detail::commands::EstimateOptions options{.model = arguments.operands.front()};
  if (arguments.typed("dtypes")) options.dtypes = detail::split(arguments.value("dtypes"), ',');
  if (arguments.typed("num_processes")) {
    options.num_processes.clear();
    for (const auto& part : detail::split(arguments.value("num_processes"), ',')) {
      options.num_processes.push_back(positive("num_processes", part));
    }
  }
  if (arguments.typed("batch_size")) {
    options.batch_size = positive("batch_size", arguments.value("batch_size"));
  }
  if (arguments.typed("sequence_length")) {
    options.sequence_length = positive("sequence_length", arguments.value("sequence_length"));
  }
  return options;
}

}  // namespace

int estimate_memory(const detail::launch::Arguments& arguments) {
  for (const auto* flag : {"library_name", "trust_remote_code"}) {
    if (!arguments.typed(flag)) continue;
    print_message(
        str("--", flag, " has no effect: sizes come from files, no code of a model is run."));
  }
  const auto options = options_of(arguments);
  auto model = detail::commands::find_model(options.model, Environment::process());
  if (arguments.typed("no_split")) {
    model.layout.no_split = detail::split(arguments.value("no_split"), ',');
  }
  const auto estimate = detail::commands::estimate(model.layout, options);
  if (!arguments.on("json")) {
    print(estimate.text());
    return 0;
  }
  auto dict = estimate.to_dict();
  dict.set("files", model.files);
  print_json(dict);
  return 0;
}

}  // namespace accelerate::cli
