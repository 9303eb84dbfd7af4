#include "formats/mapped_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "accelerate/errors.h"
#include "core/files.h"
#include "core/text.h"
#include "support/command.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

using test::Folder;
using test::message_of;

std::string contents(const MappedFile& file) {
  const auto bytes = file.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(MappedFile, HasTheBytesOfTheFile) {
  const Folder folder;
  write_file_atomically(folder / "a", "some bytes");
  const auto file = MappedFile::open(folder / "a");
  EXPECT_EQ(file->size(), 10);
  EXPECT_EQ(contents(*file), "some bytes");
  EXPECT_EQ(file->read(5, 5), "bytes");
}

TEST(MappedFile, OpensAnEmptyFile) {
  const Folder folder;
  write_file_atomically(folder / "a", "");
  EXPECT_EQ(MappedFile::open(folder / "a")->size(), 0);
}

TEST(MappedFile, WritingIntoTheMappingDoesNotChangeTheFile) {
  const Folder folder;
  write_file_atomically(folder / "a", "some bytes");
  const auto file = MappedFile::open(folder / "a");
  file->bytes()[0] = std::byte{'S'};
  EXPECT_EQ(contents(*file), "Some bytes");
  EXPECT_EQ(read_whole_file(folder / "a"), "some bytes");
}

TEST(MappedFile, KeepsTheBytesOfAFileThatWasReplacedByRenaming) {
  const Folder folder;
  write_file_atomically(folder / "a", "old bytes");
  const auto file = MappedFile::open(folder / "a");
  write_file_atomically(folder / "a", "new");
  EXPECT_EQ(contents(*file), "old bytes");
}

TEST(MappedFile, RefusesWhatIsNoRegularFile) {
  const Folder folder;
  EXPECT_EQ(message_of<CheckpointError>([&] { (void)MappedFile::open(folder / "none"); }),
            str("Cannot read '", folder / "none", "': No such file or directory."));
  EXPECT_EQ(message_of<CheckpointError>([&] { (void)MappedFile::open(folder.path()); }),
            str("Cannot read '", folder.path().string(), "': Is a directory."));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(message_of<CheckpointError>([&] { (void)MappedFile::open(folder / "pipe"); }),
            str("Cannot read '", folder / "pipe", "': it is no regular file."));
}

TEST(MappedFile, ReadingAFileThatWasCutIsAnError) {
  const Folder folder;
  write_file_atomically(folder / "a", std::string(10000, 'x'));
  const auto file = MappedFile::open(folder / "a");
  ASSERT_EQ(::truncate((folder / "a").c_str(), 5000), 0);
  EXPECT_EQ(message_of<CheckpointError>([&] { (void)file->read(0, 10000); }),
            str("Cannot read '", folder / "a",
                "': it had 10000 bytes when it was opened and was cut to 5000 or fewer meanwhile. "
                "Replace a file by renaming a new one over it."));
}

using MappedFileDeathTest = testing::Test;

TEST(MappedFileDeathTest, TouchingAFileThatWasCutNamesItAndDiesBySigbus) {
  const Folder folder;
  write_file_atomically(folder / "a", std::string(10000, 'x'));
  const auto file = MappedFile::open(folder / "a");
  ASSERT_EQ(::truncate((folder / "a").c_str(), 0), 0);
  const volatile std::byte* byte = file->bytes().data() + 9000;
  EXPECT_EXIT(static_cast<void>(*byte), testing::KilledBySignal(SIGBUS),
              str("accelerate: '", folder / "a",
                  "' was cut while its tensors were in use: byte 9000 is gone. Replace a file by "
                  "renaming a new one over it.\n"));
}

TEST(MappedFileDeathTest, ASigbusOfOthersIsNotOurs) {
  const Folder folder;
  write_file_atomically(folder / "a", "some bytes");
  const auto file = MappedFile::open(folder / "a");
  EXPECT_EXIT(::kill(::getpid(), SIGBUS), testing::KilledBySignal(SIGBUS), "^$");
}

}  // namespace
}  // namespace accelerate::detail::formats
