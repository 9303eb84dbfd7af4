// Any file is either shown by `accelerate checkpoint show` or refused with a FormatError; what is
// shown lies inside the file.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "accelerate/errors.h"
#include "commands/checkpoint_content.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  using namespace accelerate::detail;
  const std::filesystem::path path =
      "/dev/shm/accelerate_content_fuzz_" + std::to_string(::getpid());
  std::ofstream(path, std::ios::binary) << fuzz::text(data, size);
  try {
    const auto file = formats::MappedFile::open(path);
    (void)commands::has_tensors(*file);
    const auto content = commands::read_content(*file);
    (void)content.summary();
    for (const auto& tensor : content.tensors) {
      fuzz::check(tensor.offset >= 0 && tensor.bytes >= 0 && tensor.offset <= file->size() &&
                      tensor.bytes <= file->size() - tensor.offset,
                  "a tensor is in the file");
    }
  } catch (const FormatError&) {
  }
  std::filesystem::remove(path);
  return 0;
}
