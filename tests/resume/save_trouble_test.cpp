// Saves on a full or read-only disk, in folders that vanish or are shared or not, with processes
// that fail or die.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>

#include "accelerate/accelerator.h"
#include "accelerate/errors.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::message_of;
using test::SharedFolder;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::set<std::string> names_below(const fs::path& folder) {
  std::set<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

struct WideImpl : torch::nn::Module {
  explicit WideImpl(std::int64_t kilobytes)
      : weight(register_parameter("weight", torch::zeros({kilobytes * 256}))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x; }
  torch::Tensor weight;
};
TORCH_MODULE(Wide);

/// An object whose state is what the test says.
struct Scripted {
  [[nodiscard]] Value state_dict() const {
    if (fails) throw std::runtime_error("the state cannot be read");
    return Value(number);
  }
  void load_state_dict(const Value& state) { number = state.as_int(); }
  std::int64_t number = 0;
  bool fails = false;
};

struct Program {
  explicit Program(const ProjectConfiguration& project, std::int64_t kilobytes = 16)
      : accelerator({.cpu = true, .project_config = project}), wide(kilobytes) {
    (void)accelerator.prepare(wide);
    accelerator.register_for_checkpointing(object);
  }
  void save(std::int64_t number, bool asynchronous = false) {
    object.number = number;
    accelerator.save_state({}, {.asynchronous = asynchronous});
  }
  std::int64_t load() {
    accelerator.load_state();
    return object.number;
  }

  Scripted object;
  Accelerator accelerator;
  Wide wide;
};

ProjectConfiguration automatic(const fs::path& project, std::int64_t limit = 1) {
  return {.project_dir = project, .automatic_checkpoint_naming = true, .total_limit = limit};
}

/// The message of the error that `f` throws; on the failing rank it is a `Kind`, on others a
/// `CommError` that names that rank and has its words.
template <class Kind, class F>
std::string error_on_all(const Accelerator& accelerator, int failing, F f) {
  try {
    f();
  } catch (const CommError& error) {
    EXPECT_NE(accelerator.process_index(), failing) << error.what();
    EXPECT_EQ(error.rank(), failing) << error.what();
    return error.what();
  } catch (const Kind& error) {
    EXPECT_EQ(accelerator.process_index(), failing) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown on rank " << accelerator.process_index();
  return "";
}

// ---- disks --------------------------------------------------------------------------------------

/// A small file system in memory.
class SmallDisk {
 public:
  explicit SmallDisk(fs::path path) : path_(std::move(path)) {
    fs::create_directories(path_);
    if (!in_child_process()) mounted_ = mount(0, "size=3m");
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(path_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  [[nodiscard]] bool mounted() const { return mounted_ || in_child_process(); }
  [[nodiscard]] bool mount(unsigned long flags, const char* options) const {
    return ::mount("accelerate_test", path_.c_str(), "tmpfs", flags, options) == 0;
  }

 private:
  fs::path path_;
  bool mounted_ = false;
};

TEST(SaveTrouble, AFullDiskIsOneErrorOnAllProcessesAndLeavesTheCheckpointBefore) {
  const SharedFolder folder;
  const SmallDisk disk(folder.path() / "disk");
  if (!disk.mounted()) GTEST_SKIP() << "no right to mount a file system";
  on_processes(2, folder.options(), [&] {
    Program program(automatic(folder.path() / "disk", 2), 1000);
    for (const bool asynchronous : {false, true}) {
      // 1 MB fits twice, not three times.
      while (program.object.number < 2) program.save(program.object.number + 1);
      // Whichever file comes to the end of the disk, and on both processes if two do.
      const auto message = message_of<Error>([&] {
        program.save(3, asynchronous);
        program.accelerator.wait_for_save_state();
      });
      EXPECT_TRUE(contains(message, "checkpoint_2/")) << message;
      EXPECT_TRUE(contains(message, "': No space left on device.")) << message;
      EXPECT_EQ(program.load(), 2);
    }
    program.accelerator.wait_for_everyone();
    if (program.accelerator.is_main_process()) {
      EXPECT_TRUE(disk.mount(MS_REMOUNT, "size=30m"));
    }
    program.accelerator.wait_for_everyone();
    program.save(4);
    EXPECT_EQ(program.load(), 4);
  });
}

TEST(SaveTrouble, AReadOnlyDiskIsOneErrorOnAllProcessesAndLeavesTheCheckpointBefore) {
  const SharedFolder folder;
  const SmallDisk disk(folder.path() / "disk");
  if (!disk.mounted()) GTEST_SKIP() << "no right to mount a file system";
  on_processes(2, folder.options(), [&] {
    Program program(automatic(folder.path() / "disk"));
    program.save(1);
    program.accelerator.wait_for_everyone();
    if (program.accelerator.is_main_process()) {
      ASSERT_TRUE(disk.mount(MS_REMOUNT | MS_RDONLY, "size=3m"));
    }
    const auto message =
        error_on_all<CheckpointError>(program.accelerator, 0, [&] { program.save(2); });
    EXPECT_TRUE(contains(message, "Read-only file system.")) << message;
    EXPECT_TRUE(contains(message, folder.path().string())) << message;
    EXPECT_EQ(program.load(), 1);
    program.accelerator.wait_for_everyone();
    if (program.accelerator.is_main_process()) {
      ASSERT_TRUE(disk.mount(MS_REMOUNT, "size=3m"));
    }
    program.accelerator.wait_for_everyone();
    program.save(3);
    EXPECT_EQ(program.load(), 3);
  });
}

TEST(SaveTrouble, CheckpointsMayBeOnAnotherDiskThanTheProject) {
  const Folder folder;
  const SmallDisk disk(folder.path() / "disk");
  if (!disk.mounted()) GTEST_SKIP() << "no right to mount a file system";
  fs::create_directories(folder.path() / "project");
  fs::create_directory_symlink(folder.path() / "disk", folder.path() / "project" / "checkpoints");
  Program program(automatic(folder.path() / "project"));
  program.save(1);
  program.save(2);
  EXPECT_EQ(program.load(), 2);
  EXPECT_EQ(names_below(folder.path() / "disk"), std::set<std::string>{"checkpoint_1"});
  EXPECT_EQ(names_below(folder.path() / "project"), std::set<std::string>{"checkpoints"});
}

// ---- folders ------------------------------------------------------------------------------------

TEST(SaveTrouble, AFolderThatVanishesIsOneErrorAndTheNextSaveWorks) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    Program program(automatic(folder.path() / "project"));
    program.save(1);
    // A hook runs after the folder was made and before files are written.
    auto hook = program.accelerator.register_save_state_pre_hook(
        [&](const auto&, const auto&, const fs::path& place) {
          if (program.accelerator.is_main_process()) fs::remove_all(place);
        });
    for (const bool asynchronous : {false, true}) {
      std::string message;
      try {
        program.save(2, asynchronous);
        program.accelerator.wait_for_save_state();
      } catch (const Error& error) {
        message = error.what();
      }
      EXPECT_TRUE(contains(message, "No such file or directory.")) << message;
      EXPECT_TRUE(contains(message, ".accelerate_staging/checkpoint_")) << message;
      EXPECT_EQ(program.load(), 1);
    }
    hook.remove();
    program.save(3);
    EXPECT_EQ(program.load(), 3);
  });
}

TEST(SaveTrouble, ARelativeProjectIsThatOfTheCallAlsoIfTheProgramGoesElsewhere) {
  const Folder folder;
  const auto home = fs::current_path();
  fs::create_directories(folder.path() / "one");
  fs::create_directories(folder.path() / "two");
  fs::current_path(folder.path() / "one");
  {
    Program program(automatic("not/there/yet"), 4000);
    program.save(1, /*asynchronous=*/true);
    fs::current_path(folder.path() / "two");
    program.accelerator.wait_for_save_state();
    fs::current_path(folder.path() / "one");
    EXPECT_EQ(program.load(), 1);
  }
  fs::current_path(home);
  EXPECT_EQ(names_below(folder.path() / "two"), std::set<std::string>{});
}

TEST(SaveTrouble, TheNewCheckpointIsKeptAlsoIfItsNumberIsTheLowest) {
  const Folder folder;
  Program program(automatic(folder.path()));
  program.accelerator.set_save_iteration(5);
  program.save(1);
  program.accelerator.set_save_iteration(2);
  program.save(2);
  EXPECT_EQ(names_below(folder.path() / "checkpoints"), std::set<std::string>{"checkpoint_2"});
  EXPECT_EQ(program.load(), 2);
}

TEST(SaveTrouble, TwoAcceleratorsDoNotSaveToOneProjectAtTheSameTime) {
  const Folder folder;
  Program first(automatic(folder.path()));
  Program second(automatic(folder.path()));
  std::string message;
  auto hook = first.accelerator.register_save_state_pre_hook(
      [&](const auto&, const auto&, const fs::path&) {
        message = message_of<CheckpointError>([&] { second.save(2); });
      });
  first.save(1);
  hook.remove();
  EXPECT_EQ(message, "Another process or object uses '" + folder.path().string() +
                         "' for save_state. Name another folder, or wait until it has ended.");
  EXPECT_EQ(first.load(), 1);
  second.accelerator.set_save_iteration(1);
  second.save(3);
  EXPECT_EQ(first.load(), 3);
}

TEST(SaveTrouble, AsynchronousSavesOfTwoAcceleratorsDoNotMixUpTheirAnswers) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    Program first(automatic(folder.path() / "first"));
    Program second(automatic(folder.path() / "second"));
    first.save(1, /*asynchronous=*/true);
    second.save(2, /*asynchronous=*/true);
    first.accelerator.wait_for_save_state();
    second.accelerator.wait_for_save_state();
    EXPECT_EQ(first.load(), 1);
    EXPECT_EQ(second.load(), 2);
  });
}

