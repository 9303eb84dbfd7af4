#include <ATen/ATen.h>

#include <unordered_map>

#include "accelerate/torch_archive.h"
#include "checkpoint/torch_dtype.h"
#include "core/text.h"
#include "formats/archive.h"
#include "formats/format_error.h"

namespace accelerate {
namespace detail::checkpoint {
namespace {

using formats::PickleArray;
using formats::PickleTensor;

/// Makes tensors of an archive's descriptions.
class TensorLoader {
 public:
  TensorLoader(const formats::FileBytes& file, const formats::ArchiveReader& archive,
               const TorchLoadOptions& options)
      : file_(file), archive_(archive), options_(options) {}

  /// Replaces the stored tensors and arrays in `value`.
  void load(Value& value) {
    if (value.is_list()) {
      for (auto& item : value.as_list()) load(item);
    } else if (value.is_tuple()) {
      for (auto& item : value.as_tuple()) load(item);
    } else if (value.is_dict()) {
      for (auto& entry : value.as_dict()) load(entry.value());
    } else if (const auto* tensor = formats::leaf_as<PickleTensor>(value)) {
      value = shared(*tensor);
    } else if (const auto* array = formats::leaf_as<PickleArray>(value)) {
      value = Value(tensor_of(*array));
    }
  }

 private:
  /// One tensor for one object of the file.
  const Value& shared(const PickleTensor& stored) {
    const auto [found, is_new] = tensors_.try_emplace(&stored);
    if (is_new) found->second = Value(tensor_of(stored));
    return found->second;
  }

  [[nodiscard]] at::ScalarType dtype(std::string_view name) const {
    if (const auto known = dtype_of(name)) return *known;
    throw formats::format_error(file_.name(), 0,
                                str("a tensor is of dtype torch.", name,
                                    ", which this version of LibTorch does not have"));
  }

  at::Tensor tensor_of(const PickleTensor& stored) {
    auto tensor = at::empty({0}, at::TensorOptions(dtype(stored.dtype)).device(device()));
    tensor.set_(storage(*stored.storage), stored.offset, stored.sizes, stored.strides);
    if (stored.requires_grad) tensor.requires_grad_();
    return tensor;
  }

  at::Tensor tensor_of(const PickleArray& array) {
    auto tensor = at::empty(array.sizes, at::TensorOptions(dtype(array.dtype)));
    if (!array.bytes.empty()) {
      std::memcpy(tensor.mutable_data_ptr(), array.bytes.data(), array.bytes.size());
    }
    return tensor.to(device());
  }

  const at::Storage& storage(const formats::PickleStorage& stored) {
    const auto& entry = archive_.entry(stored);
    const auto [found, is_new] = storages_.try_emplace(stored.key);
    if (is_new) {
      auto bytes = at::empty({static_cast<std::int64_t>(entry.size)}, at::kByte);
      file_.read(entry.offset, {static_cast<char*>(bytes.mutable_data_ptr()), entry.size});
      found->second = bytes.to(device()).storage();
    }
    return found->second;
  }

  [[nodiscard]] c10::Device device() const {
    return options_.map_location.value_or(c10::Device(c10::kCPU));
  }

  const formats::FileBytes& file_;
  const formats::ArchiveReader& archive_;
  const TorchLoadOptions& options_;
  std::unordered_map<const PickleTensor*, Value> tensors_;
  std::unordered_map<std::string, at::Storage> storages_;
};

}  // namespace
}  // namespace detail::checkpoint

Value torch_load(const std::filesystem::path& path, const TorchLoadOptions& options) {
  using namespace detail;
  const formats::FileBytes file(path);
  const formats::ArchiveReader archive(file);
  if (options.verify_checksums) {
    for (const auto& entry : archive.directory().entries()) formats::check_crc(file, entry);
  }
  Value value = archive.value();
  checkpoint::TensorLoader(file, archive, options).load(value);
  return value;
}

}  // namespace accelerate
