#include "formats/zero_folder.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "accelerate/errors.h"
#include "core/files.h"
#include "core/text.h"
#include "formats/archive.h"
#include "formats/format_error.h"
#include "formats/pickle_value.h"

namespace accelerate::detail::formats {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModelFile = "_model_states.pt";
constexpr std::string_view kOptimizerFile = "_optim_states.pt";

/// The number behind `marker` in a name.
std::optional<std::size_t> number_behind(std::string_view name, std::string_view marker) {
  const auto at = name.find(marker);
  if (at == std::string_view::npos) return std::nullopt;
  std::size_t number = 0;
  const auto* begin = name.data() + at + marker.size();
  const auto parsed = std::from_chars(begin, name.data() + name.size(), number);
  return parsed.ec == std::errc() ? std::optional(number) : std::nullopt;
}

/// The files of the processes that end in `ending`, by rank.
std::map<std::size_t, fs::path> files_by_rank(const fs::path& folder, std::string_view ending) {
  std::map<std::size_t, fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto name = entry.path().filename().string();
    if (!name.ends_with(ending)) continue;
    if (number_behind(name, "mp_rank_").value_or(0) != 0) {
      throw UnsupportedError(
          str("The checkpoint '", folder.string(), "' has the file '", name,
              "' of a model that tensor parallelism has split, which is not read. Convert it with "
              "DeepSpeed's own tools first."));
    }
    files.emplace(number_behind(name, "zero_pp_rank_").value_or(0), entry.path());
  }
  return files;
}

/// A file of torch.save that has a dict.
struct StateFile {
  explicit StateFile(const fs::path& path)
      : path(path), bytes(std::make_unique<FileBytes>(path)), archive(*bytes) {
    if (!archive.value().is_dict()) refuse("it holds no dict");
  }

  [[noreturn]] void refuse(std::string_view reason) const {
    throw format_error(path.string(), 0, str("the file of DeepSpeed: ", reason));
  }
  const Value& field(const Value::Dict& dict, std::string_view name) const {
    const auto* value = dict.get(name);
    if (value == nullptr) refuse(str("the field '", name, "' is missing"));
    return *value;
  }
  const Value::Dict& dict(std::string_view name) const {
    const auto& value = field(archive.value().as_dict(), name);
    if (!value.is_dict()) refuse(str("'", name, "' is of kind ", value.kind_name()));
    return value.as_dict();
  }
  /// Empty if the field is missing or none.
  Value::Dict optional_dict(std::string_view name) const {
    const auto* value = archive.value().as_dict().get(name);
    return value != nullptr && value->is_dict() ? value->as_dict() : Value::Dict();
  }
  const PickleTensor& tensor(const Value& value, std::string_view what) const {
    const auto* tensor = leaf_as<PickleTensor>(value);
    if (tensor == nullptr) refuse(str("'", what, "' is no tensor but ", value.kind_name()));
    return *tensor;
  }
  /// All elements of a tensor without gaps.
  ZeroTensor::Piece piece(const PickleTensor& tensor, std::string_view what) const {
    if (!tensor.has_plain_values()) refuse(str("'", what, "' is ", tensor.repr()));
    const auto dense = dense_strides(tensor.sizes);
    for (std::size_t d = 0; d < dense.size(); ++d) {
      if (tensor.sizes[d] > 1 && tensor.strides[d] != dense[d]) {
        refuse(str("the tensor '", what, "' has gaps"));
      }
    }
    const auto item = find_torch_dtype(tensor.dtype)->bytes;
    return {.file = path,
            .offset = archive.entry(*tensor.storage).offset +
                      static_cast<std::uint64_t>(tensor.offset * item),
            .count = element_count(tensor.sizes)};
  }

  fs::path path;
  std::unique_ptr<FileBytes> bytes;
  ArchiveReader archive;
};

/// Flat tensors one behind the other, of which parts are taken.
class FlatPieces {
 public:
  explicit FlatPieces(const TorchDtype& dtype) : dtype_(&dtype) {}

  void append(ZeroTensor::Piece piece) {
    begins_.push_back(count_);
    count_ += piece.count;
    pieces_.push_back(std::move(piece));
  }
  [[nodiscard]] std::int64_t count() const { return count_; }

