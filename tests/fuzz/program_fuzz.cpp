// Any bytes are read as a program, and name a loader or none.
#include <climits>
#include <sstream>
#include <string>

#include "fuzz.h"
#include "launch/program.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  std::istringstream file{std::string(fuzz::text(data, size))};
  const auto loader = detail::launch::loader_of(file);
  fuzz::check(loader.size() <= PATH_MAX, "a loader is a path");
  fuzz::check(loader.size() <= size, "a loader is in the file");
  fuzz::check(loader.find('\0') == std::string::npos, "a path has no zero byte");
  return 0;
}
