// accelerate checkpoint ls|show|verify|diff
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/value.h"
#include "cli/commands.h"
#include "commands/checkpoint_content.h"
#include "commands/checkpoint_diff.h"
#include "commands/checkpoint_folders.h"
#include "commands/stored_numbers.h"
#include "core/byte_bar.h"
#include "core/bytes.h"
#include "core/progress_line.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/file_hash.h"
#include "formats/manifest.h"
#include "formats/mapped_file.h"

namespace accelerate::cli {
namespace {

namespace fs = std::filesystem;
using detail::ByteBar;
using detail::str;
using detail::commands::CheckpointFolder;
using detail::commands::Difference;
using detail::commands::FileContent;
using detail::formats::MappedFile;
using Words = std::vector<std::string>;
using Row = std::vector<std::string>;

constexpr int kDiffers = 1;  // an exit code

// Text of a file, fit for a terminal.
std::string shown(const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto point = detail::next_code_point(text, at);
    if (!point.valid || !detail::is_printable(point.value)) return detail::python_repr(text);
    at += point.length;
  }
  return text;
}

// Values of random generators have hundreds of numbers.
std::string shortened(const std::string& text) {
  constexpr int kWidest = 50;
  auto whole = shown(text);
  if (detail::display_width(whole) <= kWidest) return whole;
  return detail::display_trim(std::move(whole), kWidest - 3) + "...";
}

// Columns whose letter in `alignment` is 'r' are aligned at the right; the last one is not padded.
// Longer cells stick out, so that one of them does not fill the table with blanks.
std::string table(const std::vector<Row>& rows, std::string_view alignment) {
  constexpr int kWidest = 120;
  std::vector<int> widths(alignment.size() - 1);
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < widths.size(); ++i) {
      widths[i] = std::max(widths[i], std::min(kWidest, detail::display_width(row[i])));
    }
  }
  std::string out;
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const auto room = std::max(0, widths[i] - detail::display_width(row[i]));
      const std::string blanks(static_cast<std::size_t>(room), ' ');
      out += alignment[i] == 'r' ? blanks + row[i] : row[i] + blanks;
      out += "  ";
    }
    out += row.back() + "\n";
  }
  return out;
}

// "1 file", "2 files".
std::string counted(std::int64_t count, std::string_view what) {
  return str(count, " ", what, count == 1 ? "" : "s");
}

std::string local_time(double seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  char text[32];
  ::localtime_r(&time, &parts);
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts)};
}

// The checksum of each tensor, or "(a view)" if its elements are not contiguous. Each place is read
// once, however many tensors lie there; overlapping ones are read several times.
std::vector<std::string> sums_of(const MappedFile& file, const FileContent& content) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::string> sums;  // by offset and size
  std::int64_t total = 0;
  for (const auto& tensor : content.tensors) {
    if (!tensor.strides.empty() || !sums.try_emplace({tensor.offset, tensor.bytes}).second)
      continue;
    total += tensor.bytes;
    if (total / 4 > file.size()) {
      detail::commands::refuse_content(file, "its tensors overlap too often to be hashed");
    }
  }
  ByteBar bar("hashing", total, detail::asked_by_command());
  for (auto& [place, sum] : sums) {
    sum = detail::formats::xxh3_text(
        detail::formats::xxh3_of(file, place.first, place.second, bar.next_part()));
  }
  std::vector<std::string> result;
  for (const auto& tensor : content.tensors) {
    result.push_back(tensor.strides.empty() ? sums.at({tensor.offset, tensor.bytes}) : "(a view)");
  }
  return result;
}

void print_file_json(const MappedFile& file, const FileContent& content,
                     const std::vector<std::string>& sums) {
  Value::Dict metadata;
  for (const auto& [key, value] : content.metadata) metadata.set(key, value);
  Value::List tensors;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto& tensor = content.tensors[i];
    tensors.emplace_back(Value::Dict{{"name", tensor.name},
                                     {"dtype", tensor.dtype},
                                     {"shape", tensor.shape},
                                     {"bytes", tensor.bytes},
                                     {"xxh3", sums[i]}});
    const auto scalar = detail::commands::scalar_text(file, tensor);
    if (!scalar.empty()) tensors.back().as_dict().set("value", scalar);
  }
  Value::List values;
  for (const auto& [name, text] : content.values) {
    values.emplace_back(Value::Dict{{"name", name}, {"value", text}});
  }
  print_json(Value::Dict{{"file", file.path().string()},
                         {"format", content.format},
                         {"metadata", std::move(metadata)},
                         {"bytes", content.bytes},
                         {"tensors", std::move(tensors)},
                         {"values", std::move(values)}});
}

