// write_man_pages DIR: the manual pages of `accelerate`, from its command table.
#include <filesystem>
#include <iostream>
#include <string>

#include "accelerate/errors.h"
#include "commands/command_table.h"
#include "commands/help.h"
#include "core/files.h"
#include "core/text.h"

int main(int argc, char** argv) {
  using namespace accelerate;
  namespace commands = detail::commands;
  if (argc != 2) {
    std::cerr << "usage: write_man_pages DIR\n";
    return 2;
  }
  try {
    const std::filesystem::path folder = argv[1];
    std::filesystem::create_directories(folder);
    detail::write_file_atomically(folder / "accelerate.1", commands::main_man_page());
    for (const auto& command : commands::command_table()) {
      detail::write_file_atomically(folder / detail::str("accelerate-", command.name, ".1"),
                                    commands::command_man_page(command));
    }
  } catch (const std::exception& error) {
    std::cerr << "write_man_pages: " << error.what() << '\n';
    return 1;
  }
}
