#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/errors.h"
#include "accelerate/torch_archive.h"
#include "checkpoint/write_file.h"
#include "core/output_file.h"
#include "core/text.h"
#include "formats/archive.h"
#include "formats/pickle.h"
#include "formats/torch_dtypes.h"
#include "modeling/torch_dtype.h"

namespace accelerate {
namespace detail::checkpoint {
namespace {

using formats::PickleCall;
using formats::PickleStorage;
using formats::PickleTensor;

/// True if a leaf that `torch_load` keeps as it is has a tensor or storage of the file it was in.
bool refers_to_a_file(const Value& value);

bool refers_to_a_file(const PickleCall::Entries& entries) {
  return std::ranges::any_of(entries, [](const auto& entry) {
    return refers_to_a_file(entry.first) || refers_to_a_file(entry.second);
  });
}

bool refers_to_a_file(const Value& value) {
  if (value.is_list() || value.is_tuple()) {
    return std::ranges::any_of(value.items(),
                               [](const Value& item) { return refers_to_a_file(item); });
  }
  if (value.is_dict()) {
    return std::ranges::any_of(value.as_dict().begin(), value.as_dict().end(),
                               [](const auto& entry) { return refers_to_a_file(entry.value()); });
  }
  if (const auto* dict = formats::leaf_as<formats::PickleDict>(value)) {
    return refers_to_a_file(dict->entries);
  }
  if (const auto* call = formats::leaf_as<PickleCall>(value)) {
    return refers_to_a_file(Value(call->args)) || refers_to_a_file(call->kwargs) ||
           refers_to_a_file(call->state) || refers_to_a_file(Value(call->items)) ||
           refers_to_a_file(call->entries);
  }
  return formats::leaf_as<PickleTensor>(value) != nullptr ||
         formats::leaf_as<PickleStorage>(value) != nullptr;
}

/// Turns values with tensors into values with descriptions of them, and collects the storages.
class TensorSaver {
 public:
  Value describe(const Value& value) {
    switch (value.kind()) {
      case Value::Kind::kList:
        return Value(items(value));
      case Value::Kind::kTuple:
        return Value::tuple(items(value));
      case Value::Kind::kDict: {
        Value::Dict dict;
        for (const auto& [key, item] : value.as_dict()) dict.set(key, describe(item));
        return Value(std::move(dict));
      }
      case Value::Kind::kTensor:
        return describe(value.as_tensor());
      case Value::Kind::kObject:
        if (refers_to_a_file(value)) {
          throw ArgumentError(str("A value to be saved is a ", value.kind_name(),
                                  " with tensors of the file it was loaded from: ",
                                  value.repr().substr(0, 200), ". Leave it out."));
        }
        return value;
      default:
        return value;
    }
  }

  Value describe(const at::Tensor& tensor) {
    if (!tensor.defined()) return {};
    const auto [found, is_new] = tensors_.try_emplace(tensor.unsafeGetTensorImpl());
    if (is_new) {
      kept_.push_back(tensor);  // so that no other tensor gets its address
      found->second = described(tensor);
    }
    return found->second;
  }

  /// The bytes of all storages, in the order of their keys.
  [[nodiscard]] const std::vector<at::Tensor>& storages() const { return bytes_; }

 private:
  struct Stored {
    std::string key;
    std::string_view dtype;  // of the tensor that came first; empty if it is untyped
  };

  Value::List items(const Value& value) {
    Value::List result;
    result.reserve(value.items().size());
    for (const auto& item : value.items()) result.push_back(describe(item));
    return result;
  }

  Value described(const at::Tensor& tensor) {
    if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested() ||
        !tensor.has_storage() || tensor.is_meta()) {
      throw ArgumentError(
          detail::str("A tensor to be saved has layout ", tensor.layout(),
                      tensor.is_quantized() ? " and is quantized" : "",
                      tensor.is_meta() ? " and no data (meta device)" : "",
                      ". Only dense tensors with data can be saved; convert it first."));
    }
    // A conjugated view is a flag of the tensor, which its storage does not have.
    const auto plain = tensor.detach().resolve_conj().resolve_neg();
    const auto dtype = modeling::name_of(plain.scalar_type());
    const auto* known = formats::find_torch_dtype(dtype);
    if (known == nullptr) {
      throw ArgumentError(str("A tensor to be saved is of dtype torch.", dtype,
                              ", which archives cannot have. Convert it first."));
    }
    auto described = std::make_shared<PickleTensor>();
    described->storage = storage_of(plain, *known);
    described->dtype = dtype;
    described->offset = plain.storage_offset();
    described->sizes = plain.sizes().vec();
    described->strides = plain.strides().vec();
    described->requires_grad = tensor.requires_grad();
    return Value(Value::Leaf(std::move(described)));
  }

