#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <unordered_map>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/safetensors.h"
#include "checkpoint/device_reader.h"
#include "checkpoint/parallel_chunks.h"
#include "checkpoint/safetensors_dtypes.h"
#include "checkpoint/slice_reader.h"
#include "core/byte_bar.h"
#include "core/huge_pages.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/mapped_file.h"
#include "formats/safetensors_header.h"
#include "modeling/lazy_key.h"

namespace accelerate::safetensors {

using detail::python_repr;
using detail::str;
using detail::checkpoint::FilePiece;
using detail::formats::TensorEntry;

struct File::Impl : std::enable_shared_from_this<Impl> {
  std::filesystem::path path;
  std::shared_ptr<const detail::formats::MappedFile> file;  // nullptr: `memory` is the file
  std::string memory;
  std::span<std::byte> bytes;
  detail::formats::SafetensorsHeader header;
  bool mapped = true;

  const TensorEntry& find(std::string_view name) const {
    if (const auto* entry = header.find(name)) return *entry;
    std::vector<std::string> names;
    for (const auto& tensor : header.tensors) names.push_back(tensor.name);
    throw ArgumentError(str("'", path.string(), "' does not contain tensor ", python_repr(name),
                            ".", detail::did_you_mean(name, names)));
  }

  std::int64_t offset_of(const TensorEntry& entry) const {
    return header.data_offset + entry.begin;
  }

  void read(std::int64_t offset, std::span<std::byte> out) const {
    if (file) return file->read(offset, out);
    std::memcpy(out.data(), bytes.data() + offset, out.size());
  }

  using Done = std::function<void(std::int64_t bytes)>;

  void read_pieces(std::span<const FilePiece> pieces, const Done& done = {}) const {
    detail::checkpoint::transfer_in_parallel(pieces, [&](const FilePiece& piece) {
      read(piece.offset, piece.memory);
      if (done) done(std::ssize(piece.memory));
    });
  }

  // The tensor whose memory is the file's, or nullopt where a tensor of its own is needed.
  std::optional<at::Tensor> view(const TensorEntry& entry,
                                 const detail::checkpoint::TorchForm& form) const {
    std::byte* data = bytes.data() + offset_of(entry);
    // Files of other writers may have a header whose length is no multiple of 8.
    const bool aligned = reinterpret_cast<std::uintptr_t>(data) % c10::elementSize(form.type) == 0;
    if (!mapped || !aligned || entry.bytes() == 0) return std::nullopt;
    auto* owner = new std::shared_ptr<const Impl>(shared_from_this());
    return at::for_blob(data, form.shape)
        .context(owner, [](void* p) { delete static_cast<std::shared_ptr<const Impl>*>(p); })
        .options(at::TensorOptions(form.type))
        .make_tensor();
  }

  // The tensors in this order, on the device. `progress` as for `ByteBar`.
  std::vector<at::Tensor> load(std::span<const TensorEntry* const> entries, c10::Device device,
                               std::optional<bool> progress) const {
    std::vector<at::Tensor> tensors;
    std::vector<FilePiece> pieces;
    std::vector<detail::checkpoint::DevicePiece> device_pieces;
    std::int64_t bytes = 0;
    if (mapped && file != nullptr) file->check_not_cut();
    for (const auto* entry : entries) {
      const auto form = detail::checkpoint::torch_form(*entry, path);
      if (auto mapped_tensor = device.is_cpu() ? view(*entry, form) : std::nullopt) {
        tensors.push_back(std::move(*mapped_tensor));
        continue;
      }
      auto& tensor =
          tensors.emplace_back(at::empty(form.shape, at::TensorOptions(form.type).device(device)));
      bytes += entry->bytes();
      if (device.is_cpu()) {
        detail::advise_huge_pages(tensor.mutable_data_ptr(), tensor.nbytes());
        pieces.push_back({offset_of(*entry), memory_of(tensor)});
      } else if (!device.is_meta()) {
        device_pieces.push_back({offset_of(*entry), tensor});
      }
    }
    detail::ByteBar bar("loading", device.is_meta() ? 0 : bytes, progress);
    const auto done = [&](std::int64_t read) { bar.add(read); };
    read_pieces(pieces, done);
    read_device_pieces(std::move(device_pieces), done);
    return tensors;
  }

  void read_device_pieces(std::vector<detail::checkpoint::DevicePiece> pieces,
                          const Done& done) const {
    detail::checkpoint::read_to_device(std::move(pieces),
                                       [&](std::int64_t offset, std::span<std::byte> out) {
                                         read(offset, out);
                                         if (done) done(std::ssize(out));
                                       });
  }