// ---- hosts --------------------------------------------------------------------------------------

TEST(SaveTrouble, HostsThatShareNoFolderEachHaveACheckpointAndLoadTheSameOne) {
  const SharedFolder folder;
  auto options = folder.options();
  options.processes_per_host = 1;
  on_processes(2, options, [&] {
    const PartialState state({.cpu = true});
    const auto host = folder.path() / ("host" + std::to_string(state.process_index()));
    fs::create_directories(host);
    fs::current_path(host);
    auto project = automatic("project", 2);
    project.save_on_each_node = true;
    Program program(project);
    program.save(1);
    program.save(2);
    EXPECT_TRUE(
        fs::exists(host / "project" / "checkpoints" / "checkpoint_1" / "model.safetensors"));
    EXPECT_EQ(program.load(), 2);
    // As if this host had been killed before it had published the last one.
    if (state.process_index() == 1) fs::remove_all("project/checkpoints/checkpoint_1");
    EXPECT_EQ(program.load(), 1);
  });
}

TEST(SaveTrouble, HostsThatShareTheFolderWriteCommonFilesOnce) {
  const SharedFolder folder;
  auto options = folder.options();
  options.processes_per_host = 1;
  on_processes(2, options, [&] {
    auto project = automatic(folder.path());
    project.save_on_each_node = true;
    Program program(project);
    // The objects differ, as does what two processes would write under one name.
    for (int i = 0; i < 5; ++i) program.save(10 * i + program.accelerator.process_index());
    EXPECT_EQ(program.load(), 40);
  });
}