  /// The caller ensures that the range lies within.
  void take(FlatRange range, std::vector<ZeroTensor::Piece>& into) const {
    auto at =
        static_cast<std::size_t>(std::ranges::upper_bound(begins_, range.begin) - begins_.begin());
    for (at = at == 0 ? 0 : at - 1; range.begin < range.end; ++at) {
      const auto skipped = range.begin - begins_[at];
      const auto count = std::min(range.count(), pieces_[at].count - skipped);
      if (count <= 0) continue;
      into.push_back(
          {.file = pieces_[at].file,
           .offset = pieces_[at].offset + static_cast<std::uint64_t>(skipped * dtype_->bytes),
           .count = count});
      range.begin += count;
    }
  }

 private:
  const TorchDtype* dtype_;
  std::vector<ZeroTensor::Piece> pieces_;
  std::vector<std::int64_t> begins_;
  std::int64_t count_ = 0;
};

struct Shape {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::int64_t count = 0;
};

class FolderReader {
 public:
  explicit FolderReader(fs::path folder) : folder_(std::move(folder)) {
    for (const auto& [rank, path] : files_by_rank(folder_, kModelFile)) models_.emplace_back(path);
    for (const auto& [rank, path] : files_by_rank(folder_, kOptimizerFile)) {
      optimizers_.emplace_back(path);
    }
    if (models_.empty()) {
      throw CheckpointError(
          str("The folder '", folder_.string(), "' has no file that ends in ", kModelFile, "."),
          folder_);
    }
  }

  std::vector<ZeroTensor> read() && {
    if (optimizers_.empty()) {
      for (const auto& [key, value] : first().dict("module")) add_stored(key.to_string(), value);
    } else {
      read_stage();
      add_buffers();
    }
    for (const auto& [alias, source] : first().optional_dict("shared_params")) {
      const auto* tensor = source.is_string() ? find(source.as_string()) : nullptr;
      if (tensor == nullptr || find(alias.to_string()) != nullptr) continue;
      auto copy = *tensor;
      copy.name = alias.to_string();
      add(std::move(copy));
    }
    return std::move(tensors_);
  }

 private:
  [[nodiscard]] const StateFile& first() const { return models_.front(); }

  void add(ZeroTensor tensor) {
    if (!positions_.emplace(tensor.name, tensors_.size()).second) {
      first().refuse(str("the parameter '", tensor.name, "' occurs twice"));
    }
    tensors_.push_back(std::move(tensor));
  }
  [[nodiscard]] const ZeroTensor* find(const std::string& name) const {
    const auto found = positions_.find(name);
    return found == positions_.end() ? nullptr : &tensors_[found->second];
  }

  /// A whole tensor of the first file.
  void add_stored(const std::string& name, const Value& value) {
    if (value.is_none()) return;
    const auto& tensor = first().tensor(value, name);
    add({.name = name,
         .dtype = find_torch_dtype(tensor.dtype),
         .sizes = tensor.sizes,
         .pieces = {first().piece(tensor, name)}});
  }

  void add_buffers() {
    const auto& names = first().field(first().archive.value().as_dict(), "buffer_names");
    if (!names.is_list() && !names.is_tuple()) first().refuse("'buffer_names' is no list");
    const auto& module = first().dict("module");
    for (const auto& name : names.items()) {
      const auto* value = name.is_string() ? module.get(name.as_string()) : nullptr;
      if (value != nullptr) add_stored(name.as_string(), *value);
    }
  }

  void read_stage() {
    const auto& file = optimizers_.front();
    const auto& state = file.dict("optimizer_state_dict");
    const auto& stage = file.field(state, "zero_stage");
    // Experts may be split among fewer processes; the others are split among all.
    const auto& partitions = file.field(state, "partition_count");
    const auto* count = &partitions;
    if (partitions.is_list() && !partitions.as_list().empty()) {
      count = &*std::ranges::max_element(partitions.as_list(), {}, [](const Value& one) {
        return one.is_int() ? one.as_int() : 0;
      });
    }
    if (!count->is_int() || count->as_int() != std::ssize(optimizers_)) {
      throw CheckpointError(str("Expected ", count->repr(), " files that end in ", kOptimizerFile,
                                " in '", folder_.string(), "' but found ", optimizers_.size(),
                                ". Copy those of all processes."),
                            folder_);
    }
    if (!stage.is_int() || stage.as_int() < 1 || stage.as_int() > 3) {
      file.refuse(str("the stage is ", stage.repr(), "; 1, 2 and 3 are read"));
    }
    stage.as_int() == 3 ? read_stage_3() : read_stage_2();
  }

