// Any files are either a checkpoint of DeepSpeed or refused by name; its tensors are whole, and
// their parts lie inside the files.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "accelerate/errors.h"
#include "formats/zero_folder.h"
#include "fuzz.h"

namespace {

using namespace accelerate;
using namespace accelerate::detail::formats;
namespace fs = std::filesystem;

constexpr std::size_t kProcesses = 4;

/// The next file of the input, which has its length in front.
std::string_view next_file(std::string_view& input) {
  if (input.size() < 4) return {};
  std::size_t length = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    length |= static_cast<std::size_t>(static_cast<unsigned char>(input[i])) << (8 * i);
  }
  input.remove_prefix(4);
  const auto file = input.substr(0, length);
  input.remove_prefix(file.size());
  return file;
}

/// Those of the model first, then a file of each process.
void write_folder(const fs::path& folder, std::string_view input) {
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::ofstream(folder / "mp_rank_00_model_states.pt", std::ios::binary) << next_file(input);
  for (std::size_t rank = 0; rank < kProcesses && !input.empty(); ++rank) {
    std::ofstream(folder / ("zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt"),
                  std::ios::binary)
        << next_file(input);
  }
}

void check_tensor(OpenFiles& files, const ZeroTensor& tensor) {
  fuzz::check(tensor.dtype != nullptr, "a tensor has a dtype");
  std::int64_t count = 0;
  std::uint64_t stored = 0;
  for (const auto& piece : tensor.pieces) {
    const auto bytes = static_cast<std::uint64_t>(piece.count * tensor.dtype->bytes);
    const auto size = fs::file_size(piece.file);
    fuzz::check(piece.offset <= size && bytes <= size - piece.offset, "parts are in their file");
    count += piece.count;
    stored += bytes;
  }
  fuzz::check(count == element_count(tensor.sizes), "parts are the whole tensor");
  std::string out(stored, '\0');
  read_zero_range(files, tensor, {.begin = 0, .end = count}, out);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fs::path folder = "/dev/shm/accelerate_zero_fuzz_" + std::to_string(::getpid());
  write_folder(folder, fuzz::text(data, size));
  try {
    OpenFiles files;
    for (const auto& tensor : read_zero_folder(folder)) check_tensor(files, tensor);
  } catch (const CheckpointError&) {  // FormatError is one
  } catch (const UnsupportedError&) {
  }
  fs::remove_all(folder);
  return 0;
}
