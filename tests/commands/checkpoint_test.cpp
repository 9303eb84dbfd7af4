// The command `accelerate checkpoint`, as a process.
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "core/xxh3.h"
#include "formats/archive.h"
#include "formats/pickle.h"
#include "formats/pickle_value.h"
#include "formats/safetensors_header.h"
#include "support/command.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using detail::formats::Dtype;
using detail::formats::TensorEntry;
using test::Folder;
using test::Outcome;

Outcome show(const std::vector<std::string>& words, bool terminal = false) {
  std::vector<std::string> argv{test::built("bin/accelerate"), "checkpoint", "show"};
  argv.insert(argv.end(), words.begin(), words.end());
  return test::run({.argv = argv, .terminal = terminal});
}

TensorEntry entry(const std::string& name, Dtype dtype, std::vector<std::int64_t> shape) {
  return {.name = name, .dtype = dtype, .shape = std::move(shape)};
}

// A file whose tensors have zeros.
std::string write_example(const Folder& folder) {
  const auto header = detail::formats::plan_safetensors(
      {entry("layer.weight", Dtype::kBF16, {2, 3}), entry("step", Dtype::kI64, {}),
       entry("\u91cd\u307f", Dtype::kF8E4M3, {0}), entry("\x1b[2J", Dtype::kU8, {1})},
      {{"format", "pt"}});
  auto bytes = detail::formats::safetensors_header_bytes(header);
  bytes.resize(bytes.size() + static_cast<std::size_t>(header.tensors.back().end));
  detail::write_file_atomically(folder / "a.safetensors", bytes);
  return folder / "a.safetensors";
}

std::string sum_of_zeros(std::size_t count) {
  const std::vector<std::byte> zeros(count);
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(detail::xxh3(zeros)));
  return text;
}

// 32 MB of zeros, which take long enough for a bar.
std::string write_large_example(const Folder& folder) {
  const auto header =
      detail::formats::plan_safetensors({entry("weight", Dtype::kU8, {32 << 20})}, {});
  auto bytes = detail::formats::safetensors_header_bytes(header);
  bytes.resize(bytes.size() + static_cast<std::size_t>(header.tensors.back().end));
  detail::write_file_atomically(folder / "large.safetensors", bytes);
  return folder / "large.safetensors";
}

TEST(CheckpointShow, ShowsABarOnATerminalThatIsGoneBeforeTheTable) {
  const Folder folder;
  const auto outcome = show({write_large_example(folder)}, /*terminal=*/true);
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  const auto bar = outcome.output.find("hashing:   0%|");
  const auto table = outcome.output.find("name");
  ASSERT_NE(bar, std::string::npos) << outcome.text();
  ASSERT_NE(table, std::string::npos) << outcome.text();
  EXPECT_LT(bar, table);
  EXPECT_EQ(outcome.output[table - 1], '\r') << "the line of the bar is free again";
}

TEST(CheckpointShow, WritesABarIntoALogFileOnlyIfItIsAskedTo) {
  const Folder folder;
  const std::vector<std::string> argv{test::built("bin/accelerate"), "checkpoint", "show",
                                      write_large_example(folder)};
  EXPECT_EQ(test::run({.argv = argv}).error, "");
  const auto asked = test::run({.argv = argv, .environment = {{"ACCELERATE_PROGRESS", "1"}}});
  EXPECT_TRUE(asked.error.starts_with("hashing: 100%|")) << asked.text();
  EXPECT_EQ(test::count_of(asked.error, "\n"), 1) << asked.text();
  const auto off =
      test::run({.argv = argv, .environment = {{"ACCELERATE_PROGRESS", "0"}}, .terminal = true});
  EXPECT_EQ(off.code, 0) << off.text();
  EXPECT_EQ(test::count_of(off.output, "hashing"), 0) << off.text();
}

TEST(CheckpointShow, PrintsATable) {
  const Folder folder;
  const auto outcome = show({write_example(folder)});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(outcome.error, "");
  EXPECT_EQ(
      outcome.output,
      detail::str("name          dtype    shape   bytes  xxh3\n"
                  "'\\x1b[2J'     U8       [1]         1  ",
                  sum_of_zeros(1), "  = 0\n", "layer.weight  BF16     [2, 3]     12  ",
                  sum_of_zeros(12), "\n", "step          I64      []          8  ", sum_of_zeros(8),
                  "  = 0\n", "\u91cd\u307f          F8_E4M3  [0]         0  ", sum_of_zeros(0),
                  "\n", "\nsafetensors, 4 tensors, 21 bytes\nmetadata format = pt\n"));
}

TEST(CheckpointShow, PrintsJson) {
  const Folder folder;
  const auto path = write_example(folder);
  const auto outcome = show({"--json", path});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  const auto value = detail::json_loads(outcome.output);
  const auto& dict = value.as_dict();
  EXPECT_EQ(dict.at("file").as_string(), path);
  EXPECT_EQ(dict.at("format").as_string(), "safetensors");
  EXPECT_EQ(dict.at("bytes").as_int(), 21);
  EXPECT_EQ(dict.at("metadata").as_dict().at("format").as_string(), "pt");
  const auto& tensor = dict.at("tensors").as_list().at(1).as_dict();
  EXPECT_EQ(tensor.at("name").as_string(), "layer.weight");
  EXPECT_EQ(tensor.at("dtype").as_string(), "BF16");
  EXPECT_EQ(tensor.at("shape"), Value(Value::List{Value(2), Value(3)}));
  EXPECT_EQ(tensor.at("bytes").as_int(), 12);
  EXPECT_EQ(tensor.at("xxh3").as_string(), sum_of_zeros(12));
  EXPECT_FALSE(tensor.contains("value"));
  EXPECT_EQ(dict.at("tensors").as_list().at(2).at("value").as_string(), "0");
}