  /// The flat weights of a process, one tensor per group.
  std::vector<const PickleTensor*> groups(const StateFile& file, std::string_view name) {
    const auto& list = file.field(file.dict("optimizer_state_dict"), name);
    if (!list.is_list() || list.as_list().empty()) {
      file.refuse(str("'", name, "' is no list of tensors"));
    }
    std::vector<const PickleTensor*> result;
    for (const auto& item : list.as_list()) {
      result.push_back(&file.tensor(item, name));
      const auto* dtype = find_torch_dtype(result.back()->dtype);
      if (dtype_ != nullptr && dtype != dtype_) file.refuse("the groups have several dtypes");
      dtype_ = dtype;
    }
    return result;
  }

  /// Names and shapes, group by group.
  [[nodiscard]] std::vector<std::vector<Shape>> shapes() const {
    const auto& value = first().field(first().archive.value().as_dict(), "param_shapes");
    std::vector<std::vector<Shape>> groups;
    const auto add_group = [&](const Value& group) {
      if (!group.is_dict()) first().refuse("'param_shapes' is no list of dicts");
      groups.push_back(shapes_in(group.as_dict()));
    };
    if (!value.is_list()) {
      add_group(value);  // of older versions
    } else {
      for (const auto& group : value.as_list()) add_group(group);
    }
    return groups;
  }
  [[nodiscard]] std::vector<Shape> shapes_in(const Value::Dict& dict) const {
    std::vector<Shape> shapes;
    for (const auto& [key, sizes] : dict) {
      Shape shape{.name = key.to_string(), .sizes = {}, .count = 1};
      const bool is_shape = sizes.is_tuple() || sizes.is_list();
      for (const auto& size : is_shape ? sizes.items() : std::span<const Value>()) {
        const bool fits = size.is_int() && size.as_int() >= 0 &&
                          !__builtin_mul_overflow(shape.count, size.as_int(), &shape.count);
        if (!fits) first().refuse(str("the shape of '", shape.name, "' is ", sizes.repr()));
        shape.sizes.push_back(size.as_int());
      }
      if (!is_shape) first().refuse(str("the shape of '", shape.name, "' is ", sizes.repr()));
      shapes.push_back(std::move(shape));
    }
    return shapes;
  }

  [[noreturn]] void refuse_count(std::int64_t needed, std::int64_t found) const {
    first().refuse(str("its parameters have ", needed, " elements and the flat weights of all ",
                       "processes ", found));
  }

  /// A group is its parameters one behind the other, padded and cut into equal parts.
  void read_stage_2() {
    constexpr std::string_view kGroups = "single_partition_of_fp32_groups";
    std::vector<FlatPieces> flat;
    for (const auto& file : optimizers_) {
      const auto parts = groups(file, kGroups);
      if (flat.empty()) flat.resize(parts.size(), FlatPieces(*dtype_));
      if (parts.size() != flat.size()) file.refuse("it has another number of groups");
      for (std::size_t g = 0; g < parts.size(); ++g) {
        flat[g].append(file.piece(*parts[g], kGroups));
      }
    }
    const auto by_group = shapes();
    if (by_group.size() != flat.size()) first().refuse("'param_shapes' has other groups");
    for (std::size_t g = 0; g < flat.size(); ++g) {
      std::int64_t offset = 0;
      for (const auto& shape : by_group[g]) {
        if (shape.count > flat[g].count() - offset) refuse_count(shape.count, flat[g].count());
        ZeroTensor tensor{.name = shape.name, .dtype = dtype_, .sizes = shape.sizes, .pieces = {}};
        flat[g].take({offset, offset + shape.count}, tensor.pieces);
        offset += shape.count;
        add(std::move(tensor));
      }
      // Groups are padded, in some versions twice, to multiples of this.
      const auto alignment = 2 * std::ssize(optimizers_);
      const auto aligned = [&](std::int64_t count) { return (count + alignment - 1) / alignment; };
      if (aligned(offset) != aligned(flat[g].count())) refuse_count(offset, flat[g].count());
    }
    const auto fragments = first().optional_dict("frozen_param_fragments");
    for (const auto& [name, tensor] : fragments) add_stored(name.to_string(), tensor);
  }