  static std::span<std::byte> memory_of(const at::Tensor& tensor) {
    return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
  }
};

File::File(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

File File::open(const std::filesystem::path& path, const OpenOptions& options) {
  auto impl = std::make_shared<Impl>();
  impl->path = path;
  impl->file = detail::formats::MappedFile::open(path);
  impl->bytes = impl->file->bytes();
  impl->header = detail::formats::read_safetensors_header(*impl->file);
  impl->mapped = options.mapped;
  return File(std::move(impl));
}

File File::from_bytes(std::string bytes, const std::string& name) {
  auto impl = std::make_shared<Impl>();
  impl->path = name;
  impl->memory = std::move(bytes);
  impl->bytes = std::as_writable_bytes(std::span(impl->memory));
  impl->header = detail::formats::read_safetensors_header(impl->memory, name);
  return File(std::move(impl));
}

std::vector<std::string> File::keys() const {
  std::vector<std::string> names;
  names.reserve(impl_->header.by_name.size());
  for (const auto i : impl_->header.by_name) names.push_back(impl_->header.tensors[i].name);
  return names;
}

std::vector<std::string> File::offset_keys() const {
  std::vector<std::string> names;
  names.reserve(impl_->header.tensors.size());
  for (const auto& tensor : impl_->header.tensors) names.push_back(tensor.name);
  return names;
}

bool File::contains(std::string_view name) const { return impl_->header.find(name) != nullptr; }
const Metadata& File::metadata() const noexcept { return impl_->header.metadata; }
const std::filesystem::path& File::path() const noexcept { return impl_->path; }

TensorInfo File::info(std::string_view name) const {
  const auto& entry = impl_->find(name);
  return {std::string(to_string(entry.dtype)), entry.shape, entry.bytes()};
}

at::Tensor File::get(std::string_view name, c10::Device device) const {
  const TensorEntry* entry = &impl_->find(name);
  return impl_->load({&entry, 1}, device, /*progress=*/false).front();
}

at::Tensor File::get_slice(std::string_view name, const std::vector<Range>& ranges,
                           c10::Device device) const {
  const auto& entry = impl_->find(name);
  const auto form = detail::checkpoint::torch_form(entry, impl_->path);
  if (ranges.size() > form.shape.size()) {
    throw ArgumentError(str("Tensor ", python_repr(name), " of '", impl_->path.string(), "' has ",
                            form.shape.size(), " dimensions, but ", ranges.size(),
                            " ranges were given."));
  }
  const detail::checkpoint::SlicePlan plan(form.shape, ranges,
                                           static_cast<std::int64_t>(c10::elementSize(form.type)));
  auto tensor = at::empty(plan.shape(), at::TensorOptions(form.type));
  const auto read = [&](std::int64_t offset, std::span<std::byte> out) {
    const FilePiece piece{impl_->offset_of(entry) + offset, out};
    impl_->read_pieces({&piece, 1});
  };
  plan.read(Impl::memory_of(tensor), read);
  return tensor.to(device);
}

void File::read_into(std::string_view name, const at::Tensor& destination) const {
  read_into({{std::string(name), destination}});
}

void File::read_into(const std::vector<std::pair<std::string, at::Tensor>>& destinations,
                     const std::function<void(std::int64_t bytes)>& done) const {
  const c10::NoGradGuard no_grad;
  std::vector<FilePiece> pieces;
  std::unordered_map<c10::Device, std::vector<detail::checkpoint::DevicePiece>> device_pieces;
  std::vector<std::pair<const TensorEntry*, at::Tensor>> conversions;
  for (const auto& [name, destination] : destinations) {
    const auto& entry = impl_->find(name);
    const auto form = detail::checkpoint::torch_form(entry, impl_->path);
    if (!destination.sizes().equals(form.shape)) {
      throw ArgumentError(str("Tensor ", python_repr(name), " of '", impl_->path.string(),
                              "' has shape [", detail::join(form.shape),
                              "] and cannot be read into one of shape [",
                              detail::join(destination.sizes()), "]."));
    }
    if (destination.scalar_type() != form.type || !destination.is_contiguous() ||
        detail::modeling::is_marked(destination)) {
      conversions.emplace_back(&entry, destination);
    } else if (destination.is_cpu()) {
      pieces.push_back({impl_->offset_of(entry), Impl::memory_of(destination)});
    } else {
      device_pieces[destination.device()].push_back({impl_->offset_of(entry), destination});
    }
  }
  impl_->read_pieces(pieces, done);
  for (auto& [device, on_device] : device_pieces) {
    impl_->read_device_pieces(std::move(on_device), done);
  }
  for (const auto& [entry, destination] : conversions) {
    const auto form = detail::checkpoint::torch_form(*entry, impl_->path);
    const auto tensor = at::empty(form.shape, at::TensorOptions(form.type));
    const FilePiece piece{impl_->offset_of(*entry), Impl::memory_of(tensor)};
    impl_->read_pieces({&piece, 1});
    destination.copy_(tensor);
    if (done) done(static_cast<std::int64_t>(destination.nbytes()));
  }
  for (const auto& [name, destination] : destinations) {
    destination.unsafeGetTensorImpl()->bump_version();
  }
}

StateDict File::get_tensors(c10::Device device) const {
  std::vector<const TensorEntry*> entries;
  for (const auto& entry : impl_->header.tensors) entries.push_back(&entry);
  auto tensors = impl_->load(entries, device, /*progress=*/std::nullopt);
  StateDict state;
  state.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    state.insert(entries[i]->name, std::move(tensors[i]));
  }
  return state;
}

StateDict load_file(const std::filesystem::path& path, c10::Device device) {
  return File::open(path).get_tensors(device);
}

}  // namespace accelerate::safetensors
