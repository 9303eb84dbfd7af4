// tests/support/line_up.h - processes of a test that begin together.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

namespace accelerate::test {

/// Returns when `count` processes have called it: on a busy machine they start at different times.
inline void line_up(const std::string& file, std::uintmax_t count) {
  std::ofstream(file, std::ios::app) << 'x';
  while (std::filesystem::file_size(file) < count) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace accelerate::test
