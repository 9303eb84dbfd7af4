// src/formats/dcp_writer.h - folders that torch.distributed.checkpoint loads.
//
// Each process writes one `.distcp` file: archive after archive, each with one chunk of a tensor or
// one value. One process gets from all of them what they have written, and makes `.metadata` of it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/value.h"
#include "formats/dcp.h"
#include "formats/zip.h"

namespace accelerate::detail::formats {

/// ".metadata", the file that makes a folder a checkpoint.
inline constexpr std::string_view kDcpMetadataName = ".metadata";

/// "__3_0.distcp": the first file of a process.
[[nodiscard]] std::string dcp_file_name(int process_index, int number = 0);

/// What of a nested state dict is an entry of its own, by Python's rules: dicts are descended, and
/// lists that have tensors, dicts or such lists. Calls `visit` with the path of each entry.
void for_each_dcp_leaf(
    const Value& state, Value::List path,
    const std::function<void(const Value::List& path, const Value& leaf)>& visit);

/// Writes a `.distcp` file, item by item. Memory holds none of them.
class DcpFileWriter {
 public:
  /// `write` appends to the file of that name.
  DcpFileWriter(std::string file, ZipWriter::Write write);

  /// The chunks of the tensor follow, or none.
  void begin_tensor(const Value::List& path, const TorchDtype& dtype,
                    const std::vector<std::int64_t>& sizes);
  /// `bytes` are the elements of the box, row by row.
  void add_chunk(const Box& box, std::string_view bytes);
  /// A value without tensors.
  void add_value(const Value::List& path, const Value& value);

  /// What was written, for `dcp_metadata`.
  [[nodiscard]] const std::vector<DcpEntry>& entries() const { return entries_; }

 private:
  [[nodiscard]] DcpPlace add_archive(const Value& content, const std::string_view* storage);

  std::string file_;
  ZipWriter::Write write_;
  std::uint64_t position_ = 0;
  std::vector<DcpEntry> entries_;
};

/// Entries as plain data and back, to be sent to another process.
[[nodiscard]] Value dcp_entries_to_value(std::span<const DcpEntry> entries);
[[nodiscard]] std::vector<DcpEntry> dcp_entries_from(const Value& value);

/// The bytes of `.metadata` for what all processes have written, in the order of their ranks.
/// `checkpoint_id` is the folder. Throws `CheckpointError` that names the tensor if processes
/// disagree about its sizes or dtype, or if their chunks overlap or leave something out.
[[nodiscard]] std::string dcp_metadata(std::span<const std::vector<DcpEntry>> parts,
                                       const std::string& checkpoint_id);

}  // namespace accelerate::detail::formats
