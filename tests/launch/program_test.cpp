#include "launch/program.h"

#include <elf.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "support/message_of.h"

namespace accelerate::detail::launch {
namespace {

namespace fs = std::filesystem;

using test::message_of;

// What was built beside this test.
std::string fixture(const std::string& name) {
  return (fs::read_symlink("/proc/self/exe").parent_path() / "launch_fixtures" / name).string();
}

// A folder of files, current while the test runs.
class InspectProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "accelerate-program-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    before_ = fs::current_path();
    fs::current_path(folder_);
  }
  void TearDown() override {
    fs::current_path(before_);
    fs::remove_all(folder_);
  }

  static void write(const std::string& name, const std::string& content, mode_t mode = 0755) {
    std::ofstream(name, std::ios::binary) << content;
    ::chmod(name.c_str(), mode);
  }
  static std::string read(const std::string& name) {
    std::ifstream file(name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  ProgramFacts inspect(const std::vector<std::string>& argv) const {
    return inspect_program(argv, Environment(variables_));
  }
  std::string refusal(const std::vector<std::string>& argv) const {
    return message_of<ConfigError>([&] { static_cast<void>(inspect(argv)); });
  }

  fs::path folder_;
  fs::path before_;
  std::map<std::string, std::string> variables_{{"PATH", "/usr/bin:/bin"}};
};

TEST_F(InspectProgram, FindsAProgramInPathAndTakesAPathAsItIs) {
  write("train", "#!/bin/sh\n");
  EXPECT_EQ(inspect({"./train"}), (ProgramFacts{.path = "./train"}));
  EXPECT_EQ(inspect({(folder_ / "train").string()}).path, (folder_ / "train").string());
  variables_["PATH"] = "/nowhere:" + folder_.string() + ":/bin";
  EXPECT_EQ(inspect({"train", "--flag"}).path, (folder_ / "train").string());
}

TEST_F(InspectProgram, SkipsWhatCannotRunInEarlierFoldersOfPath) {
  fs::create_directories("a/train");
  fs::create_directory("b");
  fs::create_directory("c");
  write("b/train", "#!/bin/sh\n", 0644);
  write("c/train", "#!/bin/sh\n");
  variables_["PATH"] = "a:b:c";
  EXPECT_EQ(inspect({"train"}).path, "c/train");
}

TEST_F(InspectProgram, RefusesAnEmptyCommand) {
  EXPECT_EQ(refusal({}), "There is no program to start.");
  EXPECT_EQ(refusal({""}), "There is no program to start.");
}

TEST_F(InspectProgram, NamesASimilarFileWhenThereIsNone) {
  write("train", "#!/bin/sh\n");
  write("trainx.txt", "", 0644);
  fs::create_directory("build");
  write("build/finetune", "#!/bin/sh\n");
  EXPECT_EQ(refusal({"./trainn"}),
            "The program './trainn' does not exist. Did you mean './train'?");
  EXPECT_EQ(refusal({"build/finetun"}),
            "The program 'build/finetun' does not exist. Did you mean 'build/finetune'?");
  EXPECT_EQ(refusal({"./something"}),
            "The program './something' does not exist. Build it first, or correct the path.");
}

TEST_F(InspectProgram, SaysWhenTheFolderIsMissingToo) {
  EXPECT_EQ(refusal({"bild/train"}),
            "The program 'bild/train' does not exist, nor does the folder 'bild'. Paths count from "
            "the folder in which accelerate is called.");
}

TEST_F(InspectProgram, PointsToTheCurrentFolderForANameThatIsNotInPath) {
  write("train_here", "#!/bin/sh\n");
  EXPECT_EQ(refusal({"train_here"}),
            "The program 'train_here' is in the current folder, which PATH does not contain. Write "
            "./train_here instead.");
}

TEST_F(InspectProgram, NamesASimilarProgramOfPath) {
  fs::create_directory("tools");
  write("tools/finetune", "#!/bin/sh\n");
  write("tools/fintune", "", 0644);
  variables_["PATH"] = "tools";
  EXPECT_EQ(refusal({"fintune"}),
            "The program 'fintune' is in no folder of PATH. Did you mean 'finetune'?");
  EXPECT_EQ(refusal({"something_else"}),
            "The program 'something_else' is in no folder of PATH. Give its path, such as "
            "build/train.");
}

TEST_F(InspectProgram, RefusesADanglingLinkAndNamesItsTarget) {
  fs::create_symlink("gone", "train");
  EXPECT_EQ(refusal({"./train"}),
            "The program './train' is a link to 'gone', which does not exist. Correct the link, or "
            "build what it names.");
}

TEST_F(InspectProgram, RefusesAFolder) {
  fs::create_directory("train");
  EXPECT_EQ(refusal({"./train"}), "The program './train' is a folder. Name the file in it to run.");
}

TEST_F(InspectProgram, TellsHowToMakeAFileExecutable) {
  write("train", "#!/bin/sh\n", 0644);
  write("train.py", "#!/bin/sh\n", 0644);
  EXPECT_EQ(refusal({"./train"}), "The program './train' is not executable. Run chmod +x ./train.");
  EXPECT_EQ(refusal({"./train.py"}),
            "The program './train.py' is not executable. Run chmod +x ./train.py, or leave out "
            "--no_python.");
}

TEST_F(InspectProgram, RefusesWhatTheKernelCannotExecute) {
  const std::string binary = read("/proc/self/exe");
  std::string foreign = binary;
  foreign[offsetof(Elf64_Ehdr, e_machine)] = static_cast<char>(EM_S390);
  std::string object = binary;
  object[offsetof(Elf64_Ehdr, e_type)] = ET_REL;
  write("empty", "");
  write("script", "echo hello\n");
  write("foreign", foreign);
  write("object", object);
  write("head", binary.substr(0, 80));
  utsname machine = {};
  ::uname(&machine);
  for (const std::string name : {"./empty", "./script", "./foreign", "./object", "./head"}) {
    EXPECT_EQ(refusal({name}), "The program '" + name + "' is neither a binary for " +
                                   machine.machine +
                                   " nor a script with a #! line. Build it on this machine, or "
                                   "begin a script with a line such as #!/bin/sh.");
  }
}

TEST_F(InspectProgram, RefusesAScriptWhoseInterpreterIsNotThere) {
  write("missing", "#!  /usr/bin/pyton3 -u\nprint()\n");
  write("windows", "#!/bin/sh\r\necho\r\n");
  write("blank", "#!\n");
  write("by_env", "#!/usr/bin/env pyton3\n");
  EXPECT_EQ(refusal({"./missing"}),
            "The program './missing' names the interpreter '/usr/bin/pyton3' in its first line, "
            "which is not there. Install it or correct the line.");
  EXPECT_EQ(refusal({"./windows"}),
            "The program './windows' has Windows line ends, which the system takes for a part of "
            "the #! line. Run sed -i 's/\\r$//' ./windows.");
  EXPECT_EQ(refusal({"./blank"}),
            "The program './blank' has an empty #! line. Begin it with a line such as #!/bin/sh.");
  EXPECT_EQ(refusal({"./by_env"}),
            "The program './by_env' asks for 'pyton3' in its first line, which is in no folder of "
            "PATH. Install it, extend PATH or correct the line.");
}

TEST_F(InspectProgram, TakesScriptsAndNeverRunsThem) {
  write("script", "#!/bin/sh\ntouch ran\n");
  write("by_env", "#!/usr/bin/env sh\ntouch ran\n");
  write("with_options", "#!/usr/bin/env -S sh -e\ntouch ran\n");
  write("with_tab", "#!/bin/sh\t-e\ntouch ran\n");
  for (const auto* name : {"./script", "./by_env", "./with_options", "./with_tab"}) {
    EXPECT_EQ(inspect({name}), (ProgramFacts{.path = name}));
  }
  EXPECT_FALSE(fs::exists("ran"));
}

// ---- binaries -----------------------------------------------------------------------------------

constexpr const char* kLibraryRemedy =
    ". Add their folders to LD_LIBRARY_PATH, build the program with an RPATH, or build it on this "
    "machine.";

TEST_F(InspectProgram, NamesALibraryThatIsNotFound) {
  EXPECT_EQ(refusal({fixture("needy")}),
            "The program '" + fixture("needy") +
                "' cannot load its libraries: libaccelerate.so.0 => not found" + kLibraryRemedy);
}

TEST_F(InspectProgram, NamesTheVersionThatAnOldLibraryLacks) {
  variables_["LD_LIBRARY_PATH"] = fixture("old");
  const std::string text = refusal({fixture("needy")});
  EXPECT_NE(text.find("/libaccelerate.so.0: version `FIXTURE_2' not found"), std::string::npos)
      << text;
  EXPECT_TRUE(text.ends_with(kLibraryRemedy)) << text;
}

TEST_F(InspectProgram, SeesThatAProgramLoadsTheLibraryAndCanTakeASocket) {
  variables_["LD_LIBRARY_PATH"] = fixture("new");
  EXPECT_EQ(inspect({fixture("needy")}),
            (ProgramFacts{.path = fixture("needy"), .takes_listen_fd = true}));
  EXPECT_FALSE(inspect({"sh"}).takes_listen_fd);
}

TEST_F(InspectProgram, NeverRunsABinary) {
  variables_["LD_LIBRARY_PATH"] = fixture("new");
  variables_["FIXTURE_RAN"] = "ran";
  static_cast<void>(inspect({fixture("needy")}));
  EXPECT_FALSE(fs::exists("ran"));
}

TEST_F(InspectProgram, IsNotMisledByTheLoadersOwnSwitches) {
  variables_["LD_LIBRARY_PATH"] = fixture("new");
  variables_["LD_DEBUG"] = "all";
  variables_["LD_VERBOSE"] = "1";
  EXPECT_TRUE(inspect({fixture("needy")}).takes_listen_fd);
}

TEST_F(InspectProgram, LooksForLibrariesBesideTheFileAndNotBesideALinkToIt) {
  fs::create_directories("real/bin");
  fs::create_symlink(fixture("new"), "real/lib");
  fs::copy_file(fixture("beside"), "real/bin/train");
  fs::create_directory("bin");
  fs::create_symlink("../real/bin/train", "bin/train");
  EXPECT_EQ(inspect({"bin/train"}), (ProgramFacts{.path = "bin/train", .takes_listen_fd = true}));
}

TEST_F(InspectProgram, RefusesABinaryThatIsCutOff) {
  const std::string binary = read("/proc/self/exe");
  write("part", binary.substr(0, binary.size() / 8));
  const std::string text = refusal({"./part"});
  EXPECT_TRUE(text.starts_with("The program './part' ")) << text;
  EXPECT_TRUE(text.ends_with("Build or copy it again.")) << text;
}

TEST_F(InspectProgram, RefusesABinaryWhoseLoaderIsNotThere) {
  std::string binary = read("/proc/self/exe");
  const auto at = binary.find("/ld-linux");
  ASSERT_NE(at, std::string::npos);
  binary[at + 1] = 'X';
  write("train", binary);
  const std::string text = refusal({"./train"});
  EXPECT_NE(text.find("needs the loader '"), std::string::npos) << text;
  EXPECT_NE(text.find("which is not on this machine"), std::string::npos) << text;
}

// ---- Python -------------------------------------------------------------------------------------

class InspectPython : public InspectProgram {
 protected:
  void SetUp() override {
    InspectProgram::SetUp();
    write("python3", "#!/bin/sh\n");
    write("train.py", "print()\n", 0644);
  }
};

TEST_F(InspectPython, LooksAtTheScriptBehindTheOptions) {
  const ProgramFacts expected{.path = "./python3", .is_python = true};
  EXPECT_EQ(inspect({"./python3", "train.py", "missing.py"}), expected);
  EXPECT_EQ(inspect({"./python3", "-u", "-X", "dev", "-Wignore", "train.py"}), expected);
  EXPECT_EQ(inspect({"./python3", "-uW", "ignore", "train.py"}), expected);
  EXPECT_EQ(refusal({"./python3", "-u", "tran.py"}),
            "The program 'tran.py' does not exist. Did you mean 'train.py'?");
}

TEST_F(InspectPython, LeavesModulesTextsAndStandardInputToPython) {
  EXPECT_TRUE(inspect({"./python3", "-m", "missing"}).is_python);
  EXPECT_TRUE(inspect({"./python3", "-um", "missing"}).is_python);
  EXPECT_TRUE(inspect({"./python3", "-c", "pass"}).is_python);
  EXPECT_TRUE(inspect({"./python3", "-"}).is_python);
  EXPECT_TRUE(inspect({"./python3"}).is_python);
}

TEST_F(InspectPython, TakesAFolderThatPythonCanRun) {
  fs::create_directories("package");
  EXPECT_EQ(refusal({"./python3", "package"}),
            "The program 'package' is a folder without a __main__.py. Name the script in it to "
            "run.");
  write("package/__main__.py", "");
  EXPECT_TRUE(inspect({"./python3", "package"}).is_python);
}

TEST_F(InspectPython, KnowsAnInterpreterByItsName) {
  for (const auto* name : {"./python", "./python3.11", "./pypy3"}) {
    write(name, "#!/bin/sh\n");
    EXPECT_TRUE(inspect({name}).is_python) << name;
  }
  for (const auto* name : {"./pythonic", "./python3-config", "./train"}) {
    write(name, "#!/bin/sh\n");
    EXPECT_FALSE(inspect({name, "missing.py"}).is_python) << name;
  }
}

}  // namespace
}  // namespace accelerate::detail::launch