int show_file(const fs::path& path, bool json) {
  const auto file = MappedFile::open(path);
  const auto content = detail::commands::read_content(*file);
  const auto sums = sums_of(*file, content);
  if (json) {
    print_file_json(*file, content, sums);
    return kOk;
  }
  std::vector<Row> rows{{"name", "dtype", "shape", "bytes", "xxh3"}};
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto& tensor = content.tensors[i];
    const auto scalar = detail::commands::scalar_text(*file, tensor);
    rows.push_back({shown(tensor.name), tensor.dtype, str("[", detail::join(tensor.shape), "]"),
                    std::to_string(tensor.bytes),
                    scalar.empty() ? sums[i] : str(sums[i], "  = ", scalar)});
  }
  auto out = content.tensors.empty() ? "" : table(rows, "lllrl") + "\n";
  for (const auto& [name, text] : content.values) {
    out += str(name.empty() ? "" : str(shown(name), " = "), shortened(text), "\n");
  }
  out += str(content.values.empty() ? "" : "\n", content.summary(), "\n");
  for (const auto& [key, value] : content.metadata) {
    out += str("metadata ", shown(key), " = ", shown(value), "\n");
  }
  print(out);
  return kOk;
}

// What is known of a checkpoint; fields of the manifest are none without it.
Value::Dict json_of(const CheckpointFolder& checkpoint) {
  const auto& manifest = checkpoint.manifest;
  Value::Dict dict{{"path", checkpoint.path.string()},       {"state", checkpoint.state()},
                   {"complete", checkpoint.problem.empty()}, {"saved_at", checkpoint.saved_at},
                   {"num_files", checkpoint.files},          {"bytes", checkpoint.bytes}};
  dict.set("step", manifest ? Value(manifest->step) : Value());
  dict.set("iteration", manifest ? Value(manifest->iteration) : Value());
  dict.set("num_processes", manifest ? Value(manifest->num_processes) : Value());
  dict.set("accelerate_version", manifest ? Value(manifest->accelerate_version) : Value());
  dict.set("torch_version", manifest ? Value(manifest->torch_version) : Value());
  return dict;
}

// "safetensors, 3 tensors, 21 bytes", "no tensors", or why the file cannot be read.
std::string summary_of(const fs::path& path) {
  try {
    const auto file = MappedFile::open(path);
    if (!detail::commands::has_tensors(*file)) return "no tensors";
    return detail::commands::read_content(*file).summary();
  } catch (const CheckpointError& error) {
    return error.what();
  }
}

int show_folder(const fs::path& path, bool json) {
  const auto list = detail::commands::list_checkpoints(path);
  if (list.checkpoints.size() != 1 || list.checkpoints.front().path != path) {
    throw ConfigError(str("'", path.string(), "' has ",
                          counted(std::ssize(list.checkpoints), "checkpoint"),
                          " and is none itself. Name one of them; `accelerate checkpoint ls ",
                          path.string(), "` lists them."));
  }
  const auto& checkpoint = list.checkpoints.front();
  std::vector<Row> rows{{"file", "bytes", "content"}};
  Value::List files;
  for (const auto& name : detail::commands::files_of(path)) {
    const auto bytes = static_cast<std::int64_t>(fs::file_size(path / name));
    const auto summary = summary_of(path / name);
    files.emplace_back(Value::Dict{{"name", name}, {"bytes", bytes}, {"content", summary}});
    rows.push_back({shown(name), std::to_string(bytes), shown(summary)});
  }
  if (json) {
    auto dict = json_of(checkpoint);
    dict.set("files", std::move(files));
    print_json(std::move(dict));
    return kOk;
  }
  auto out = table(rows, "lrl") +
             str("\n", shown(checkpoint.state()), ", saved ", local_time(checkpoint.saved_at));
  if (const auto& manifest = checkpoint.manifest) {
    out += str(" by accelerate ", shown(manifest->accelerate_version), " with Torch ",
               shown(manifest->torch_version), ": iteration ", manifest->iteration, ", step ",
               manifest->step, ", ", manifest->num_processes,
               manifest->num_processes == 1 ? " process" : " processes");
  }
  print(out + "\n");
  return kOk;
}

