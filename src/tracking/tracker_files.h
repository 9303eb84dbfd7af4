// src/tracking/tracker_files.h - files, names and texts that the trackers share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "accelerate/value.h"

namespace accelerate::detail::tracking {

// All functions on files make missing folders, and throw `ConfigError` with the path and the
// reason; `ArgumentError` where the path itself is the reason, so that another try is in vain.

/// Appends all of it, or nothing: what did not fit onto the disk is taken back.
void append_to_file(const std::filesystem::path& path, std::string_view bytes);
/// The file is the old or the new one for readers, also if the process is killed.
void replace_file(const std::filesystem::path& path, std::string_view bytes);
void make_folder(const std::filesystem::path& folder);

/// Whether `key` names a file inside a folder: parts between '/' that are not empty, "." or "..".
[[nodiscard]] bool is_file_name(const std::string& key);
/// Throws `ArgumentError` unless `is_file_name`.
[[nodiscard]] std::filesystem::path inside(const std::filesystem::path& folder,
                                           const std::string& key);

/// The number of a bool, int or double.
[[nodiscard]] std::optional<double> number_of(const Value& value);
/// How JSON has numbers that are not finite.
enum class NotFinite : std::uint8_t { kBare, kWords, kPython };
/// The value with what JSON does not have as text: other kinds, such as tensors, as Python prints
/// them; NaN and infinities bare (`NaN`), as words ("NaN", "Infinity") or as Python's ("nan",
/// "inf").
[[nodiscard]] Value json_value(const Value& value, NotFinite numbers);
/// `json_value` in one line, in UTF-8 whatever the texts are.
[[nodiscard]] std::string json_line(const Value& value, NotFinite numbers = NotFinite::kWords);
/// As Python's str() prints it: texts as they are, the rest as `Value::repr`.
[[nodiscard]] std::string python_str(const Value& value);
/// The value with U+FFFD for all bytes of texts and keys that are not UTF-8.
[[nodiscard]] Value with_valid_text(const Value& value);
/// A field of a table whose columns are cut by `delimiter`, quoted where Python's csv module does;
/// U+FFFD for bytes that are not UTF-8.
[[nodiscard]] std::string csv_field(const std::string& text, char delimiter);

/// Throws `ArgumentError` with the kind of a value and what the tracker takes instead.
[[noreturn]] void refuse_value(const Value& value, std::string_view takes);
/// Throws `ArgumentError` for a key that is not one of `known`.
void check_kwargs(std::string_view tracker, const Value::Dict& kwargs,
                  std::initializer_list<std::string_view> known);
/// The text of an entry; nullopt if it is not there or none. Throws `ArgumentError` for another
/// kind.
[[nodiscard]] std::optional<std::string> text_in(const Value::Dict& kwargs, std::string_view key);

/// Seconds since 1970.
[[nodiscard]] double now_seconds();
[[nodiscard]] std::int64_t now_milliseconds();
/// The local or universal time by the format of strftime.
[[nodiscard]] std::string formatted_time(const char* format, bool universal);
/// `count` random characters of `alphabet`.
[[nodiscard]] std::string random_text(std::size_t count,
                                      std::string_view alphabet = "0123456789abcdef");

}  // namespace accelerate::detail::tracking
