// src/formats/bus_errors.h - says which mapped file was cut before SIGBUS ends the process.
#pragma once

#include <cstddef>
#include <string>

namespace accelerate::detail::formats {

/// While it lives, a SIGBUS at one of these addresses first prints one line that names the file.
/// The handler of the program, or death by SIGBUS, comes afterwards, as without us.
class MappingName {
 public:
  MappingName(const void* begin, std::size_t size, std::string name);
  ~MappingName();
  MappingName(const MappingName&) = delete;
  MappingName& operator=(const MappingName&) = delete;

 private:
  struct Entry* entry_;
};

}  // namespace accelerate::detail::formats