// ---- processes ----------------------------------------------------------------------------------

TEST(SaveTrouble, AnObjectThatFailsOnOneProcessIsOneErrorOnAll) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    Program program(automatic(folder.path()));
    program.save(1);
    for (const bool asynchronous : {false, true}) {
      program.object.fails = program.accelerator.process_index() == 1;
      const auto message = error_on_all<std::runtime_error>(program.accelerator, 1,
                                                            [&] { program.save(2, asynchronous); });
      EXPECT_TRUE(contains(message, "the state cannot be read")) << message;
      program.object.fails = false;
      program.accelerator.wait_for_everyone();
      EXPECT_EQ(names_below(folder.path()), std::set<std::string>{"checkpoints"});
      EXPECT_EQ(program.load(), 1);
    }
    program.save(3);
    EXPECT_EQ(program.load(), 3);
  });
}

/// A rank is killed while its thread writes: the other one ends soon, by `end` and its destructor.
/// Returns its output.
template <class F>
std::string output_of_survivor(int dies, const SharedFolder& folder,
                               const OnProcessesOptions& options, F end) {
  const auto outcomes = run_processes(2, options, [&] {
    const auto begin = std::chrono::steady_clock::now();
    {
      Program program(automatic(folder.path()), 20'000);
      program.save(1);
      program.save(2, /*asynchronous=*/true);
      if (program.accelerator.process_index() == dies) ::raise(SIGKILL);
      end(program.accelerator);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, test::patient(std::chrono::seconds(40)));
  });
  const auto& survivor = outcomes[static_cast<std::size_t>(1 - dies)];
  EXPECT_TRUE(survivor.ok()) << survivor.output;
  Program program(automatic(folder.path()), 20'000);
  EXPECT_EQ(program.load(), 1);
  program.save(3);
  EXPECT_EQ(program.load(), 3);
  EXPECT_EQ(names_below(folder.path()), std::set<std::string>{"checkpoints"});
  return survivor.output;
}

TEST(SaveTrouble, TheDestructorDoesNotWaitForAProcessThatDiedDuringAnAsynchronousSave) {
  const SharedFolder folder;
  const auto output = output_of_survivor(1, folder, folder.options(), [](Accelerator&) {});
  EXPECT_TRUE(contains(output,
                       "The last asynchronous save_state failed: Saving failed: rank 1 has "
                       "given no sign of life for 10 s."))
      << output;
}

TEST(SaveTrouble, TheProcessThatServesTheStoreMayDieDuringAnAsynchronousSave) {
  const SharedFolder folder;
  auto options = folder.options();
  options.environment.emplace_back("MASTER_PORT", std::to_string(get_free_port()));
  options.rendezvous = false;
  (void)output_of_survivor(0, folder, options, [](Accelerator& accelerator) {
    const auto message = message_of<CommError>([&] { accelerator.wait_for_save_state(); });
    EXPECT_TRUE(contains(message, "the store through which processes agree does not answer"))
        << message;
    EXPECT_TRUE(contains(message, "The checkpoint is not published")) << message;
  });
}

TEST(SaveTrouble, AnAsynchronousSaveAtTheEndOfTheProgramIsPublishedEverywhere) {
  const SharedFolder folder;
  const auto outcomes = run_processes(2, folder.options(), [&] {
    Program program(automatic(folder.path()));
    program.save(1, /*asynchronous=*/true);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok() && !outcome.output_contains("failed")) << outcome.output;
  }
}

}  // namespace
}  // namespace accelerate
