#include <ATen/ATen.h>

#include <cstring>
#include <functional>
#include <unordered_map>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/torch_archive.h"
#include "checkpoint/device_reader.h"
#include "checkpoint/parallel_chunks.h"
#include "core/byte_bar.h"
#include "core/huge_pages.h"
#include "core/text.h"
#include "formats/archive.h"
#include "formats/format_error.h"
#include "formats/legacy_archive.h"
#include "modeling/torch_dtype.h"
#include "state/tensor_device.h"

namespace accelerate {
namespace detail::checkpoint {
namespace {

using formats::PickleArray;
using formats::PickleTensor;

/// The largest element's.
constexpr std::int64_t kAlignment = 16;

void for_each_leaf(Value& value, const std::function<void(Value&)>& visit) {
  if (value.is_list()) {
    for (auto& item : value.as_list()) for_each_leaf(item, visit);
  } else if (value.is_tuple()) {
    for (auto& item : value.as_tuple()) for_each_leaf(item, visit);
  } else if (value.is_dict()) {
    for (auto& entry : value.as_dict()) for_each_leaf(entry.value(), visit);
  } else if (value.leaf() != nullptr) {
    visit(value);
  }
}

/// Makes tensors of an archive's descriptions.
class TensorLoader {
 public:
  TensorLoader(const formats::FileBytes& file, const formats::ArchiveReader& archive,
               const TorchLoadOptions& options)
      : file_(file), archive_(archive), options_(options) {}

  /// Replaces the stored tensors and arrays in `value`.
  void load(Value& value) {
    for_each_leaf(value, [&](Value& leaf) {
      if (const auto* tensor = formats::leaf_as<PickleTensor>(leaf)) open_storage(*tensor->storage);
    });
    ByteBar bar("loading", bytes_, options_.progress);
    const auto read = [&](std::int64_t offset, std::span<std::byte> out) {
      file_.file()->read(offset, out);
      bar.add(std::ssize(out));
    };
    transfer_in_parallel(pieces_,
                         [&](const FilePiece& piece) { read(piece.offset, piece.memory); });
    if (!on_device_.empty()) read_to_device(on_device_, read);
    for_each_leaf(value, [&](Value& leaf) {
      if (const auto* tensor = formats::leaf_as<PickleTensor>(leaf)) {
        leaf = Value(shared(*tensor));
      } else if (const auto* array = formats::leaf_as<PickleArray>(leaf)) {
        leaf = Value(tensor_of(*array));
      }
    });
  }

 private:
  /// One tensor for one object of the file.
  const at::Tensor& shared(const PickleTensor& stored) {
    auto& tensor = tensors_[&stored];
    if (!tensor.defined()) tensor = tensor_of(stored);
    return tensor;
  }

  [[nodiscard]] at::ScalarType dtype(std::string_view name) const {
    if (const auto known = modeling::dtype_of(name)) return *known;
    throw formats::format_error(
        file_.name(), 0,
        str("a tensor is of dtype torch.", name, ", which this version of LibTorch does not have"));
  }

  at::Tensor tensor_of(const PickleTensor& stored) {
    auto tensor = at::empty({0}, at::TensorOptions(dtype(stored.dtype)).device(device()));
    tensor.set_(storage(*stored.storage), stored.offset, stored.sizes, stored.strides);
    if (stored.is_conjugated) tensor._set_conj(true);
    if (stored.is_negated) tensor._set_neg(true);
    // The flag of an integer tensor, which Python never sets, would be an error of LibTorch.
    if (stored.requires_grad && (tensor.is_floating_point() || tensor.is_complex()))
      tensor.requires_grad_();
    return tensor;
  }

  at::Tensor tensor_of(const PickleArray& array) {
    auto tensor = at::empty(array.sizes, at::TensorOptions(dtype(array.dtype)));
    if (!array.bytes.empty()) {
      std::memcpy(tensor.mutable_data_ptr(), array.bytes.data(), array.bytes.size());
    }
    return tensor.to(device());
  }

  /// Allocates or maps the bytes of a storage.
  void open_storage(const formats::PickleStorage& stored) {
    const auto& entry = archive_.entry(stored);
    const auto [found, is_new] = storages_.try_emplace(stored.key);
    if (!is_new) return;
    const auto offset = static_cast<std::int64_t>(entry.offset);
    const auto size = static_cast<std::int64_t>(entry.size);
    if (device().is_cuda()) {
      bytes_ += size;
      found->second = at::empty({size}, at::TensorOptions(at::kByte).device(device()));
      on_device_.push_back({.offset = offset, .tensor = found->second});
      return;
    }
    // Foreign writers may not align what they write.
    if (options_.mmap && offset % kAlignment == 0) {
      found->second = at::from_blob(
          file_.file()->bytes().data() + offset, {size}, [file = file_.file()](void*) {},
          at::kByte);
      return;
    }
    bytes_ += size;
    found->second = at::empty({size}, at::kByte);
    advise_huge_pages(found->second.mutable_data_ptr(), entry.size);
    pieces_.push_back({.offset = offset,
                       .memory = {static_cast<std::byte*>(found->second.mutable_data_ptr()),
                                  static_cast<std::size_t>(size)}});
  }

  at::Storage storage(const formats::PickleStorage& stored) {
    auto& bytes = storages_.at(stored.key);
    if (bytes.device() != device()) bytes = bytes.to(device());
    return bytes.storage();
  }

  [[nodiscard]] c10::Device device() const {
    return state::tensor_device(options_.map_location.value_or(c10::Device(c10::kCPU)));
  }

  const formats::FileBytes& file_;
  const formats::ArchiveReader& archive_;
  const TorchLoadOptions& options_;
  std::unordered_map<const PickleTensor*, at::Tensor> tensors_;
  std::unordered_map<std::string, at::Tensor> storages_;  // their bytes, by key
  std::vector<FilePiece> pieces_;                         // to be read
  std::vector<DevicePiece> on_device_;                    // the same, onto the device
  std::int64_t bytes_ = 0;                                // of both
};

}  // namespace
}  // namespace detail::checkpoint

Value torch_load(const std::filesystem::path& path, const TorchLoadOptions& options) {
  using namespace detail;
  const formats::FileBytes file(path);
  const formats::ArchiveReader archive(file);
  if (options.verify_checksums) {
    if (formats::is_legacy_archive(file)) {
      throw ArgumentError(str("'", path.string(),
                              "' is a file from before Torch 1.6, which has no checksums. Load it "
                              "without verify_checksums."));
    }
    for (const auto& entry : archive.directory().entries()) formats::check_crc(file, entry);
  }
  Value value = archive.value();
  checkpoint::TensorLoader(file, archive, options).load(value);
  return value;
}

}  // namespace accelerate
