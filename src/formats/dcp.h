// src/formats/dcp.h - folders of torch.distributed.checkpoint, as FSDP saves sharded state dicts.
//
// `.metadata` is a pickle that says which chunks a tensor has and where they lie; each chunk is a
// torch archive of its own somewhere in a `.distcp` file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/value.h"
#include "formats/boxes.h"
#include "formats/byte_source.h"
#include "formats/torch_dtypes.h"

namespace accelerate::detail::formats {

/// A range of one of the `.distcp` files.
struct DcpPlace {
  std::string file;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

/// A box of a tensor, in an archive of its own.
struct DcpChunk : Box {
  DcpPlace place = {};
};

/// One tensor, or one value of another kind.
struct DcpEntry {
  /// "model.layer.weight".
  std::string name = {};
  /// Where it was in the nested state dict: texts, and numbers for positions in lists.
  Value::List path = {};
  /// Null for other values.
  const TorchDtype* dtype = nullptr;
  std::vector<std::int64_t> sizes = {};
  /// Of a tensor; they cover it without overlaps.
  std::vector<DcpChunk> chunks = {};
  /// Of another value.
  DcpPlace place = {};

  /// Of a tensor.
  [[nodiscard]] std::uint64_t bytes() const;
};

/// Reads the bytes of a `.metadata` file called `name`. Throws `FormatError` for what is no such
/// pickle, for tensors that their chunks do not cover exactly, and for places that overlap or are
/// in other folders.
[[nodiscard]] std::vector<DcpEntry> read_dcp_metadata(std::string_view bytes,
                                                      const std::string& name);

/// A folder that was opened for reading.
class DcpReader {
 public:
  /// Throws `CheckpointError` if there is no `.metadata` in the folder, `FormatError` as above.
  explicit DcpReader(std::filesystem::path folder);

  /// In the order of the metadata.
  [[nodiscard]] const std::vector<DcpEntry>& entries() const { return entries_; }
  /// The path of an entry. If all entries are below one key of the state dict, as FSDP saves
  /// {"model": ...}, that key is left out.
  [[nodiscard]] std::span<const Value> path_of(const DcpEntry& entry) const;
  /// The bytes of a tensor, row by row. Throws `FormatError` that names the tensor if a chunk is
  /// not what the metadata says.
  [[nodiscard]] std::string read_tensor(const DcpEntry& entry);
  /// Throws `FormatError` if a chunk of a tensor is not inside its file. Otherwise the tensor is no
  /// larger than the files, so that memory for it may be allocated.
  void check_places(const DcpEntry& entry);
  /// Some elements of a tensor into `out`, which has their size. Reads one chunk after the other,
  /// of those that have such elements, and no more than from the first to the last of them.
  void read_range(const DcpEntry& entry, FlatRange range, std::span<char> out);
  /// A value that is no tensor.
  [[nodiscard]] Value read_value(const DcpEntry& entry);

  /// The nested state dict, with what `leaf` makes of each entry. Throws `CheckpointError` if the
  /// paths of two entries contradict each other.
  [[nodiscard]] Value nested(const std::function<Value(const DcpEntry& entry)>& leaf) const;

 private:
  void read_chunk(const DcpEntry& entry, const DcpChunk& chunk, FlatRange range,
                  std::span<char> out);
  /// Throws `FormatError` if the place is not inside its file.
  [[nodiscard]] PartBytes part(const DcpEntry& entry, const DcpPlace& place);

  std::filesystem::path folder_;
  std::vector<DcpEntry> entries_;
  bool one_root_ = false;
  OpenFiles files_;
};

}  // namespace accelerate::detail::formats
