#include "checkpoint/stored_state.h"

#include <ATen/ATen.h>

#include "accelerate/errors.h"
#include "accelerate/safetensors.h"
#include "accelerate/torch_archive.h"
#include "core/text.h"
#include "formats/dcp.h"
#include "formats/zero_folder.h"
#include "modeling/torch_dtype.h"

namespace accelerate::detail::checkpoint {
namespace {

namespace fs = std::filesystem;

at::ScalarType known_dtype(const std::string& name, const formats::TorchDtype& dtype) {
  const auto known = modeling::dtype_of(dtype.name);
  if (known) return *known;
  throw UnsupportedError(
      str("'", name, "' is of dtype torch.", dtype.name, ", which this LibTorch does not have."));
}

Value open_dcp(const fs::path& folder) {
  const auto reader = std::make_shared<formats::DcpReader>(folder);
  return reader->nested([&](const formats::DcpEntry& entry) {
    if (entry.dtype == nullptr) return reader->read_value(entry);
    return Value(std::make_shared<StoredTensor>(
        entry.name, *entry.dtype, entry.sizes,
        [reader, &entry](formats::FlatRange range, std::span<char> out) {
          reader->read_range(entry, range, out);
        },
        [reader, &entry] { reader->check_places(entry); }));
  });
}

Value open_zero(const fs::path& folder) {
  const auto files = std::make_shared<formats::OpenFiles>();
  Value::Dict tensors;
  for (auto& tensor : formats::read_zero_folder(folder)) {
    const auto shared = std::make_shared<const formats::ZeroTensor>(std::move(tensor));
    const auto read = [files, shared](formats::FlatRange range, std::span<char> out) {
      formats::read_zero_range(*files, *shared, range, out);
    };
    tensors.set(shared->name, Value(std::make_shared<StoredTensor>(shared->name, *shared->dtype,
                                                                   shared->sizes, read)));
  }
  return Value(std::move(tensors));
}

Value open_safetensors(const fs::path& path) {
  const auto file = safetensors::File::open(path);
  Value::Dict tensors;
  for (const auto& name : file.offset_keys()) tensors.set(name, Value(file.get(name)));
  return Value(std::move(tensors));
}

}  // namespace

StoredTensor::StoredTensor(std::string name, const formats::TorchDtype& dtype,
                           std::vector<std::int64_t> sizes, Read read, Check check)
    : name_(std::move(name)),
      dtype_(known_dtype(name_, dtype)),
      sizes_(std::move(sizes)),
      read_(std::move(read)),
      check_(std::move(check)) {}

at::Tensor StoredTensor::range(formats::FlatRange range) const {
  check_();
  auto result = at::empty({range.count()}, at::TensorOptions(dtype_));
  read_(range, {static_cast<char*>(result.mutable_data_ptr()), result.nbytes()});
  return result;
}

std::string StoredTensor::repr() const {
  return str("<stored tensor '", name_, "' (", join(sizes_), ")>");
}

Value open_stored_state(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    const bool is_dcp = fs::exists(path / ".metadata", error);
    if (const auto zero = is_dcp ? std::nullopt : formats::find_zero_folder(path)) {
      return open_zero(*zero);
    }
    return open_dcp(path);
  }
  if (path.extension() == ".safetensors") return open_safetensors(path);
  return torch_load(path, {.mmap = true});
}

bool is_stored_tensor(const Value& leaf) {
  return leaf.is_tensor() || dynamic_cast<const StoredTensor*>(leaf.leaf()) != nullptr;
}

std::vector<std::int64_t> stored_sizes(const Value& leaf) {
  if (leaf.is_tensor()) return leaf.as_tensor().sizes().vec();
  return dynamic_cast<const StoredTensor&>(*leaf.leaf()).sizes();
}

at::Tensor stored_range(const Value& leaf, formats::FlatRange range) {
  if (leaf.is_tensor()) {
    return leaf.as_tensor().detach().reshape({-1}).slice(0, range.begin, range.end);
  }
  return dynamic_cast<const StoredTensor&>(*leaf.leaf()).range(range);
}

at::Tensor stored_whole(const Value& leaf) {
  const auto sizes = stored_sizes(leaf);
  return stored_range(leaf, {0, formats::element_count(sizes)}).view(sizes);
}

}  // namespace accelerate::detail::checkpoint
