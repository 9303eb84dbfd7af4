// tests/support/shared_folder.h - a folder that all ranks of `on_processes` know.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "support/command.h"
#include "support/on_processes.h"

namespace accelerate::test {

/// The parent makes it, ranks find it in the environment.
class SharedFolder {
 public:
  SharedFolder() {
    if (in_child_process()) {
      path_ = std::getenv("SHARED_TEST_FOLDER");
    } else {
      path_ = own_.emplace().path();
    }
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] OnProcessesOptions options() const {
    return {.environment = {{"SHARED_TEST_FOLDER", path_.string()}}};
  }

 private:
  std::optional<Folder> own_;
  std::filesystem::path path_;
};

}  // namespace accelerate::test
