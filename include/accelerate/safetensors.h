// accelerate/safetensors.h - safetensors files: tensors by name, without code to execute.
//
//     auto file = accelerate::safetensors::File::open("model.safetensors");
//     for (const auto& name : file.keys()) use(name, file.get(name));
//
//     accelerate::safetensors::save_file(accelerate::state_dict(*model), "model.safetensors");
//
// Files are byte for byte those of Python's library, in both directions. All of a header is checked
// when a file is opened: what an attacker writes is a `FormatError` with the byte at fault.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/state_dict.h"

namespace accelerate::safetensors {

/// Texts beside the tensors. Written in the order of their keys.
using Metadata = std::map<std::string, std::string>;

struct OpenOptions {
  /// Tensors on the CPU are the pages of the file, read when they are touched. Off: they are read
  /// at once into memory of their own, which is faster if all of it is needed soon, and safe from
  /// programs that change the file.
  bool mapped = true;
};

/// What a header says about a tensor.
struct TensorInfo {
  /// As in the file: "F32", "BF16", "F8_E4M3".
  std::string dtype = {};
  /// As in the file. F4 counts single numbers, while Torch's dtype holds two in an element.
  std::vector<std::int64_t> shape = {};
  std::int64_t bytes = 0;

  bool operator==(const TensorInfo&) const = default;
};

/// A part of one dimension, with the rules of Python's slices: negative positions count from the
/// end, and what lies outside is cut off.
struct Range {
  std::int64_t begin = 0;
  /// Unset: to the end.
  std::optional<std::int64_t> end = std::nullopt;
};

/// An open file. Copies share it. Several threads may read from it.
class ACCELERATE_API File {
 public:
  /// Reads and checks the header. Throws `CheckpointError` if the file cannot be read and
  /// `FormatError` if it breaks a rule of the format.
  [[nodiscard]] static File open(const std::filesystem::path& path,
                                 const OpenOptions& options = {});
  /// Reads and checks a file in memory. `name` stands for it in messages.
  [[nodiscard]] static File from_bytes(std::string bytes, const std::string& name = "<memory>");

  /// The names of all tensors, sorted; `offset_keys` has the order of their bytes.
  [[nodiscard]] std::vector<std::string> keys() const;
  [[nodiscard]] std::vector<std::string> offset_keys() const;
  [[nodiscard]] bool contains(std::string_view name) const;
  /// Empty if the file has none.
  [[nodiscard]] const Metadata& metadata() const noexcept;
  [[nodiscard]] const std::filesystem::path& path() const noexcept;

  /// Throws `ArgumentError` for an unknown name, like all members that take one.
  [[nodiscard]] TensorInfo info(std::string_view name) const;

  /// A tensor on a device. One of a mapped file on the CPU holds no memory of its own and keeps the
  /// file open; all that are alive share the file's pages, so that writing into one is seen by the
  /// others, but never by the file. If a program cuts the file meanwhile, touching such a tensor
  /// ends this process (after a line that names the file): replace files by renaming.
  ///
  /// Throws `UnsupportedError` for dtypes that Torch does not have (F6_E2M3, F6_E3M2).
  [[nodiscard]] at::Tensor get(std::string_view name, c10::Device device = c10::kCPU) const;
  /// A part of a tensor, in memory of its own; no other bytes are read. Dimensions without a range
  /// are taken whole.
  [[nodiscard]] at::Tensor get_slice(std::string_view name, const std::vector<Range>& ranges,
                                     c10::Device device = c10::kCPU) const;
  /// Reads a tensor into the memory of one that exists, on any device and with any dtype. Shapes
  /// must be equal, else `ArgumentError`. A file that was cut meanwhile is a `CheckpointError`.
  void read_into(std::string_view name, const at::Tensor& destination) const;
  /// Reads many at once, by several threads together, which tell `done` how many bytes of the
  /// destinations they have filled. No two destinations may share memory.
  void read_into(const std::vector<std::pair<std::string, at::Tensor>>& destinations,
                 const std::function<void(std::int64_t bytes)>& done = {}) const;
  /// All tensors, in the order of their bytes.
  [[nodiscard]] StateDict get_tensors(c10::Device device = c10::kCPU) const;

 private:
  struct Impl;
  explicit File(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

/// All tensors of a file: `File::open(path).get_tensors(device)`.
[[nodiscard]] ACCELERATE_API StateDict load_file(const std::filesystem::path& path,
                                                 c10::Device device = c10::kCPU);

/// Writes a file that appears whole under its name or not at all. Tensors may be on any device; no
/// metadata is written if the map is empty.
///
/// Throws `ArgumentError` that names the tensors which are sparse, not contiguous, share memory or
/// have a dtype that the format does not know, and `CheckpointError` if the file cannot be written.
ACCELERATE_API void save_file(const StateDict& tensors, const std::filesystem::path& path,
                              const Metadata& metadata = {{"format", "pt"}});
/// The bytes of that file.
[[nodiscard]] ACCELERATE_API std::string serialize(const StateDict& tensors,
                                                   const Metadata& metadata = {{"format", "pt"}});

}  // namespace accelerate::safetensors
