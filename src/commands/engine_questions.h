// src/commands/engine_questions.h - the sections of a configuration file, question by question.
#pragma once

#include <cstdint>

#include "accelerate/value.h"
#include "commands/prompter.h"

namespace accelerate::detail::commands {

/// dynamo_config; empty if the answer is no.
[[nodiscard]] Value::Dict ask_for_dynamo(Prompter& prompter);
[[nodiscard]] Value::Dict ask_for_deepspeed(Prompter& prompter, std::int64_t num_machines);
[[nodiscard]] Value::Dict ask_for_fsdp(Prompter& prompter);
/// parallelism_config; empty if the answer is no.
[[nodiscard]] Value::Dict ask_for_parallelism(Prompter& prompter);
[[nodiscard]] Value::Dict ask_for_megatron(Prompter& prompter);
[[nodiscard]] Value::Dict ask_for_fp8(Prompter& prompter);

}  // namespace accelerate::detail::commands
