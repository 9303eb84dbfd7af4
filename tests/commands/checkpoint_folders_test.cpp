// `accelerate checkpoint ls`, `verify`, `diff` and `show` of a folder, as processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "accelerate/value.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "formats/archive.h"
#include "formats/manifest.h"
#include "formats/pickle.h"
#include "formats/pickle_value.h"
#include "formats/safetensors_header.h"
#include "support/command.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::str;
using detail::formats::Dtype;
using test::Folder;
using test::Outcome;

Outcome run(const std::vector<std::string>& words) {
  std::vector<std::string> argv{test::built("bin/accelerate"), "checkpoint"};
  argv.insert(argv.end(), words.begin(), words.end());
  return test::run({.argv = argv, .environment = {{"TZ", "UTC"}}});
}

Value json_of(std::vector<std::string> words, int code) {
  words.emplace_back("--json");
  const auto outcome = run(words);
  EXPECT_EQ(outcome.code, code) << outcome.text();
  return detail::json_loads(outcome.output);
}

struct Tensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape = {};
  std::string bytes = {};
};

template <class T>
std::string bytes_of(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

Tensor floats(const std::string& name, const std::vector<float>& numbers) {
  return {name, Dtype::kF32, {std::ssize(numbers)}, bytes_of(numbers)};
}

void write_tensors(const fs::path& path, const std::vector<Tensor>& tensors) {
  std::vector<detail::formats::TensorEntry> entries;
  for (const auto& tensor : tensors) {
    entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  const auto header = detail::formats::plan_safetensors(std::move(entries), {});
  auto file = detail::formats::safetensors_header_bytes(header);
  for (const auto& entry : header.tensors) {
    file += std::ranges::find(tensors, entry.name, &Tensor::name)->bytes;
  }
  detail::write_file_atomically(path, file);
}

// An archive with one storage, that tensors of `value` may lie in.
void write_archive(const fs::path& path, const Value& value, const std::string& storage = "") {
  std::string file;
  detail::formats::ArchiveWriter archive([&](std::string_view bytes) { file += bytes; }, "a",
                                         detail::formats::pickle_dumps(value));
  archive.begin_storage("0", storage.size());
  archive.append(storage);
  archive.end_storage();
  archive.finish();
  detail::write_file_atomically(path, file);
}

void write_manifest(const fs::path& folder, const std::vector<std::string>& names, double saved_at,
                    std::int64_t step) {
  detail::formats::Manifest manifest{.accelerate_version = "0.1.0",
                                     .torch_version = "2.11.0",
                                     .saved_at = saved_at,
                                     .num_processes = 2,
                                     .iteration = 1,
                                     .step = step};
  for (const auto& name : names) {
    manifest.files.push_back(detail::formats::sum_of_file(folder, name));
  }
  detail::write_file_atomically(folder / detail::formats::kManifestName,
                                detail::formats::write_manifest(manifest));
}

// A complete checkpoint with a model and an optimizer.
fs::path write_checkpoint(const fs::path& folder, double saved_at = 1'700'000'000,
                          double lr = 0.5) {
  fs::create_directories(folder);
  write_tensors(folder / "model.safetensors", {floats("weight", {1, 2, 3}), floats("bias", {0})});
  write_archive(folder / "optimizer.bin",
                Value::Dict{{"state", Value::Dict{}},
                            {"param_groups", Value(Value::List{Value::Dict{{"lr", lr}}})}});
  write_manifest(folder, {"model.safetensors", "optimizer.bin"}, saved_at, 120);
  return folder;
}

// Four checkpoints: damaged, without manifest, and two that are complete.
class Project : public testing::Test {
 protected:
  Project() {
    write_checkpoint(at("checkpoint_0"), 1'700'000'100);
    fs::remove(at("checkpoint_0") / "optimizer.bin");
    write_checkpoint(at("checkpoint_1"));
    fs::remove(at("checkpoint_1") / detail::formats::kManifestName);
    write_checkpoint(at("checkpoint_2"), 1'700'000'050);
    write_checkpoint(at("checkpoint_10"), 1'700'000'000);
  }
  [[nodiscard]] fs::path at(const std::string& name) const {
    return folder_.path() / "checkpoints" / name;
  }
  [[nodiscard]] std::string project() const { return folder_.path().string(); }

  Folder folder_;
};

TEST_F(Project, IsListedByNumberWithStatesAndTheNewestCompleteCheckpoint) {
  for (auto time :
       {at("checkpoint_1") / "model.safetensors", at("checkpoint_1") / "optimizer.bin"}) {
    fs::last_write_time(time, fs::file_time_type::clock::from_sys(
                                  std::chrono::sys_seconds(std::chrono::seconds(1'600'000'000))));
  }
  const auto outcome = run({"ls", project()});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(outcome.output,
            "   name           saved                step  processes  files     size  state\n"
            "   checkpoint_0   2023-11-14 22:15:00   120          2      2  1.39 KB  damaged: "
            "'optimizer.bin' is missing\n"
            "   checkpoint_1   2020-09-13 12:26:40     -          -      2  1.39 KB  no manifest "
            "(written by Python, or torn)\n"
            "*  checkpoint_2   2023-11-14 22:14:10   120          2      2  1.39 KB  complete\n"
            "   checkpoint_10  2023-11-14 22:13:20   120          2      2  1.39 KB  complete\n"
            "* the newest complete checkpoint\n");
}

TEST_F(Project, IsListedFromTheFolderOfItsCheckpointsToo) {
  const auto listed = json_of({"ls", at("").string()}, 0);
  EXPECT_EQ(listed.at("checkpoints").items().size(), 4U);
  const auto single = json_of({"ls", at("checkpoint_2").string()}, 0);
  ASSERT_EQ(single.at("checkpoints").items().size(), 1U);
  const auto& checkpoint = single.at("checkpoints").items()[0];
  EXPECT_EQ(checkpoint.at("path").as_string(), at("checkpoint_2").string());
  EXPECT_EQ(checkpoint.at("state").as_string(), "complete");
  EXPECT_TRUE(checkpoint.at("newest_complete").as_bool());
  EXPECT_EQ(checkpoint.at("step").as_int(), 120);
  EXPECT_EQ(checkpoint.at("num_processes").as_int(), 2);
  EXPECT_EQ(checkpoint.at("num_files").as_int(), 2);
}

TEST_F(Project, UnfinishedSavesAreMentioned) {
  fs::create_directories(folder_.path() / ".accelerate_staging" / "checkpoint_11");
  for (const auto& folder : {project(), at("").string()}) {
    const auto outcome = run({"ls", folder});
    EXPECT_NE(
        outcome.output.find("\n1 save was not finished, in " + project() +
                            "/.accelerate_staging: remove that folder if no job is saving.\n"),
        std::string::npos)
        << outcome.text();
  }
}

TEST_F(Project, ASizeThatDiffersAndAManifestThatIsWrongAreDamage) {
  fs::resize_file(at("checkpoint_2") / "model.safetensors", 3);
  std::ofstream(at("checkpoint_10") / detail::formats::kManifestName) << "[]";
  const auto list = json_of({"ls", project()}, 0);
  const auto& checkpoints = list.at("checkpoints").items();
  EXPECT_EQ(checkpoints[2].at("state").as_string(),
            str("damaged: 'model.safetensors' has 3 bytes, its manifest says ",
                fs::file_size(at("checkpoint_1") / "model.safetensors")));
  EXPECT_EQ(checkpoints[3].at("state").as_string(),
            str("damaged: '", (at("checkpoint_10") / detail::formats::kManifestName).string(),
                "' is no manifest of a checkpoint: the manifest is of kind list and no object."));
}

TEST_F(Project, VerifyNamesEachProblemAndFails) {
  auto bytes = detail::read_whole_file(at("checkpoint_10") / "model.safetensors");
  bytes.back() ^= 1;
  std::ofstream(at("checkpoint_10") / "model.safetensors", std::ios::binary) << bytes;
  const auto outcome = run({"verify", project()});
  EXPECT_EQ(outcome.code, 1);
  const auto lines = test::lines_of(outcome.output);
  ASSERT_EQ(lines.size(), 7U) << outcome.text();
  EXPECT_EQ(lines[0], at("checkpoint_0").string() + ": 1 problem");
  EXPECT_EQ(lines[1], "  'optimizer.bin' is missing");
  EXPECT_EQ(lines[3], "  no manifest (written by Python, or torn)");
  EXPECT_EQ(lines[4], at("checkpoint_2").string() + ": right, 2 files, 1.39 KB");
  EXPECT_TRUE(lines[6].starts_with("  'model.safetensors' has the checksum ")) << lines[6];
}

TEST_F(Project, VerifyOfCompleteCheckpointsSucceeds) {
  const auto outcome = run({"verify", at("checkpoint_2").string(), at("checkpoint_10").string()});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(test::lines_of(outcome.output).size(), 2U);
}

TEST_F(Project, WithoutAManifestVerifyReadsHeaders) {
  fs::resize_file(at("checkpoint_1") / "model.safetensors", 100);
  // A pickle that is no archive, as distributed checkpoints have.
  fs::copy_file(test::reference_path("torch_archive/bare.pkl"), at("checkpoint_1") / ".metadata");
  const auto verified = json_of({"verify", at("checkpoint_1").string()}, 1);
  EXPECT_FALSE(verified.at("right").as_bool());
  const auto& checkpoint = verified.at("checkpoints").items()[0];
  EXPECT_FALSE(checkpoint.at("has_manifest").as_bool());
  ASSERT_EQ(checkpoint.at("problems").items().size(), 2U) << checkpoint.repr();
  EXPECT_NE(checkpoint.at("problems").items()[1].as_string().find("model.safetensors'"),
            std::string::npos);
}

TEST_F(Project, ACheckpointIsShownWithItsFiles) {
  const auto outcome = run({"show", at("checkpoint_2").string()});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(outcome.output,
            "file               bytes  content\n"
            "model.safetensors    144  safetensors, 2 tensors, 16 bytes\n"
            "optimizer.bin       1279  torch archive, 0 tensors, 2 values, 0 bytes\n"
            "\n"
            "complete, saved 2023-11-14 22:14:10 by accelerate 0.1.0 with Torch 2.11.0: iteration "
            "1, step 120, 2 processes\n");
  const auto shown = json_of({"show", at("checkpoint_2").string()}, 0);
  EXPECT_EQ(shown.at("files").items()[0].at("name").as_string(), "model.safetensors");
  EXPECT_EQ(shown.at("accelerate_version").as_string(), "0.1.0");
}

TEST_F(Project, WrongInputIsExplained) {
  const auto refused = [](const std::vector<std::string>& words) {
    const auto outcome = run(words);
    EXPECT_EQ(outcome.code, 2) << outcome.text();
    return outcome.error;
  };
  EXPECT_EQ(refused({"ls", at("chekpoint_2").string()}),
            str("accelerate: There is no file or folder '", at("chekpoint_2").string(),
                "'. Did you mean 'checkpoint_2'?\n"));
  fs::create_directory(folder_.path() / "empty");
  EXPECT_EQ(refused({"verify", folder_ / "empty"}),
            str("accelerate: '", folder_ / "empty",
                "' has no checkpoints. Name a project folder with checkpoints/, a folder with "
                "checkpoint_N folders, or a checkpoint.\n"));
  EXPECT_EQ(refused({"show", project()}),
            str("accelerate: '", project(),
                "' has 4 checkpoints and is none itself. Name one of them; `accelerate checkpoint "
                "ls ",
                project(), "` lists them.\n"));
  fs::create_directory(folder_.path() / "one");
  fs::copy(at("checkpoint_2"), folder_.path() / "one/checkpoint_2", fs::copy_options::recursive);
  EXPECT_NE(refused({"show", folder_ / "one"}).find("' has 1 checkpoint and is none itself."),
            std::string::npos);
  EXPECT_EQ(refused({"diff", project()}),
            "accelerate: Name two folders or two files: accelerate checkpoint diff checkpoint_0 "
            "checkpoint_1.\n");
  const auto file = (at("checkpoint_2") / "model.safetensors").string();
  EXPECT_EQ(refused({"diff", file, project()}),
            str("accelerate: '", project(), "' is a folder and '", file,
                "' a file. Compare two folders or two files.\n"));
  EXPECT_EQ(refused({"verfy", project()}),
            "accelerate: The word after `accelerate checkpoint` is 'verfy'. Choose one of: ls, "
            "show, verify, diff. Did you mean 'verify'?\n");
  EXPECT_EQ(refused({"verify"}),
            "accelerate: Name at least one folder: accelerate checkpoint verify checkpoint_0.\n");
}

TEST(CheckpointDiff, OfEqualCheckpointsIsEmpty) {
  const Folder folder;
  const auto a = write_checkpoint(folder / "a");
  const auto b = write_checkpoint(folder / "b", 1'800'000'000);
  const auto outcome = run({"diff", a, b});
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(outcome.output, "No difference in 2 files.\n");
}

TEST(CheckpointDiff, NamesWhatDiffers) {
  const Folder folder;
  const auto a = write_checkpoint(folder / "a");
  const auto b = write_checkpoint(folder / "b", 1'700'000'000, 0.25);
  std::ofstream(a / "notes.txt") << "some text";
  std::ofstream(b / "notes.txt") << "some more";
  std::ofstream(a / "old") << "";
  std::ofstream(b / "\x1b[2J") << "";
  write_tensors(a / "model.safetensors", {floats("weight", {1, 2, 3}), floats("bias", {0}),
                                          floats("gone", {}), floats("step", {1})});
  write_tensors(b / "model.safetensors", {floats("weight", {1, 2.5, -3}), floats("bias", {0, 0}),
                                          floats("new", {7}), floats("step", {2})});
  const auto outcome = run({"diff", a, b});
  EXPECT_EQ(outcome.code, 1) << outcome.text();
  EXPECT_EQ(outcome.output,
            "file               name               difference\n"
            "'\\x1b[2J'                             only in the second\n"
            "model.safetensors  bias               float32 [1] -> float32 [2]\n"
            "model.safetensors  gone               only in the first: float32 [0]\n"
            "model.safetensors  new                only in the second: float32 [1]\n"
            "model.safetensors  step               1.0 -> 2.0\n"
            "model.safetensors  weight             2 of 3 elements differ, at most by 6\n"
            "notes.txt                             other bytes, from byte 5 on\n"
            "old                                   only in the first\n"
            "optimizer.bin      param_groups.0.lr  0.5 -> 0.25\n"
            "\n"
            "9 differences in 5 files.\n");
  const auto json = json_of({"diff", a, b}, 1);
  EXPECT_FALSE(json.at("identical").as_bool());
  EXPECT_EQ(json.at("differences").items()[5], Value(Value::Dict{{"kind", "elements"},
                                                                 {"file", "model.safetensors"},
                                                                 {"name", "weight"},
                                                                 {"elements", 3},
                                                                 {"differing", 2},
                                                                 {"largest_difference", 6.0}}));
}

// The line about the tensor "w" with these elements in two files.
std::string difference(Dtype dtype, const std::string& a, const std::string& b,
                       std::int64_t elements = 2) {
  const Folder folder;
  const std::vector<std::int64_t> shape{elements};
  write_tensors(folder / "a", {{"w", dtype, shape, a}});
  write_tensors(folder / "b", {{"w", dtype, shape, b}});
  const auto outcome = run({"diff", folder / "a", folder / "b"});
  const auto lines = test::lines_of(outcome.output);
  return lines.size() > 1 ? lines[1] : outcome.output + outcome.error;
}

TEST(CheckpointDiff, PrintsSingleIntegersAsIntegers) {
  using Longs = std::vector<std::int64_t>;
  EXPECT_EQ(difference(Dtype::kI64, bytes_of(Longs{-1}), bytes_of(Longs{9'007'199'254'740'993}), 1),
            "      w     -1 -> 9007199254740993");
}

TEST(CheckpointDiff, KnowsTheNumbersOfEachType) {
  const auto at_most = [](int count, const std::string& largest) {
    return str("      w     ", count, " of 2 elements differ, at most by ", largest);
  };
  using Halves = std::vector<std::uint16_t>;
  using Small = std::vector<std::uint8_t>;
  // 1, and 1.5 or the smallest subnormal.
  EXPECT_EQ(difference(Dtype::kF16, bytes_of(Halves{0x3c00, 0}), bytes_of(Halves{0x3e00, 1})),
            at_most(2, "0.5"));
  EXPECT_EQ(difference(Dtype::kF16, bytes_of(Halves{0, 0}), bytes_of(Halves{0, 1})),
            at_most(1, "5.96e-8"));
  EXPECT_EQ(difference(Dtype::kBF16, bytes_of(Halves{0x3f80, 0}), bytes_of(Halves{0xbf80, 0})),
            at_most(1, "2"));
  EXPECT_EQ(difference(Dtype::kF8E4M3, bytes_of(Small{0x7e, 0}), bytes_of(Small{0, 0})),
            at_most(1, "448"));
  EXPECT_EQ(difference(Dtype::kF8E5M2, bytes_of(Small{0x7b, 0}), bytes_of(Small{0, 0})),
            at_most(1, "57344.0"));
  EXPECT_EQ(difference(Dtype::kI64, bytes_of(std::vector<std::int64_t>{-1, 5}),
                       bytes_of(std::vector<std::int64_t>{1, 5})),
            at_most(1, "2"));
  EXPECT_EQ(difference(Dtype::kBool, bytes_of(Small{0, 1}), bytes_of(Small{1, 1})),
            "      w     1 of 2 elements differ");
}

TEST(CheckpointDiff, ComparesValuesNotBits) {
  using Floats = std::vector<float>;
  const auto nan_of = [](std::uint32_t bits) { return std::bit_cast<float>(bits); };
  EXPECT_EQ(difference(Dtype::kF32, bytes_of(Floats{0.0F, nan_of(0x7fc00000)}),
                       bytes_of(Floats{-0.0F, nan_of(0x7fc00001)})),
            "No difference in 1 file.\n");
  EXPECT_EQ(
      difference(Dtype::kF32, bytes_of(Floats{1, nan_of(0x7fc00000)}), bytes_of(Floats{3, 1})),
      "      w     2 of 2 elements differ, at most by nan");
  EXPECT_EQ(difference(Dtype::kF32, bytes_of(Floats{1, INFINITY}), bytes_of(Floats{1, -INFINITY})),
            "      w     1 of 2 elements differ, at most by inf");
}

// A matrix of 2 by 3 in a storage of six floats.
Value matrix(std::vector<std::int64_t> strides) {
  auto storage = std::make_shared<detail::formats::PickleStorage>();
  storage->key = "0";
  storage->dtype = "float32";
  storage->location = "cpu";
  storage->bytes = 24;
  auto tensor = std::make_shared<detail::formats::PickleTensor>();
  tensor->storage = storage;
  tensor->dtype = "float32";
  tensor->sizes = {2, 3};
  tensor->strides = std::move(strides);
  return Value::Dict{{"m", Value(Value::Leaf(tensor))}};
}

TEST(CheckpointDiff, ComparesViewsByIndexAndAcrossFormats) {
  const Folder folder;
  const std::vector<float> rows{1, 2, 3, 4, 5, 6};
  write_tensors(folder / "rows", {{"m", Dtype::kF32, {2, 3}, bytes_of(rows)}});
  write_archive(folder / "columns", matrix({1, 2}), bytes_of<float>({1, 4, 2, 5, 3, 6}));
  const auto same = run({"diff", folder / "rows", folder / "columns"});
  EXPECT_EQ(same.output, "No difference in 1 file.\n") << same.text();
  EXPECT_EQ(same.code, 0);
  write_archive(folder / "other", matrix({1, 2}), bytes_of<float>({1, 4, 2, 5, 3, 7}));
  const auto other = run({"diff", folder / "columns", folder / "other"});
  EXPECT_EQ(test::lines_of(other.output).at(1), "      m     1 of 6 elements differ, at most by 1");
}

TEST(CheckpointDiff, AFileThatIsTornIsComparedByItsBytes) {
  const Folder folder;
  const auto a = write_checkpoint(folder / "a");
  const auto b = write_checkpoint(folder / "b");
  fs::resize_file(b / "model.safetensors", 140);
  const auto outcome = run({"diff", a, b});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(
      outcome.output.find("other bytes, from byte 140 on. '" + (b / "model.safetensors").string()),
      std::string::npos)
      << outcome.text();
}

TEST(CheckpointDiff, RandomStatesDifferInOneLineEach) {
  const Folder folder;
  const auto value = [](std::int64_t last) {
    Value::List words(624, Value(7));
    words.emplace_back(last);
    return Value(Value::Dict{{"step", last}, {"random_state", Value::tuple(std::move(words))}});
  };
  write_archive(folder / "a", value(1));
  write_archive(folder / "b", value(2));
  const auto outcome = run({"diff", folder / "a", folder / "b"});
  EXPECT_EQ(outcome.output,
            "file  name          difference\n"
            "      random_state  (7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7... changed behind "
            "that\n"
            "      step          1 -> 2\n"
            "\n"
            "2 differences in 1 file.\n");
}

}  // namespace
}  // namespace accelerate
