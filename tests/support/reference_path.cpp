// Alone in its translation unit: a path of this clone in every test would keep ccache from serving
// another clone.
#include "support/reference_path.h"

namespace accelerate::test {

std::filesystem::path reference_path(const std::string& name) {
  return std::filesystem::path(ACCELERATE_TEST_REFERENCE) / name;
}

}  // namespace accelerate::test