  /// Each parameter is cut into equal parts; a process has its parts of all, one behind the other.
  void read_stage_3() {
    std::vector<FlatPieces> flat;
    for (const auto& file : optimizers_) {
      const auto parts = groups(file, "fp32_flat_groups");
      flat.emplace_back(*dtype_);
      for (const auto* part : parts) flat.back().append(file.piece(*part, "fp32_flat_groups"));
    }
    std::int64_t offset = 0;
    for (const auto& group : shapes()) {
      for (const auto& shape : group) {
        const auto part = part_of(shape);
        ZeroTensor tensor{.name = shape.name, .dtype = dtype_, .sizes = shape.sizes, .pieces = {}};
        for (std::size_t rank = 0; rank < flat.size(); ++rank) {
          if (part > flat[rank].count() - offset) refuse_count(offset + part, flat[rank].count());
          flat[rank].take({offset, offset + length_of(shape, rank)}, tensor.pieces);
        }
        offset += part;
        add(std::move(tensor));
      }
    }
    if (offset != flat.front().count()) refuse_count(offset, flat.front().count());
    add_frozen_parts();
  }

  [[nodiscard]] std::int64_t part_of(const Shape& shape) const {
    const auto world = std::ssize(optimizers_);
    return shape.count / world + (shape.count % world != 0 ? 1 : 0);
  }
  /// Without the padding of the last parts.
  [[nodiscard]] std::int64_t length_of(const Shape& shape, std::size_t rank) const {
    const auto part = part_of(shape);
    const auto before = std::min(shape.count, static_cast<std::int64_t>(rank) * part);
    return std::min(part, shape.count - before);
  }

  void add_frozen_parts() {
    for (const auto& shape : shapes_in(first().optional_dict("frozen_param_shapes"))) {
      if (models_.size() != optimizers_.size()) {
        throw CheckpointError(
            str("Expected ", optimizers_.size(), " files that end in ", kModelFile, " in '",
                folder_.string(), "' but found ", models_.size(), ". Copy those of all processes."),
            folder_);
      }
      ZeroTensor tensor{.name = shape.name, .dtype = nullptr, .sizes = shape.sizes, .pieces = {}};
      for (std::size_t rank = 0; rank < models_.size(); ++rank) {
        const auto& file = models_[rank];
        const auto& part =
            file.tensor(file.field(file.dict("frozen_param_fragments"), shape.name), shape.name);
        tensor.dtype = find_torch_dtype(part.dtype);
        auto piece = file.piece(part, shape.name);
        const auto length = length_of(shape, rank);
        if (piece.count < length) file.refuse(str("its part of '", shape.name, "' is too short"));
        piece.count = length;
        if (length > 0) tensor.pieces.push_back(std::move(piece));
      }
      add(std::move(tensor));
    }
  }

  fs::path folder_;
  std::vector<StateFile> models_;
  std::vector<StateFile> optimizers_;
  const TorchDtype* dtype_ = nullptr;  // of the flat weights
  std::vector<ZeroTensor> tensors_;
  std::map<std::string, std::size_t> positions_;
};

bool has_weights(const fs::path& folder) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().filename().string().ends_with(kModelFile)) return true;
  }
  return false;
}

}  // namespace

std::optional<fs::path> find_zero_folder(const fs::path& folder) {
  if (has_weights(folder)) return folder;
  std::error_code error;
  const auto latest = folder / "latest";
  if (!fs::is_regular_file(latest, error)) return std::nullopt;
  const auto text = read_whole_file(latest, 4096);
  const fs::path tag = std::string(trim(text));
  // A name and no path: what the file says must not lead out of the folder.
  if (tag.empty() || tag != tag.filename() || tag == "." || tag == "..") return std::nullopt;
  return has_weights(folder / tag) ? std::optional(folder / tag) : std::nullopt;
}

std::vector<ZeroTensor> read_zero_folder(const fs::path& folder) {
  return FolderReader(folder).read();
}

void read_zero_range(OpenFiles& files, const ZeroTensor& tensor, FlatRange range,
                     std::span<char> out) {
  const auto item = tensor.dtype->bytes;
  std::int64_t at = 0;  // of the piece in the tensor
  for (const auto& piece : tensor.pieces) {
    const auto begin = std::max(range.begin, at);
    const auto end = std::min(range.end, at + piece.count);
    if (begin < end) {
      files.open(piece.file)
          .read(piece.offset + static_cast<std::uint64_t>((begin - at) * item),
                out.subspan(static_cast<std::size_t>((begin - range.begin) * item),
                            static_cast<std::size_t>((end - begin) * item)));
    }
    at += piece.count;
  }
}

}  // namespace accelerate::detail::formats
