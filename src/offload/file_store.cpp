// Parameters in files: mapped where they are used on the CPU, read through pinned memory elsewhere.
#include <ATen/Functions.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <system_error>
#include <utility>

#include "accelerate/errors.h"
#include "checkpoint/device_reader.h"
#include "core/descriptor.h"
#include "core/text.h"
#include "core/uninterrupted.h"
#include "formats/mapped_file.h"
#include "modeling/torch_dtype.h"
#include "offload/store.h"

namespace accelerate::detail::offload {
namespace {

using formats::MappedFile;

/// A tensor of the group and where its bytes are.
struct Piece {
  std::size_t storage = 0;
  TensorPlan tensor;
  FileRange range;

  [[nodiscard]] bool is_converted() const { return range.dtype != tensor.dtype; }
};

[[noreturn]] void refuse(const Piece& piece, std::string_view cause) {
  throw CheckpointError(str("The parameter '", piece.tensor.name, "' cannot be used: its ",
                            piece.range.bytes, " bytes at offset ", piece.range.offset, " of '",
                            piece.range.path.string(), "' are not there. ", cause),
                        piece.range.path);
}

void check_shape(const Piece& piece) {
  const auto& [path, offset, bytes, dtype, is_whole_file, shape] = piece.range;
  if (!shape || *shape == piece.tensor.shape) return;
  throw CheckpointError(
      str("The parameter '", piece.tensor.name, "' has the shape [", join(piece.tensor.shape),
          "], and in '", path.string(), "' [", join(*shape),
          "]. The weights are of another model, or transposed: load them with a KeyMapping, and "
          "offload those."),
      path);
}

using OpenFile = std::shared_ptr<const MappedFile> (&)(const std::filesystem::path&);

std::shared_ptr<const MappedFile> open(const Piece& piece, OpenFile open_file = MappedFile::open) {
  std::shared_ptr<const MappedFile> file;
  try {
    file = open_file(piece.range.path);
  } catch (const CheckpointError& error) {
    refuse(piece, error.what());
  }
  const auto end = piece.range.offset + piece.range.bytes;
  if (file->size() < end || (piece.range.is_whole_file && file->size() != end)) {
    refuse(piece, str("The file has ", file->size(), " bytes; ", end,
                      " are expected. It was cut, or is of another model."));
  }
  return file;
}

void read(const Piece& piece, const MappedFile& file, std::int64_t offset,
          std::span<std::byte> out) {
  try {
    file.read(piece.range.offset + offset, out);
  } catch (const CheckpointError& error) {
    refuse(piece, error.what());
  }
}

void write(const Piece& piece, std::span<const std::byte> bytes) {
  const Descriptor file(
      uninterrupted([&] { return ::open(piece.range.path.c_str(), O_WRONLY | O_CLOEXEC); }));
  auto offset = piece.range.offset;
  while (file && !bytes.empty()) {
    const auto count =
        uninterrupted([&] { return ::pwrite(file.get(), bytes.data(), bytes.size(), offset); });
    if (count < 0) break;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += count;
  }
  if (!bytes.empty()) {
    throw CheckpointError(
        str("The changed parameter '", piece.tensor.name, "' cannot be written at offset ", offset,
            " of '", piece.range.path.string(), "': ", std::generic_category().message(errno), "."),
        piece.range.path);
  }
}

std::span<std::byte> host_bytes(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

class FileStore final : public Store {
 public:
  FileStore(GroupPlan plan, std::vector<Piece> pieces, const FileStoreOptions& options)
      : plan_(std::move(plan)), pieces_(std::move(pieces)), options_(options) {
    // A storage of several tensors, or of another dtype, is put together in memory.
    mapped_ = options.device.is_cpu() && pieces_.size() == plan_.storages.size() &&
              std::ranges::all_of(pieces_, [&](const Piece& piece) {
                const auto size = static_cast<std::int64_t>(c10::elementSize(piece.tensor.dtype));
                return !piece.is_converted() && piece.range.offset % size == 0 &&
                       piece.tensor.bytes == plan_.storages[piece.storage].bytes;
              });
  }

  bool is_writable() const override { return options_.writable; }
  bool is_slow() const override { return true; }
  bool is_mapped() const override { return mapped_; }

  c10::DataPtr map(std::size_t storage) override {
    const auto& piece = *std::ranges::find(pieces_, storage, &Piece::storage);
    auto* file = new std::shared_ptr<const MappedFile>(open(piece, MappedFile::open_pages));
    return {(*file)->bytes().data() + piece.range.offset, file,
            [](void* held) { delete static_cast<std::shared_ptr<const MappedFile>*>(held); },
            c10::Device(c10::kCPU)};
  }

  void fill(const at::Tensor& memory) override {
    std::vector<checkpoint::DevicePiece> plain;
    std::vector<std::shared_ptr<const MappedFile>> files(pieces_.size());  // of plain ones
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const auto& piece = pieces_[i];
      const auto into = elements(memory, piece);
      if (piece.is_converted()) {
        into.copy_(converted(piece));
      } else if (memory.is_cpu()) {
        read(piece, *open(piece), 0, host_bytes(into));
      } else {
        files[i] = open(piece);
        // The reader counts in one file; here it counts in the memory of the group.
        plain.push_back({static_cast<std::int64_t>(offset_of(piece)), into});
      }
    }
    if (plain.empty()) return;
    checkpoint::read_to_device(std::move(plain), [&](auto offset, std::span<std::byte> out) {
      read_across(files, static_cast<std::size_t>(offset), out);
    });
  }

  void write_back(std::size_t storage, const at::Tensor& bytes) override {
    const auto here = bytes.cpu();
    for (const auto& piece : pieces_) {
      if (piece.storage != storage) continue;
      auto changed = here.narrow(0, static_cast<std::int64_t>(piece.tensor.offset),
                                 static_cast<std::int64_t>(piece.tensor.bytes));
      if (piece.is_converted()) changed = changed.view(piece.tensor.dtype).to(piece.range.dtype);
      write(piece, host_bytes(changed.contiguous()));
    }
  }

  at::Tensor bytes(std::size_t storage) const override {
    auto all = at::zeros({static_cast<std::int64_t>(plan_.storages[storage].bytes)}, at::kByte);
    for (const auto& piece : pieces_) {
      if (piece.storage != storage) continue;
      all.narrow(0, static_cast<std::int64_t>(piece.tensor.offset),
                 static_cast<std::int64_t>(piece.tensor.bytes))
          .view(piece.tensor.dtype)
          .copy_(converted(piece));
    }
    return all;
  }

 private:
  [[nodiscard]] std::size_t offset_of(const Piece& piece) const {
    return plan_.storages[piece.storage].offset + piece.tensor.offset;
  }
  [[nodiscard]] at::Tensor elements(const at::Tensor& memory, const Piece& piece) const {
    return memory
        .narrow(0, static_cast<std::int64_t>(offset_of(piece)),
                static_cast<std::int64_t>(piece.tensor.bytes))
        .view(piece.tensor.dtype);
  }
  static at::Tensor converted(const Piece& piece) {
    const auto size = static_cast<std::int64_t>(c10::elementSize(piece.range.dtype));
    const auto stored = at::empty({piece.range.bytes / size}, piece.range.dtype);
    read(piece, *open(piece), 0, host_bytes(stored));
    return stored.to(piece.tensor.dtype);
  }
  /// A range of the group's memory, which may touch several tensors.
  void read_across(const std::vector<std::shared_ptr<const MappedFile>>& files, std::size_t offset,
                   std::span<std::byte> out) const {
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const auto& piece = pieces_[i];
      const auto begin = std::max(offset, offset_of(piece));
      const auto end = std::min(offset + out.size(), offset_of(piece) + piece.tensor.bytes);
      if (piece.is_converted() || begin >= end) continue;
      read(piece, *files[i], static_cast<std::int64_t>(begin - offset_of(piece)),
           out.subspan(begin - offset, end - begin));
    }
  }

