// Any file is either read or refused with a FormatError; the tensors of one that was read lie side
// by side in it, and survive writing and reading.
#include <string>

#include "accelerate/errors.h"
#include "formats/safetensors_header.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  using namespace accelerate::detail::formats;
  const auto file = fuzz::text(data, size);
  SafetensorsHeader header;
  try {
    header = read_safetensors_header(file, "file");
  } catch (const FormatError&) {
    return 0;
  }
  std::int64_t end = 0;
  for (const auto& tensor : header.tensors) {
    fuzz::check(tensor.begin == end, "tensors follow each other");
    fuzz::check(header.find(tensor.name) == &tensor, "each is found by its name");
    fuzz::check(bit_size(tensor.dtype, tensor.shape) == 8 * tensor.bytes(), "sizes fit shapes");
    end = tensor.end;
  }
  fuzz::check(header.data_offset + end == static_cast<std::int64_t>(size), "the file ends there");

  const auto written = plan_safetensors(header.tensors, header.metadata);
  auto bytes = safetensors_header_bytes(written);
  const auto header_size = static_cast<std::int64_t>(bytes.size());
  bytes.resize(bytes.size() + static_cast<std::size_t>(end));
  const auto again = read_safetensors_header(bytes, "file");
  fuzz::check(again.data_offset == header_size, "the header has the length that it tells");
  fuzz::check(again.metadata == header.metadata, "metadata survive");
  for (const auto& tensor : header.tensors) {
    const auto* copy = again.find(tensor.name);
    fuzz::check(copy != nullptr && copy->dtype == tensor.dtype && copy->shape == tensor.shape,
                "tensors survive");
  }
  return 0;
}
