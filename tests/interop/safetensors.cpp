// interop_safetensors write FOLDER: the state dicts of tests/reference/safetensors, saved.
// interop_safetensors copy FROM TO: each file loaded and saved again.
#include "accelerate/safetensors.h"

#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "checkpoint/random_state.h"

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  using namespace accelerate;
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 2 && words[0] == "write") {
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
      const auto state = test::random_state(seed);
      safetensors::save_file(state.tensors, fs::path(words[1]) / std::to_string(seed),
                             state.metadata);
    }
    return 0;
  }
  if (words.size() == 3 && words[0] == "copy") {
    for (const auto& entry : fs::directory_iterator(words[1])) {
      const auto file = safetensors::File::open(entry.path());
      safetensors::save_file(file.get_tensors(), words[2] / entry.path().filename(),
                             file.metadata());
    }
    return 0;
  }
  std::cerr << "usage: interop_safetensors write FOLDER | copy FROM TO\n";
  return 2;
}
