// src/commands/questionnaire.h - the questions of `accelerate config`.
//
// Their order, conditions, defaults and the keys of the answers are those of Python Accelerate, so
// that the same answers make the same file.
#pragma once

#include "accelerate/config.h"
#include "accelerate/environment.h"
#include "commands/prompter.h"

namespace accelerate::detail::commands {

/// Throws `UnsupportedError` for Amazon SageMaker and TPUs, `ConfigError` for answers that
/// contradict each other.
[[nodiscard]] ClusterConfig ask_for_config(Prompter& prompter, const Environment& environment);

}  // namespace accelerate::detail::commands