TEST(CheckpointShow, AWrongFileIsAFailureWithItsReason) {
  const Folder folder;
  std::ofstream(folder / "a") << "abcdefgh and more";
  const auto outcome = show({folder / "a"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.output, "");
  EXPECT_EQ(outcome.error,
            detail::str("accelerate: '", folder / "a",
                        "', byte 0: the header would have 7523094288207667809 bytes, more than the "
                        "100000000 that are allowed. It may be no safetensors file.\n"));
  const auto missing = show({folder / "none"});
  EXPECT_EQ(missing.code, 2);
  EXPECT_EQ(missing.error,
            detail::str("accelerate: There is no file or folder '", folder / "none", "'.\n"));
}

TEST(CheckpointShow, WrongWordsAreExplained) {
  const auto flag = show({"--jsn", "a"});
  EXPECT_EQ(flag.code, 2);
  EXPECT_EQ(flag.error,
            "accelerate: --jsn is not a flag of accelerate checkpoint; did you mean --json?\n");
  const auto none = show({});
  EXPECT_EQ(none.code, 2);
  EXPECT_EQ(none.error,
            "accelerate: Name one file or folder: accelerate checkpoint show model.safetensors.\n");
}

TEST(CheckpointShow, ShowsTheTensorsOfTorchArchives) {
  const auto outcome = show({test::reference_path("torch_archive/shared.pt"), "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.text();
  const auto shown = detail::json_loads(outcome.output);
  EXPECT_EQ(shown.at("format").as_string(), "torch archive");
  EXPECT_FALSE(shown.at("tensors").items().empty());
  for (const auto& tensor : shown.at("tensors").items()) {
    EXPECT_FALSE(tensor.at("xxh3").as_string().empty()) << tensor.repr();
  }
}

constexpr std::int64_t kStorage = 4096;

// An archive of a value with tensors in one storage of zeros.
std::string write_archive(const Folder& folder, const Value& value) {
  std::string file;
  detail::formats::ArchiveWriter archive([&](std::string_view bytes) { file += bytes; }, "a",
                                         detail::formats::pickle_dumps(value));
  archive.begin_storage("0", kStorage);
  archive.append(std::string(kStorage, '\0'));
  archive.end_storage();
  archive.finish();
  detail::write_file_atomically(folder / "a.pt", file);
  return folder / "a.pt";
}

Value stored_bytes(std::int64_t offset, std::int64_t size) {
  auto storage = std::make_shared<detail::formats::PickleStorage>();
  storage->key = "0";
  storage->dtype = "uint8";
  storage->location = "cpu";
  storage->bytes = kStorage;
  auto tensor = std::make_shared<detail::formats::PickleTensor>();
  tensor->storage = storage;
  tensor->dtype = "uint8";
  tensor->offset = offset;
  tensor->sizes = {size};
  tensor->strides = {1};
  return Value(Value::Leaf(tensor));
}

TEST(CheckpointShow, PrintsTheValuesOfArchives) {
  const Folder folder;
  const Value state = Value::Dict{{"last_epoch", 7},
                                  {"_last_lr", Value::list({0.5, 0.25})},
                                  {"name", "co\x1bsine"},
                                  {"keys", Value::List(100, Value(1))}};
  const auto path = write_archive(folder, state);
  const auto outcome = show({path});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(outcome.output,
            "last_epoch = 7\n"
            "_last_lr = [0.5, 0.25]\n"
            "name = 'co\\x1bsine'\n"
            "keys = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1...\n"
            "\n"
            "torch archive, 0 tensors, 4 values, 0 bytes\n");
  const auto json = detail::json_loads(show({"--json", path}).output);
  EXPECT_EQ(json.at("values").items()[0],
            Value(Value::Dict{{"name", "last_epoch"}, {"value", "7"}}));
}

TEST(CheckpointShow, RefusesNamesAndSumsWithoutEnd) {
  const Folder folder;
  const auto error = [&](const Value& value) {
    const auto path = write_archive(folder, value);
    const auto outcome = show({path});
    const auto begin = detail::str("accelerate: '", path, "', byte 0: ");
    return outcome.error.starts_with(begin) ? outcome.error.substr(begin.size()) : outcome.text();
  };
  const std::string key(40'000, 'k');
  EXPECT_EQ(error(Value::Dict{{key, Value::Dict{{key, stored_bytes(0, 64)}}}}),
            "a tensor has a name of 80001 bytes; at most 65536 are shown.\n");
  EXPECT_EQ(error(Value::Dict{{key, Value(Value::List(200, Value::Dict{}))}}),
            "the names in it are too long to be shown.\n");
  Value::List overlapping;
  for (std::int64_t i = 0; i < 1000; ++i) overlapping.push_back(stored_bytes(i, kStorage - i));
  EXPECT_EQ(error(Value(std::move(overlapping))), "its tensors overlap too often to be hashed.\n");
}

TEST(CheckpointShow, ALongNameDoesNotWidenTheTable) {
  const Folder folder;
  const auto shared = stored_bytes(0, 64);
  const std::string name(1000, 'n');
  const auto outcome = show({write_archive(folder, Value::Dict{{name, shared}, {"b", shared}})});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  const auto rest = "  uint8  [64]      64  " + sum_of_zeros(64) + "\n";
  EXPECT_NE(outcome.output.find(name + rest), std::string::npos) << outcome.output;
  EXPECT_NE(outcome.output.find("\nb" + std::string(119, ' ') + rest), std::string::npos)
      << outcome.output;
}

}  // namespace
}  // namespace accelerate