int show(const Words& words, bool json) {
  if (words.size() != 1) {
    throw ConfigError("Name one file or folder: accelerate checkpoint show model.safetensors.");
  }
  detail::commands::require_existing(words.front());
  return fs::is_directory(words.front()) ? show_folder(words.front(), json)
                                         : show_file(words.front(), json);
}

int ls(const Words& words, bool json) {
  if (words.size() > 1) {
    throw ConfigError(
        str("Name one folder, not ", words.size(), ": accelerate checkpoint ls DIR."));
  }
  const fs::path folder = words.empty() ? "." : words.front();
  const auto list = detail::commands::list_checkpoints(folder);
  const auto* const newest = list.newest();
  std::vector<Row> rows{{" ", "name", "saved", "step", "processes", "files", "size", "state"}};
  Value::List found;
  for (const auto& checkpoint : list.checkpoints) {
    const auto& manifest = checkpoint.manifest;
    const bool is_newest = &checkpoint == newest;
    rows.push_back({is_newest ? "*" : " ",
                    shown(fs::weakly_canonical(checkpoint.path).filename().string()),
                    local_time(checkpoint.saved_at), manifest ? str(manifest->step) : "-",
                    manifest ? str(manifest->num_processes) : "-", str(checkpoint.files),
                    detail::convert_bytes(checkpoint.bytes), shown(checkpoint.state())});
    found.emplace_back(json_of(checkpoint)).as_dict().set("newest_complete", is_newest);
  }
  if (json) {
    print_json(Value::Dict{{"checkpoints", std::move(found)}, {"unfinished", list.unfinished}});
    return kOk;
  }
  std::string out = list.checkpoints.empty() ? "" : table(rows, "lllrrrrl");
  if (newest != nullptr) out += "* the newest complete checkpoint\n";
  if (list.unfinished > 0) {
    out += str(list.unfinished, list.unfinished == 1 ? " save was" : " saves were",
               " not finished, in ", shown(list.staging.string()),
               ": remove that folder if no job is saving.\n");
  }
  print(out);
  return kOk;
}

// What is wrong with a checkpoint. Without a manifest, whether its files can be read is all that
// can be known.
std::vector<std::string> problems_of(const CheckpointFolder& checkpoint, ByteBar& bar) {
  if (checkpoint.manifest) {
    return verify_manifest(checkpoint.path, *checkpoint.manifest,
                           detail::formats::VerifyDepth::kSums, bar.next_part());
  }
  std::vector<std::string> problems{checkpoint.problem};
  for (const auto& name : detail::commands::files_of(checkpoint.path)) {
    try {
      const auto file = MappedFile::open(checkpoint.path / name);
      if (detail::commands::has_tensors(*file)) (void)detail::commands::read_content(*file);
    } catch (const CheckpointError& error) {
      problems.emplace_back(error.what());
    }
  }
  return problems;
}

int verify(const Words& words, bool json) {
  if (words.empty()) {
    throw ConfigError("Name at least one folder: accelerate checkpoint verify checkpoint_0.");
  }
  std::vector<CheckpointFolder> checkpoints;
  std::int64_t total = 0;
  for (const auto& word : words) {
    auto found = detail::commands::list_checkpoints(word).checkpoints;
    if (found.empty()) throw ConfigError(str("'", word, "' has no finished checkpoint."));
    for (auto& checkpoint : found) {
      if (checkpoint.manifest) total += checkpoint.bytes;
      checkpoints.push_back(std::move(checkpoint));
    }
  }
  std::string out;
  Value::List results;
  bool all_right = true;
  {
    ByteBar bar("hashing", total, detail::asked_by_command());
    for (const auto& checkpoint : checkpoints) {
      const auto problems = problems_of(checkpoint, bar);
      all_right = all_right && problems.empty();
      out += str(shown(checkpoint.path.string()), ": ");
      out += problems.empty() ? str("right, ", counted(checkpoint.files, "file"), ", ",
                                    detail::convert_bytes(checkpoint.bytes), "\n")
                              : counted(std::ssize(problems), "problem") + "\n";
      for (const auto& problem : problems) out += str("  ", shown(problem), "\n");
      results.emplace_back(Value::Dict{{"path", checkpoint.path.string()},
                                       {"right", problems.empty()},
                                       {"has_manifest", checkpoint.manifest.has_value()},
                                       {"problems", problems}});
    }
  }
  if (json) {
    print_json(Value::Dict{{"right", all_right}, {"checkpoints", std::move(results)}});
  } else {
    print(out);
  }
  return all_right ? kOk : kDiffers;
}

