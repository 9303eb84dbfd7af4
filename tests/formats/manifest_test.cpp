#include "formats/manifest.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "core/files.h"
#include "core/text.h"
#include "core/xxh3.h"
#include "support/command.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::message_of;
using Lines = std::vector<std::string>;

Manifest example() {
  return {.accelerate_version = "1.2.3",
          .torch_version = "2.11.0",
          .saved_at = 1'700'000'000.25,
          .num_processes = 4,
          .iteration = 7,
          .step = 120,
          .files = {{.name = "model.safetensors", .size = 12, .xxh3 = 0x00ab'0000'0000'0001},
                    {.name = "parts/optimizer.bin", .size = 0, .xxh3 = 0xffff'ffff'ffff'ffff}}};
}

TEST(Manifest, ReadsBackWhatItWrites) {
  EXPECT_EQ(parse_manifest(write_manifest(example()), "m.json"), example());
}

TEST(Manifest, IsIndentedJsonThatBeginsWithItsFormat) {
  Manifest manifest = example();
  manifest.files.resize(1);
  EXPECT_EQ(write_manifest(manifest),
            "{\n"
            "  \"format\": \"accelerate-checkpoint\",\n"
            "  \"format_version\": 1,\n"
            "  \"accelerate_version\": \"1.2.3\",\n"
            "  \"torch_version\": \"2.11.0\",\n"
            "  \"saved_at\": 1700000000.25,\n"
            "  \"num_processes\": 4,\n"
            "  \"iteration\": 7,\n"
            "  \"step\": 120,\n"
            "  \"files\": [\n"
            "    {\n"
            "      \"name\": \"model.safetensors\",\n"
            "      \"size\": 12,\n"
            "      \"xxh3\": \"00ab000000000001\"\n"
            "    }\n"
            "  ]\n"
            "}\n");
}

// The example with one text in place of another.
std::string changed(const std::string& from, const std::string& to) {
  auto json = write_manifest(example());
  const auto at = json.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return json.replace(at, from.size(), to);
}

std::string refusal(const std::string& json) {
  return message_of<FormatError>([&] { (void)parse_manifest(json, "m.json"); });
}

TEST(Manifest, IgnoresKeysThatItDoesNotKnow) {
  const auto json = changed("\"step\": 120,", "\"step\": 120, \"mood\": [1],");
  EXPECT_EQ(parse_manifest(json, "m.json"), example());
}

TEST(Manifest, SortsItsFiles) {
  const auto json = changed("model.safetensors", "z.safetensors");
  EXPECT_EQ(parse_manifest(json, "m.json").files.front().name, "parts/optimizer.bin");
}

TEST(Manifest, RefusesWhatIsNotAManifest) {
  EXPECT_EQ(refusal("{"), "'m.json', line 1, column 2: expected a key in double quotes.");
  EXPECT_EQ(refusal("[]"),
            "'m.json' is no manifest of a checkpoint: the manifest is of kind list and no object.");
  EXPECT_EQ(refusal("{}"), "'m.json' is no manifest of a checkpoint: the manifest has no format.");
  EXPECT_EQ(refusal(changed("accelerate-checkpoint", "tar")),
            "'m.json' is no manifest of a checkpoint: its format is 'tar' instead of "
            "'accelerate-checkpoint'.");
  EXPECT_EQ(refusal(changed("\"step\": 120", "\"step\": 1, \"step\": 2")),
            "'m.json', line 9, column 14: the key 'step' is here a second time.");
}

TEST(Manifest, RefusesANewerFormat) {
  EXPECT_EQ(refusal(changed("\"format_version\": 1", "\"format_version\": 2")),
            "'m.json' has format_version 2, and this version of accelerate reads up to 1. Update "
            "accelerate.");
}

TEST(Manifest, RefusesFieldsThatAreMissingOrWrong) {
  const std::string start = "'m.json' is no manifest of a checkpoint: ";
  EXPECT_EQ(refusal(changed("\"saved_at\"", "\"at\"")), start + "the manifest has no saved_at.");
  EXPECT_EQ(refusal(changed("1700000000.25", "NaN")),
            start + "saved_at of the manifest is nan instead of a number of seconds since 1970.");
  EXPECT_EQ(refusal(changed("1700000000.25", "1e18")),
            start + "saved_at of the manifest is 1e+18 instead of a number of seconds since 1970.");
  EXPECT_EQ(refusal(changed("\"1.2.3\"", "3")),
            start + "accelerate_version of the manifest is 3 instead of a text.");
  EXPECT_EQ(refusal(changed("\"num_processes\": 4", "\"num_processes\": 0")),
            start + "num_processes of the manifest is 0 instead of an integer of at least 1.");
  EXPECT_EQ(refusal(changed("120", "1.5")),
            start + "step of the manifest is 1.5 instead of an integer of at least 0.");
  EXPECT_EQ(refusal(changed("\"size\": 12", "\"size\": -1")),
            start + "size of entry 0 of files is -1 instead of an integer of at least 0.");
  EXPECT_EQ(refusal(changed("\"00ab", "\"00AB")),
            start +
                "xxh3 of entry 0 of files is '00AB000000000001' instead of 16 hexadecimal "
                "digits.");
  EXPECT_EQ(refusal(changed("\"00ab", "\"1200ab")),
            start +
                "xxh3 of entry 0 of files is '1200ab000000000001' instead of 16 hexadecimal "
                "digits.");
  EXPECT_EQ(refusal(changed("\"files\": [", "\"files\": [3,")),
            start + "entry 0 of files is of kind int and no object.");
  auto large = example();
  for (auto& file : large.files) file.size = std::int64_t{1} << 62;
  EXPECT_EQ(refusal(write_manifest(large)),
            start + "its files have more bytes than 64 bits count.");
  EXPECT_EQ(refusal(changed("\"files\": [", "\"files\": 3, \"old\": [")),
            start + "files of the manifest is 3 instead of a list.");
}

TEST(Manifest, RefusesFileNamesThatLeadElsewhere) {
  const auto refused = [](const std::string& name) {
    return refusal(changed("model.safetensors", name));
  };
  const std::string start = "'m.json' is no manifest of a checkpoint: the file ";
  EXPECT_EQ(refused("/etc/passwd"), start + "name '/etc/passwd' is absolute.");
  EXPECT_EQ(refused("../a"), start + "name '../a' leads out of the folder, or nowhere.");
  EXPECT_EQ(refused("a/./b"), start + "name 'a/./b' leads out of the folder, or nowhere.");
  EXPECT_EQ(refused(""), start + "name '' is empty.");
  EXPECT_EQ(refused("a\\u001bb"), start + R"(name 'a\x1bb' has control characters.)");
  EXPECT_EQ(refused("parts/optimizer.bin"), start + "'parts/optimizer.bin' is there twice.");
}

// A folder with two files and their manifest.
class SavedCheckpoint : public testing::Test {
 protected:
  SavedCheckpoint() {
    fs::create_directory(folder_ / "parts");
    std::ofstream(folder_ / "parts/b") << "other bytes";
    std::ofstream(folder_ / "a", std::ios::binary) << std::string(3 << 20, 'a');
    manifest_ = example();
    manifest_.files = {sum_of_file(folder_.path(), "a"), sum_of_file(folder_.path(), "parts/b")};
  }
  [[nodiscard]] Lines verify(VerifyDepth depth) const {
    return verify_manifest(folder_.path(), manifest_, depth);
  }

  Folder folder_;
  Manifest manifest_;
};

TEST_F(SavedCheckpoint, SumsAreOfTheWholeFile) {
  const std::string bytes(3 << 20, 'a');
  EXPECT_EQ(
      manifest_.files.at(0),
      (ManifestFile{.name = "a", .size = 3 << 20, .xxh3 = xxh3(std::as_bytes(std::span(bytes)))}));
}

TEST_F(SavedCheckpoint, SumsOfLargeFilesAreReadBySeveralThreadsInOrder) {
  std::string bytes((40 << 20) + 13, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * i >> 7);
  std::ofstream(folder_ / "large", std::ios::binary) << bytes;
  std::vector<std::int64_t> seen;
  const auto found =
      sum_of_file(folder_.path(), "large", [&](std::int64_t done) { seen.push_back(done); });
  EXPECT_EQ(found.xxh3, xxh3(std::as_bytes(std::span(bytes))));
  EXPECT_TRUE(std::ranges::is_sorted(seen));
  EXPECT_EQ(seen.back(), std::ssize(bytes));
}

TEST_F(SavedCheckpoint, AFileThatIsCutWhileItIsHashedIsAnError) {
  std::ofstream(folder_ / "large", std::ios::binary) << std::string(64 << 20, 'x');
  const auto cut = [&](std::int64_t /*done*/) { fs::resize_file(folder_ / "large", 1000); };
  EXPECT_NE(message_of<CheckpointError>([&] {
              (void)sum_of_file(folder_.path(), "large", cut);
            }).find("was cut to"),
            std::string::npos);
}

TEST_F(SavedCheckpoint, IsRightAsItWasWritten) {
  std::ofstream(folder_ / "more") << "not in the manifest";
  EXPECT_EQ(verify(VerifyDepth::kSums), Lines{});
}

TEST_F(SavedCheckpoint, TheManifestIsReadFromTheFolder) {
  EXPECT_EQ(read_manifest(folder_.path()), std::nullopt);
  EXPECT_EQ(read_manifest(folder_ / "none"), std::nullopt);
  write_file_atomically(folder_ / std::string(kManifestName), write_manifest(manifest_));
  EXPECT_EQ(read_manifest(folder_.path()), manifest_);
}

TEST_F(SavedCheckpoint, AManifestThatCannotBeReadIsAnError) {
  const auto path = folder_ / std::string(kManifestName);
  const auto message = [&](auto type) {
    return message_of<decltype(type)>([&] { (void)read_manifest(folder_.path()); });
  };
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(message(CheckpointError("")), str("Cannot read '", path, "': it is no regular file."));
  fs::remove(path);
  std::ofstream(path) << "";
  fs::resize_file(path, kMaxManifestBytes + 1);
  EXPECT_EQ(message(FormatError("")),
            str("'", path,
                "' is no manifest of a checkpoint: it has 33554433 bytes, and 33554432 "
                "are the limit."));
}

TEST_F(SavedCheckpoint, MissingFilesAreNamed) {
  fs::remove(folder_ / "a");
  fs::remove_all(folder_ / "parts");
  EXPECT_EQ(verify(VerifyDepth::kSizes), (Lines{"'a' is missing", "'parts/b' is missing"}));
}

TEST_F(SavedCheckpoint, AFolderInPlaceOfAFileIsNamed) {
  fs::remove(folder_ / "a");
  fs::create_directory(folder_ / "a");
  EXPECT_EQ(verify(VerifyDepth::kSizes), Lines{"'a' is no regular file"});
}

TEST_F(SavedCheckpoint, OtherSizesAreNamedWithBoth) {
  fs::resize_file(folder_ / "parts/b", 5);
  EXPECT_EQ(verify(VerifyDepth::kSizes), Lines{"'parts/b' has 5 bytes, its manifest says 11"});
}

TEST_F(SavedCheckpoint, OtherBytesOfTheSameSizeAreFoundBySumsOnly) {
  std::ofstream(folder_ / "parts/b") << "Other bytes";
  EXPECT_EQ(verify(VerifyDepth::kSizes), Lines{});
  EXPECT_EQ(verify(VerifyDepth::kSums),
            Lines{str("'parts/b' has the checksum ",
                      xxh3_text(sum_of_file(folder_.path(), "parts/b").xxh3),
                      ", its manifest says ", xxh3_text(manifest_.files.at(1).xxh3))});
}

TEST_F(SavedCheckpoint, ProgressCountsTheBytesOfAllFiles) {
  std::vector<std::int64_t> seen;
  EXPECT_EQ(verify_manifest(folder_.path(), manifest_, VerifyDepth::kSums,
                            [&](std::int64_t bytes) { seen.push_back(bytes); }),
            Lines{});
  EXPECT_TRUE(std::ranges::is_sorted(seen));
  ASSERT_GT(seen.size(), 3U);  // in parts
  EXPECT_EQ(seen.back(), (3 << 20) + 11);
}

TEST(NumberedCheckpoints, AreTheFoldersOfThatNameAndNothingElse) {
  const Folder folder;
  for (const auto* name : {"checkpoint_10", "checkpoint_9", "checkpoint_0", "checkpoint_",
                           "checkpoint_1x", "my_checkpoint_3", ".checkpoint_4", "checkpoint_-5",
                           "checkpoint_99999999999999999999", "Checkpoint_6", "checkpoint_ 7"}) {
    fs::create_directory(folder / name);
  }
  std::ofstream(folder / "checkpoint_8") << "a file";
  std::vector<std::int64_t> numbers;
  for (const auto& checkpoint : numbered_checkpoints(folder.path())) {
    numbers.push_back(checkpoint.number);
    EXPECT_EQ(checkpoint.path, folder / str("checkpoint_", checkpoint.number));
  }
  EXPECT_EQ(numbers, (std::vector<std::int64_t>{0, 9, 10}));
}

TEST(NumberedCheckpoints, AFolderThatIsNotThereHasNone) {
  const Folder folder;
  EXPECT_TRUE(numbered_checkpoints(folder / "none").empty());
  std::ofstream(folder / "file") << "x";
  EXPECT_TRUE(numbered_checkpoints(folder / "file").empty());
}

}  // namespace
}  // namespace accelerate::detail::formats
