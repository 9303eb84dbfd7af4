// bench/disk.h - what the benchmarks of files share: timing, and the rate of the disk.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace bench {

using Clock = std::chrono::steady_clock;

inline double seconds(const std::function<void()>& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline void report(const std::string& name, double value, const char* unit) {
  std::cout << name << '\t' << value << '\t' << unit << std::endl;
}

// What dd with conv=fsync does, from memory that is warm.
inline void write_plain(const std::filesystem::path& path, std::int64_t bytes) {
  const std::vector<char> block(8 << 20, 'x');
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  for (std::int64_t at = 0; at < bytes; at += static_cast<std::int64_t>(block.size())) {
    const auto count = std::min<std::int64_t>(bytes - at, static_cast<std::int64_t>(block.size()));
    if (::write(fd, block.data(), static_cast<std::size_t>(count)) != count) std::abort();
  }
  if (::fsync(fd) != 0) std::abort();
  ::close(fd);
}

}  // namespace bench
