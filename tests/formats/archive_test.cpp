// Torch archives: the parts that a zip file and a pickle alone cannot check.
#include "formats/archive.h"

#include <gtest/gtest.h>

#include <fstream>

#include "accelerate/errors.h"
#include "core/files.h"
#include "formats/pickle.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate::detail::formats {
namespace {

using namespace std::string_literals;
using test::message_of;

std::string zip_of(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string out;
  ZipWriter zip([&](std::string_view bytes) { out += bytes; });
  for (const auto& [name, bytes] : entries) zip.add(name, bytes);
  zip.finish();
  return out;
}

std::string error_of(const std::string& file) {
  const MemoryBytes source(file, "f");
  return message_of<FormatError>([&] { const ArchiveReader archive(source); });
}

/// A tensor of two floats in storage "0".
Value two_floats() {
  auto storage = std::make_shared<PickleStorage>();
  storage->key = "0";
  storage->dtype = "float32";
  storage->location = "cpu";
  storage->bytes = 8;
  auto tensor = std::make_shared<PickleTensor>();
  tensor->storage = std::move(storage);
  tensor->dtype = "float32";
  tensor->sizes = {2};
  tensor->strides = {1};
  return Value(Value::Leaf(std::move(tensor)));
}

std::string storage_error(const std::vector<std::pair<std::string, std::string>>& storages) {
  std::vector<std::pair<std::string, std::string>> entries{
      {"a/data.pkl", pickle_dumps(two_floats())}};
  entries.insert(entries.end(), storages.begin(), storages.end());
  const auto file = zip_of(entries);
  const MemoryBytes source(file, "f");
  const ArchiveReader archive(source);
  return message_of<FormatError>(
      [&] { (void)archive.entry(*leaf_as<PickleTensor>(archive.value())->storage); });
}

TEST(Archive, IsNamedAsItsFileUpToTheLastDot) {
  EXPECT_EQ(archive_name("x/optimizer.bin"), "optimizer");
  EXPECT_EQ(archive_name("random_states_0.pkl"), "random_states_0");
  EXPECT_EQ(archive_name("model.v1.bin"), "model.v1");
  EXPECT_EQ(archive_name("model"), "model");
  EXPECT_EQ(archive_name(".pt"), ".pt");
  for (const auto* name : {"...", "a\\b.pt", "c:d.pt", "\xff.pt", "\u91cd.pt"}) {
    EXPECT_EQ(archive_name(name), "archive") << name;
  }
}

TEST(Archive, RefusesStoragesOfAnotherSize) {
  EXPECT_EQ(storage_error({{"a/data/0", "12345678"}}), "nothing was thrown");
  EXPECT_EQ(storage_error({}), "'f', byte 0: the archive has no entry for the storage '0'.");
  EXPECT_EQ(storage_error({{"a/data/0", "1234"}}),
            "'f', byte 320: the storage '0' has 4 bytes; its tensors need 8.");
  EXPECT_EQ(storage_error({{"a/data/0", "1234567890"}}),
            "'f', byte 320: the storage '0' has 10 bytes; its tensors need 8.");
}

TEST(Archive, NamesOtherFiles) {
  EXPECT_EQ(error_of(""), "'f', byte 0: the file is empty.");
  EXPECT_EQ(error_of("hello world"),
            "'f', byte 0: the file is no archive of torch.save: it does not begin as a zip file.");
  EXPECT_EQ(
      error_of("\x10\0\0\0\0\0\0\0{}"s),
      "'f', byte 0: the file looks like safetensors. Open it with accelerate::safetensors::File, "
      "or give it the ending .safetensors.");
  EXPECT_EQ(
      error_of("\x80\x04N."),
      "'f', byte 0: the file is a bare pickle and no archive of torch.save. Load it in Python "
      "and save its weights again with torch.save, or as safetensors.");
  EXPECT_EQ(
      error_of(std::string(257, '\0') + "ustar" + std::string(100, '\0')),
      "'f', byte 0: the file is a tar archive of torch.save before version 0.1.10. Load it in "
      "Python and save its weights again with torch.save, or as safetensors.");
}

TEST(Archive, RefusesArchivesThatAreNotOfTorchSave) {
  EXPECT_EQ(error_of(zip_of({{"a/data.pkl", "\x80\x02N."}, {"a/constants.pkl", "x"}})),
            "'f', byte 0: the archive is a TorchScript program, not data. Load it with "
            "torch::jit::load, or save its state_dict() with torch.save.");
  EXPECT_EQ(error_of(zip_of({{"a/readme", "x"}})),
            "'f', byte 0: the zip archive has no entry 'a/data.pkl', so it was not written by "
            "torch.save.");
  EXPECT_EQ(error_of(zip_of({{"a/data.pkl", "\x80\x02N."}, {"a/byteorder", "big"}})),
            "'f', byte 192: the byte order of the archive is 'big'; only 'little' is read.");
  EXPECT_EQ(error_of(zip_of({{"a/data.pkl", "\x80\x02NN."}})),
            "'f', byte 68: pickle: it ends with objects left over.");
}

TEST(Archive, IsReadThroughASymbolicLinkButNotFromAPipeOrFolder) {
  const test::Folder folder;
  std::ofstream(folder / "a.pt") << zip_of({{"a/data.pkl", "\x80\x02N."}});
  std::filesystem::create_symlink("a.pt", folder.path() / "link.pt");
  const FileBytes file(folder / "link.pt");
  EXPECT_TRUE(ArchiveReader(file).value().is_none());
  EXPECT_NE(message_of<CheckpointError>([&] { const FileBytes it(folder.path()); }),
            "nothing was thrown");
}

std::string legacy() { return read_whole_file(test::reference_path("torch_archive/legacy.pt")); }

TEST(LegacyArchive, RefusesAFileThatIsCutOffAtAnyByte) {
  const auto whole = legacy();
  EXPECT_EQ(error_of(whole), "nothing was thrown");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(error_of(whole.substr(0, size)), "nothing was thrown") << size;
  }
  EXPECT_EQ(error_of(whole + "x"), "'f', byte 468: 1 bytes follow the last storage.");
}

TEST(LegacyArchive, RefusesWhatDoesNotFitTogether) {
  auto version = legacy();
  version[18] = '\x00';
  EXPECT_EQ(error_of(version), "'f', byte 15: the version of the format is not 1001.");
  auto big = legacy();
  big[big.find("little_endian") + 15] = '\x89';
  EXPECT_NE(error_of(big).find("the file was not written on a little-endian machine"),
            std::string::npos);
  auto count = legacy();
  count[count.size() - 32] = '\x05';  // 6 floats follow their number
  EXPECT_NE(error_of(count).find("the storage '1234567890' has 5 elements; its tensors need 6."),
            std::string::npos)
      << error_of(count);
  auto key = legacy();
  key[key.rfind("1234567890")] = '9';
  EXPECT_NE(error_of(key).find("the storage '9234567890' belongs to no tensor"), std::string::npos);
}

}  // namespace
}  // namespace accelerate::detail::formats
