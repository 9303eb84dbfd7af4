// src/launch/flags.h - the flags of `accelerate launch`: one table for parsing, merging, help and
// shell completion.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail {

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
  kOptional,  ///< --dry_run, --dry_run=json: the value is optional and follows a '='
};

/// As the help shows them.
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

struct Flag {
  std::string_view name;  ///< with '_'
  FlagGroup group = FlagGroup::kGeneral;
  FlagKind kind = FlagKind::kText;
  char short_name = '\0';
  /// What a run has that nobody told otherwise; "" where there is none, or where it is worked out.
  std::string_view fallback = {};
  /// The words to choose from, with blanks between them; "" for any.
  std::string_view choices = {};
  /// Choices count in any case; those of FSDP also by their number from 1.
  bool loose = false;
  /// The variable that says the same; the launcher writes it for the workers.
  std::string_view variable = {};
  /// The key of the configuration file, or a section ("fsdp_config") that has the flag's name.
  std::string_view key = {};
  /// What the help shows for the value; "" for the usual word.
  std::string_view value_name = {};
  /// In files only: no such flag.
  bool file_only = false;
  std::string_view help = {};

  [[nodiscard]] bool takes_value() const noexcept {
    return kind != FlagKind::kSwitch && kind != FlagKind::kOptional;
  }
  [[nodiscard]] std::vector<std::string> choice_list() const;
};

/// All rows, group by group.
[[nodiscard]] std::span<const Flag> general_flags();
[[nodiscard]] std::span<const Flag> engine_flags();

/// Calls `f(flag)` for every row.
template <class F>
void for_each_flag(F&& f) {
  for (const Flag& flag : general_flags()) f(flag);
  for (const Flag& flag : engine_flags()) f(flag);
}

/// By name with '_'; nullptr for what is none.
[[nodiscard]] const Flag* find_flag(std::string_view name);
[[nodiscard]] const Flag* find_short_flag(char letter);

struct GroupText {
  std::string_view title;
  std::string_view about;
};
[[nodiscard]] GroupText group_text(FlagGroup group);

/// Checks a value and writes it one way: truth values as "true" and "false", numbers as Python
/// prints them. `source` names who said it, e.g. "--num_processes", in the `ConfigError` otherwise.
[[nodiscard]] std::string canonical_value(const Flag& flag, std::string_view text,
                                          std::string_view source);

/// The "MIN:MAX" of `kMachines` as numbers, "2" as 2 and 2.
struct MachineRange {
  int min = 1;
  int max = 1;
};
[[nodiscard]] MachineRange machine_range(std::string_view text);

}  // namespace accelerate::detail
