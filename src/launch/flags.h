// src/launch/flags.h - flags of a command, and the table of `accelerate launch`: one table for
// parsing, merging, help, shell completion and the check for flags without effect.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail::launch {

enum class FlagKind : std::uint8_t {
  kSwitch,         ///< --cpu, --no_cpu
  kTruth,          ///< takes a word of `str_to_bool`
  kInteger,        ///< a whole number
  kIntegerOrAuto,  ///< or "auto"
  kNumber,         ///< any number
  kNumberOrAuto,   ///< or "auto"
  kMachines,       ///< "2", or "MIN:MAX"
  kTruthOrChoice,  ///< a word of `str_to_bool`, or another of the choices
  kTruths,         ///< three truth values, "false,true,false"
  kText,
  kTexts,     ///< may come several times
  kWords,     ///< one or more of the choices: --dtypes float32 int8
  kOptional,  ///< --dry_run, --dry_run=json: the value is optional and follows a '='
};

/// The groups of the help, in its order.
enum class FlagGroup : std::uint8_t {
  kGeneral,
  kHardware,
  kResources,
  kParadigm,
  kDistributed,
  kOutput,
  kDeepspeed,
  kFsdp,
  kMegatron,
  kFp8,
  kParallelism,
  kMpi,
  kTpu,
  kAws,
};
inline constexpr int kFlagGroupCount = 14;

/// What a flag has to do with the agent, which starts and watches workers.
enum class AgentUse : std::uint8_t {
  kNone,
  kOnly,    ///< has an effect only with an agent
  kDemand,  ///< the same, and a single process gets an agent because of it
};

struct Flag {
  std::string_view name;  ///< with '_'
  FlagGroup group = FlagGroup::kGeneral;
  FlagKind kind = FlagKind::kText;
  char short_name = '\0';
  /// The default; "" if there is none or if it is computed.
  std::string_view fallback = {};
  /// The valid words, separated by blanks; "" if any value is valid.
  std::string_view choices = {};
  /// Choices are accepted in any case; those of FSDP also as a number, counted from 1.
  bool loose = false;
  /// The environment variable of the same setting; the launcher sets it for the workers.
  std::string_view variable = {};
  /// The key of the configuration file, or a section ("fsdp_config") with a key of the flag's name.
  std::string_view key = {};
  /// The word for the value in the help; "" for the usual one.
  std::string_view value_name = {};
  /// Words that shells offer if `choices` is empty.
  std::string_view suggestions = {};
  AgentUse agent = AgentUse::kNone;
  /// Has an effect only with several machines.
  bool several_machines = false;
  /// A key of configuration files without a flag.
  bool file_only = false;
  std::string_view help = {};

  [[nodiscard]] bool takes_value() const noexcept {
    return kind != FlagKind::kSwitch && kind != FlagKind::kOptional;
  }
  [[nodiscard]] std::vector<std::string> choice_list() const;
};

/// The flag that every command has.
inline constexpr Flag kHelpFlag{
    .name = "help", .kind = FlagKind::kSwitch, .short_name = 'h', .help = "Show this text."};

/// The table of `accelerate launch`: general flags, then those of DeepSpeed, FSDP, Megatron-LM, fp8
/// and parallelism.
[[nodiscard]] std::span<const Flag> launch_flags();
[[nodiscard]] std::span<const Flag> general_flags();
[[nodiscard]] std::span<const Flag> engine_flags();

/// nullptr if the table has no such flag. Names are written with '_'.
[[nodiscard]] const Flag* find_flag(std::span<const Flag> flags, std::string_view name);
[[nodiscard]] const Flag* find_short_flag(std::span<const Flag> flags, char letter);
/// In the table of `accelerate launch`.
[[nodiscard]] const Flag* find_flag(std::string_view name);

struct GroupText {
  std::string_view title;
  std::string_view about;
};
[[nodiscard]] GroupText group_text(FlagGroup group);

/// Returns a value in its canonical form: truth values as "true" and "false", numbers as Python
/// prints them. Throws `ConfigError` with `source`, e.g. "--num_processes", if it is not valid.
[[nodiscard]] std::string canonical_value(const Flag& flag, std::string_view text,
                                          std::string_view source);

/// The "MIN:MAX" of `kMachines` as numbers, "2" as 2 and 2.
struct MachineRange {
  int min = 1;
  int max = 1;
};
[[nodiscard]] MachineRange machine_range(std::string_view text);

}  // namespace accelerate::detail::launch
