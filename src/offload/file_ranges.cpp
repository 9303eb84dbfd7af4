#include "offload/file_ranges.h"

#include <map>
#include <memory>

#include "accelerate/errors.h"
#include "checkpoint/safetensors_dtypes.h"
#include "core/text.h"
#include "formats/mapped_file.h"
#include "formats/safetensors_header.h"
#include "modeling/torch_dtype.h"

namespace accelerate::detail::offload {
namespace {

FileRange in_dat_file(const std::string& name, const OffloadedWeight& weight,
                      const std::filesystem::path& folder) {
  const auto path = folder / (name + ".dat");
  const auto dtype = modeling::dtype_of(weight.dtype);
  if (!dtype) {
    throw FormatError(str("The offload index says that '", name, "' is of the dtype '",
                          weight.dtype, "', which this LibTorch does not have."),
                      path);
  }
  auto bytes = static_cast<std::int64_t>(c10::elementSize(*dtype));
  for (const auto size : weight.shape) bytes *= size;
  return {path, 0, bytes, *dtype, /*is_whole_file=*/true, weight.shape};
}

FileRange in_safetensors(const std::string& name, const std::filesystem::path& path,
                         const formats::SafetensorsHeader& header) {
  const auto* entry = header.find(name);
  if (entry == nullptr) {
    throw CheckpointError(str("The offload index says that '", name, "' is in '", path.string(),
                              "', which has no tensor of that name."),
                          path);
  }
  const auto form = checkpoint::torch_form(*entry, path);
  return {path,
          header.data_offset + entry->begin,
          entry->bytes(),
          form.type,
          /*is_whole_file=*/false,
          form.shape};
}

}  // namespace

FileRanges file_ranges(const OffloadIndex& index, const std::filesystem::path& folder) {
  FileRanges ranges;
  std::map<std::filesystem::path, formats::SafetensorsHeader> headers;
  for (const auto& [name, weight] : index) {
    if (!weight.safetensors_file) {
      ranges[name] = in_dat_file(name, weight, folder);
      continue;
    }
    const auto& path = *weight.safetensors_file;
    auto known = headers.find(path);
    if (known == headers.end()) {
      const auto file = formats::MappedFile::open(path);
      known = headers.emplace(path, formats::read_safetensors_header(*file)).first;
    }
    ranges[name] = in_safetensors(weight.weight_name.value_or(name), path, known->second);
  }
  return ranges;
}

}  // namespace accelerate::detail::offload