  GroupPlan plan_;
  std::vector<Piece> pieces_;
  FileStoreOptions options_;
  bool mapped_ = false;
};

}  // namespace

std::unique_ptr<Store> make_file_store(const GroupPlan& plan, const FileRanges& ranges,
                                       const FileStoreOptions& options) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < plan.storages.size(); ++i) {
    // Tied tensors are the same bytes under several names: one of the longest is enough.
    std::map<std::size_t, const TensorPlan*> wanted;
    std::map<std::size_t, Piece> found;
    for (const auto& tensor : plan.storages[i].tensors) {
      auto& longest = wanted.try_emplace(tensor.offset, &tensor).first->second;
      if (tensor.bytes > longest->bytes) longest = &tensor;
      const auto range = ranges.find(tensor.name);
      if (range == ranges.end()) continue;
      const Piece piece{i, tensor, range->second};
      auto& known = found.try_emplace(tensor.offset, piece).first->second;
      if (tensor.bytes > known.tensor.bytes) known = piece;
    }
    for (const auto& [offset, tensor] : wanted) {
      const auto piece = found.find(offset);
      if (piece == found.end()) {
        throw CheckpointError(str("The parameter '", tensor->name,
                                  "' is not in the index of the offload folder. The folder is of "
                                  "another model: give an empty one."));
      }
      const auto& range = piece->second.range;
      const auto elements = tensor->bytes / c10::elementSize(tensor->dtype);
      if (static_cast<std::size_t>(range.bytes) != elements * c10::elementSize(range.dtype)) {
        refuse(piece->second, str("The model expects ", elements, " elements of ",
                                  modeling::name_of(tensor->dtype),
                                  ": the folder is of another model. Give an empty one."));
      }
      check_shape(piece->second);
      open(piece->second);  // a missing or cut file is reported now
      pieces.push_back(std::move(piece->second));
    }
  }
  return std::make_unique<FileStore>(plan, std::move(pieces), options);
}

}  // namespace accelerate::detail::offload