std::string text_of(const Difference& difference) {
  const auto colon = [](const std::string& text) {
    return text.empty() ? "" : str(": ", shortened(text));
  };
  switch (difference.kind) {
    case Difference::Kind::kRemoved:
      return "only in the first" + colon(difference.before);
    case Difference::Kind::kAdded:
      return "only in the second" + colon(difference.after);
    case Difference::Kind::kChanged: {
      const auto before = shortened(difference.before);
      const auto after = shortened(difference.after);
      return before == after ? before + " changed behind that" : str(before, " -> ", after);
    }
    case Difference::Kind::kElements:
      if (!difference.before.empty()) return str(difference.before, " -> ", difference.after);
      return str(difference.differing, " of ", difference.elements, " elements differ",
                 difference.largest
                     ? str(", at most by ", detail::format_number(*difference.largest))
                     : "");
    case Difference::Kind::kBytes:
      return str("other bytes, from byte ", difference.elements, " on",
                 difference.after.empty() ? "" : str(". ", shown(difference.after)));
  }
  return {};
}

Value::Dict json_of(const Difference& difference) {
  constexpr std::array<std::string_view, 5> kKinds{"removed", "added", "changed", "elements",
                                                   "bytes"};
  Value::Dict dict{{"kind", kKinds.at(static_cast<std::size_t>(difference.kind))},
                   {"file", difference.file},
                   {"name", difference.name}};
  if (difference.kind == Difference::Kind::kElements) {
    dict.set("elements", difference.elements);
    dict.set("differing", difference.differing);
    const bool is_number = difference.largest && std::isfinite(*difference.largest);
    dict.set("largest_difference", is_number ? Value(*difference.largest) : Value());
  } else if (difference.kind == Difference::Kind::kBytes) {
    dict.set("first_byte", difference.elements);
  }
  if (!difference.before.empty()) dict.set("before", difference.before);
  if (!difference.after.empty()) dict.set("after", difference.after);
  return dict;
}

int diff(const Words& words, bool json) {
  if (words.size() != 2) {
    throw ConfigError(
        "Name two folders or two files: accelerate checkpoint diff checkpoint_0 checkpoint_1.");
  }
  detail::commands::CheckpointDiff found;
  {
    ByteBar bar("comparing", std::nullopt, detail::asked_by_command());
    found = detail::commands::diff_checkpoints(words[0], words[1], bar.next_part());
  }
  const auto& differences = found.differences;
  const int code = differences.empty() ? kOk : kDiffers;
  if (json) {
    Value::List list;
    for (const auto& difference : differences) list.emplace_back(json_of(difference));
    print_json(Value::Dict{{"identical", differences.empty()},
                           {"files", found.files},
                           {"differences", std::move(list)}});
    return code;
  }
  const auto files = counted(found.files, "file");
  if (differences.empty()) {
    print(str("No difference in ", files, ".\n"));
    return code;
  }
  std::vector<Row> rows{{"file", "name", "difference"}};
  for (const auto& difference : differences) {
    rows.push_back({shown(difference.file), shown(difference.name), text_of(difference)});
  }
  print(table(rows, "lll") +
        str("\n", counted(std::ssize(differences), "difference"), " in ", files, ".\n"));
  return code;
}

}  // namespace

int checkpoint(const detail::launch::Arguments& arguments) {
  const auto& verb = arguments.operands.front();
  const Words words(arguments.operands.begin() + 1, arguments.operands.end());
  const bool json = arguments.on("json");
  if (verb == "ls") return ls(words, json);
  if (verb == "verify") return verify(words, json);
  if (verb == "diff") return diff(words, json);
  return show(words, json);
}

}  // namespace accelerate::cli