  std::shared_ptr<const PickleStorage> storage_of(const at::Tensor& tensor,
                                                  const formats::TorchDtype& dtype) {
    const auto& storage = tensor.storage();
    const auto size = static_cast<std::int64_t>(storage.nbytes());
    // Python reads the number of elements; bytes that are no whole element have no typed storage.
    const bool typed = size % dtype.bytes == 0 && !dtype.storage.empty();
    const auto [found, is_new] = stored_.try_emplace(
        storage.unsafeGetStorageImpl(),
        Stored{.key = std::to_string(stored_.size()), .dtype = typed ? dtype.name : ""});
    if (is_new) {
      bytes_.push_back(
          at::empty({0}, tensor.options().dtype(at::kByte)).set_(storage, 0, {size}, {1}));
    }
    auto described = std::make_shared<PickleStorage>();
    described->key = found->second.key;
    // Loaders keep a storage as they met it first: tensors of another dtype bring their own.
    described->dtype = dtype.name == found->second.dtype ? dtype.name : "";
    described->location = "cpu";  // Python moves them; a device may be missing where it is read
    described->bytes = storage.nbytes();
    return described;
  }

  std::unordered_map<const at::TensorImpl*, Value> tensors_;
  std::unordered_map<const at::StorageImpl*, Stored> stored_;
  std::vector<at::Tensor> kept_;
  std::vector<at::Tensor> bytes_;
};

void write_archive(const Value& described, const std::vector<at::Tensor>& storages,
                   OutputFile& file, ByteBar& bar) {
  formats::ArchiveWriter archive([&](std::string_view bytes) { file.write(bytes); },
                                 formats::archive_name(file.path()),
                                 formats::pickle_dumps(described));
  for (std::size_t i = 0; i < storages.size(); ++i) {
    const auto copy = storages[i].cpu();
    std::string_view bytes(static_cast<const char*>(copy.const_data_ptr()), copy.nbytes());
    archive.begin_storage(std::to_string(i), bytes.size());
    while (!bytes.empty()) {  // in parts, so that the bar moves
      constexpr std::size_t kPart = std::size_t{64} << 20;
      const auto part = bytes.substr(0, kPart);
      archive.append(part);
      bar.add(std::ssize(part));
      bytes.remove_prefix(part.size());
    }
    archive.end_storage();
  }
  archive.finish();
}

/// The storages of tensors, each of them counted once.
class StorageBytes {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    if (!seen_.insert(tensor.storage().unsafeGetStorageImpl()).second) return;
    bytes_ += static_cast<std::int64_t>(tensor.storage().nbytes());
  }
  void add(const Value& value) {
    if (value.is_tensor()) return add(value.as_tensor());
    if (value.is_dict()) {
      for (const auto& [key, item] : value.as_dict()) add(item);
    } else if (value.is_list() || value.is_tuple()) {
      for (const auto& item : value.items()) add(item);
    }
  }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  std::unordered_set<const at::StorageImpl*> seen_;
  std::int64_t bytes_ = 0;
};

}  // namespace

std::int64_t bytes_in_torch_archive(const StateDict& state) {
  StorageBytes storages;
  for (const auto& entry : state) storages.add(entry.value());
  return storages.bytes();
}

std::int64_t bytes_in_torch_archive(const Value& value) {
  StorageBytes storages;
  storages.add(value);
  return storages.bytes();
}

void write_torch_archive(const StateDict& state, OutputFile& file, ByteBar& bar) {
  TensorSaver saver;
  auto ordered = std::make_shared<PickleCall>();
  ordered->module = "collections";
  ordered->name = "OrderedDict";
  for (const auto& entry : state) {
    ordered->entries.emplace_back(entry.key(), saver.describe(entry.value().detach()));
  }
  write_archive(Value(Value::Leaf(std::move(ordered))), saver.storages(), file, bar);
}

void write_torch_archive(const Value& value, OutputFile& file, ByteBar& bar) {
  TensorSaver saver;
  const Value described = saver.describe(value);
  write_archive(described, saver.storages(), file, bar);
}

}  // namespace detail::checkpoint

void torch_save(const Value& value, const std::filesystem::path& path) {
  detail::OutputFile file(path);
  detail::ByteBar bar("saving", detail::checkpoint::bytes_in_torch_archive(value));
  detail::checkpoint::write_torch_archive(value, file, bar);
  file.publish();
}

void torch_save(const StateDict& state, const std::filesystem::path& path) {
  detail::OutputFile file(path);
  detail::ByteBar bar("saving", detail::checkpoint::bytes_in_torch_archive(state));
  detail::checkpoint::write_torch_archive(state, file, bar);
  file.publish();
}

}  // namespace accelerate
