// tests/support/reference_path.h - where the files that Python wrote are.
#pragma once

#include <filesystem>
#include <string>

namespace accelerate::test {

/// The file `name` under tests/reference/, e.g. "state/state.json".
[[nodiscard]] std::filesystem::path reference_path(const std::string& name);

}  // namespace accelerate::test
