#include "core/output_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

#include "accelerate/errors.h"
#include "core/files.h"
#include "core/text.h"
#include "reference.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::OutputFile;
using test::message_of;
using test::read_file;

class OutputFileTest : public testing::Test {
 protected:
  OutputFileTest() {
    std::string name = (fs::temp_directory_path() / "accelerate_output_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~OutputFileTest() override { fs::remove_all(folder_); }

  fs::path file(const std::string& name = "a.bin") const { return folder_ / name; }
  std::ptrdiff_t files() const {
    return std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
  }

  fs::path folder_;
};

TEST_F(OutputFileTest, AppearsWithItsWholeContentWhenItIsPublished) {
  OutputFile output(file());
  output.write("head ");
  output.write("tail");
  EXPECT_EQ(output.position(), 9);
  EXPECT_FALSE(fs::exists(file()));
  output.publish();
  EXPECT_EQ(read_file(file()), "head tail");
  EXPECT_EQ(files(), 1);
}

TEST_F(OutputFileTest, LeavesTheOldFileWhenItIsNotPublished) {
  detail::write_file_atomically(file(), "old");
  {
    OutputFile output(file());
    output.write("new");
  }
  EXPECT_EQ(read_file(file()), "old");
  EXPECT_EQ(files(), 1);
}

TEST_F(OutputFileTest, LeavesTheOldFileWhenTheWriterIsKilled) {
  detail::write_file_atomically(file(), "old");
  const pid_t child = ::fork();
  if (child == 0) {
    OutputFile output(file());
    output.write("half of the new");
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(read_file(file()), "old");
}

TEST_F(OutputFileTest, TakesDisjointRangesFromSeveralThreads) {
  constexpr std::int64_t kPart = 1 << 16;
  OutputFile output(file());
  output.reserve(4 * kPart);
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&output, i] {
      const std::string part(kPart, static_cast<char>('a' + i));
      output.write_at(i * kPart, std::as_bytes(std::span(part)));
    });
  }
  for (auto& writer : writers) writer.join();
  output.publish();
  std::string expected;
  for (const char c : {'a', 'b', 'c', 'd'}) expected.append(kPart, c);
  EXPECT_EQ(read_file(file()), expected);
}

TEST_F(OutputFileTest, HasTheSizeOfWhatWasWrittenAndNotOfWhatWasReserved) {
  OutputFile output(file());
  output.reserve(1 << 20);
  output.write("four");
  output.publish();
  EXPECT_EQ(read_file(file()), "four");
}

TEST_F(OutputFileTest, KeepsALinkAndReplacesTheFileItPointsTo) {
  detail::write_file_atomically(file("target"), "old");
  fs::create_symlink("target", file("link"));
  OutputFile output(file("link"));
  output.write("new");
  output.publish();
  EXPECT_TRUE(fs::is_symlink(file("link")));
  EXPECT_EQ(read_file(file("target")), "new");
}

TEST_F(OutputFileTest, FollowsLinksToWhatIsNotThereYet) {
  fs::create_symlink("target", file("link"));
  fs::create_symlink("link", file("outer"));
  OutputFile output(file("outer"));
  output.write("new");
  output.publish();
  EXPECT_TRUE(fs::is_symlink(file("outer")));
  EXPECT_TRUE(fs::is_symlink(file("link")));
  EXPECT_EQ(read_file(file("target")), "new");
  fs::create_symlink("loop", file("loop"));
  EXPECT_NE(message_of<CheckpointError>([&] { OutputFile(file("loop")); }).find("symbolic links"),
            std::string::npos);
}

TEST_F(OutputFileTest, KeepsThePermissionsOfTheOldFile) {
  detail::write_file_atomically(file(), "old");
  fs::permissions(file(), fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
  OutputFile output(file());
  output.publish();
  EXPECT_EQ(fs::status(file()).permissions(),
            fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
}

// A limit on the size of files is as near to a full disk as a test comes without a disk of its own.
TEST_F(OutputFileTest, AFullDiskIsAnErrorThatLeavesTheOldFile) {
  detail::write_file_atomically(file(), "old");
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const auto message = message_of<CheckpointError>([&] {
    OutputFile output(file());
    output.write(std::string(8192, 'x'));
    output.publish();
  });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(message, detail::str("Cannot write '", file().string(), "': File too large."));
  EXPECT_EQ(read_file(file()), "old");
  EXPECT_EQ(files(), 1);
}

TEST_F(OutputFileTest, ReservingMoreThanTheDiskHasIsAnErrorBeforeAnythingIsWritten) {
  OutputFile output(file());
  EXPECT_TRUE(message_of<CheckpointError>([&] {
                output.reserve(std::int64_t{1} << 62);
              }).starts_with(detail::str("Cannot write '", file().string(), "': ")));
}

TEST_F(OutputFileTest, RefusesFoldersPipesAndFoldersThatAreMissing) {
  EXPECT_EQ(message_of<CheckpointError>([&] { OutputFile output(folder_); }),
            detail::str("Cannot write '", folder_.string(), "': Is a directory."));
  const auto missing = folder_ / "none" / "a.bin";
  EXPECT_EQ(message_of<CheckpointError>([&] { OutputFile output(missing); }),
            detail::str("Cannot write '", missing.string(), "': No such file or directory."));
  ASSERT_EQ(::mkfifo(file("pipe").c_str(), 0600), 0);
  EXPECT_EQ(message_of<CheckpointError>([&] { OutputFile output(file("pipe")); }),
            detail::str("Cannot write '", file("pipe").string(),
                        "': it is a device, pipe or socket. Name a regular file."));
}

TEST_F(OutputFileTest, NamesThePathInTheError) {
  try {
    OutputFile output(folder_);
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_EQ(error.path(), folder_);
  }
}

}  // namespace
}  // namespace accelerate
