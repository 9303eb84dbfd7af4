#include "checkpoint/sharded_files.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "accelerate/constants.h"
#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "core/text.h"
#include "formats/dcp_writer.h"
#include "formats/pickle.h"
#include "modeling/torch_dtype.h"

namespace accelerate::detail::checkpoint {
namespace {

using formats::FlatRange;

// Messages of `gathered_state` have at least one tensor, and as many as make this.
constexpr std::int64_t kBatchBytes = 64 << 20;

const formats::TorchDtype& file_dtype(const LocalShard& shard) {
  const auto* dtype = formats::find_torch_dtype(modeling::name_of(shard.dtype));
  if (dtype != nullptr) return *dtype;
  throw ArgumentError(str("'", shard.name, "' is of dtype ", modeling::name_of(shard.dtype),
                          ", which files cannot have. Convert it first."));
}

/// Where it is in the nested state.
Value::List path_of(const ShardItems& items, const LocalShard& shard) {
  if (shard.key.empty()) return {items.root, shard.name};
  return {items.root, "state", shard.name, shard.key};
}

/// The bytes of a shard in host memory; `keeps` keeps them there.
std::string_view bytes_of(const LocalShard& shard, at::Tensor& keeps) {
  keeps = shard.values.detach().to(at::kCPU, shard.dtype).contiguous();
  if (keeps.numel() != shard.end - shard.begin) {
    throw StateError(str("The shard of '", shard.name, "' has ", keeps.numel(), " elements for [",
                         shard.begin, ", ", shard.end, ")."));
  }
  return {static_cast<const char*>(keeps.const_data_ptr()), keeps.nbytes()};
}

/// All elements of a tensor that this process has whole.
LocalShard whole_shard(const at::Tensor& tensor) {
  const auto plain = tensor.detach().resolve_conj().resolve_neg();
  return {.sizes = plain.sizes().vec(),
          .dtype = plain.scalar_type(),
          .end = plain.numel(),
          .values = plain.reshape({-1})};
}

void write_shard(formats::DcpFileWriter& writer, const Value::List& path, const LocalShard& shard,
                 ByteBar& bar) {
  const auto& dtype = file_dtype(shard);
  writer.begin_tensor(path, dtype, shard.sizes);
  at::Tensor keeps;
  auto bytes = bytes_of(shard, keeps);
  for (const auto& box : formats::range_to_boxes(shard.sizes, shard.boxes, shard.range())) {
    // A box is one run of elements, and boxes come in their order.
    const auto size = static_cast<std::size_t>(formats::element_count(box.sizes) * dtype.bytes);
    writer.add_chunk(box, bytes.substr(0, size));
    bytes.remove_prefix(size);
    bar.add(static_cast<std::int64_t>(size));
  }
}

/// Whether this process writes the shard. One without elements is written for its name.
bool is_written(const LocalShard& shard) {
  return !shard.replica && (shard.begin < shard.end || formats::element_count(shard.sizes) == 0);
}

// ---- gathering ----------------------------------------------------------------------------------

/// Where a process has its elements of a tensor.
struct Piece {
  std::size_t rank = 0;
  FlatRange range;
  std::vector<formats::Box> boxes = {};
};

struct GatheredTensor {
  Value::List path;
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  std::vector<Piece> pieces;

  [[nodiscard]] std::int64_t bytes() const {
    return formats::element_count(sizes) * static_cast<std::int64_t>(at::elementSize(dtype));
  }
};

/// The shards that this process writes, by the names of their paths.
std::vector<const LocalShard*> written_shards(const ShardItems& items) {
  std::vector<const LocalShard*> written;
  for (const auto& shard : items.shards) {
    if (is_written(shard)) written.push_back(&shard);
  }
  return written;
}

Value described(const ShardItems& items) {
  Value::List shards;
  for (const auto* shard : written_shards(items)) {
    Value::List boxes;
    for (const auto& box : shard->boxes) {
      boxes.push_back(Value::tuple({Value(box.offsets), Value(box.sizes)}));
    }
    shards.push_back(Value::tuple({Value(path_of(items, *shard)), Value(shard->sizes),
                                   modeling::name_of(shard->dtype), shard->begin, shard->end,
                                   Value(std::move(boxes))}));
  }
  return Value(std::move(shards));
}

std::vector<std::int64_t> integers(const Value& list) {
  std::vector<std::int64_t> result;
  for (const auto& one : list.items()) result.push_back(one.as_int());
  return result;
}

/// In the order in which ranks name them first.
std::vector<GatheredTensor> tensors_of(const std::vector<Value>& descriptions) {
  std::vector<GatheredTensor> tensors;
  std::map<std::string, std::size_t> positions;
  for (std::size_t rank = 0; rank < descriptions.size(); ++rank) {
    for (const auto& item : descriptions[rank].items()) {
      const auto fields = item.items();
      const auto [found, is_new] = positions.try_emplace(fields[0].repr(), tensors.size());
      if (is_new) {
        GatheredTensor tensor{.path = fields[0].as_list(),
                              .sizes = {},
                              .dtype = modeling::dtype_of(fields[2].as_string()).value(),
                              .pieces = {}};
        tensor.sizes = integers(fields[1]);
        tensors.push_back(std::move(tensor));
      }
      Piece piece{.rank = rank, .range = {fields[3].as_int(), fields[4].as_int()}};
      for (const auto& box : fields[5].items()) {
        const auto parts = box.items();
        piece.boxes.push_back({.offsets = integers(parts[0]), .sizes = integers(parts[1])});
      }
      tensors[found->second].pieces.push_back(std::move(piece));
    }
  }
  return tensors;
}

/// Puts `value` into nested dicts, below the root.
void set_at(Value& state, const Value::List& path, Value value) {
  Value* at = &state;
  for (std::size_t i = 1; i < path.size(); ++i) {
    if (at->is_none()) *at = Value(Value::Dict());
    at = &at->as_dict()[path[i].as_string()];
  }
  *at = std::move(value);
}

/// Adds what `from` has in its dicts to `into`.
void merge_into(Value& into, const Value& from) {
  if (!into.is_dict() || !from.is_dict()) {
    into = from;
    return;
  }
  for (const auto& [key, value] : from.as_dict()) merge_into(into.as_dict()[key], value);
}

/// What of `tensors` comes from this process, one behind the other.
std::string pieces_of(const ShardItems& items, std::span<const GatheredTensor> tensors,
                      std::size_t rank) {
  std::map<std::string, const LocalShard*> mine;
  for (const auto* shard : written_shards(items)) {
    mine.emplace(Value(path_of(items, *shard)).repr(), shard);
  }
  std::string bytes;
  for (const auto& tensor : tensors) {
    const bool takes_part =
        std::ranges::find(tensor.pieces, rank, &Piece::rank) != tensor.pieces.end();
    if (!takes_part) continue;
    at::Tensor keeps;
    bytes += bytes_of(*mine.at(Value(tensor.path).repr()), keeps);
  }
  return bytes;
}

at::Tensor assembled(const GatheredTensor& tensor, std::vector<std::string_view>& messages) {
  auto whole = at::empty(tensor.sizes, at::TensorOptions(tensor.dtype));
  const auto item = static_cast<std::int64_t>(whole.element_size());
  for (const auto& piece : tensor.pieces) {
    const auto size = static_cast<std::size_t>(piece.range.count() * item);
    auto& message = messages[piece.rank];
    if (size > 0) {
      auto values = at::empty({piece.range.count()}, whole.options());
      std::memcpy(values.mutable_data_ptr(), message.data(), size);
      place({.sizes = tensor.sizes,
             .begin = piece.range.begin,
             .end = piece.range.end,
             .values = std::move(values),
             .boxes = piece.boxes},
            whole);
    }
    message.remove_prefix(size);
  }
  return whole;
}

std::string base_name(ShardedPart part) {
  return std::string(part == ShardedPart::kModel ? kFsdpModelName : kOptimizerName);
}

}  // namespace

bool LocalShard::has_first() const {
  const auto is_zero = [](std::int64_t one) { return one == 0; };
  return begin == 0 && end > 0 &&
         (boxes.empty() || std::ranges::all_of(boxes.front().offsets, is_zero));
}

void place(const LocalShard& shard, const at::Tensor& whole) {
  const auto values = shard.values.detach().reshape({-1});
  std::int64_t done = 0;
  for (const auto& box : formats::range_to_boxes(shard.sizes, shard.boxes, shard.range())) {
    const auto count = formats::element_count(box.sizes);
    auto target = whole;
    for (std::size_t d = 0; d < box.sizes.size(); ++d) {
      target = target.narrow(static_cast<std::int64_t>(d), box.offsets[d], box.sizes[d]);
    }
    target.copy_(values.narrow(0, done, count).view(box.sizes));
    done += count;
  }
}

std::vector<formats::DcpEntry> write_shard_items(const ShardItems& items, OutputFile& file,
                                                 ByteBar& bar) {
  formats::DcpFileWriter writer(file.path().filename().string(),
                                [&](std::string_view bytes) { file.write(bytes); });
  formats::for_each_dcp_leaf(items.values, {items.root},
                             [&](const Value::List& path, const Value& leaf) {
                               if (!leaf.is_tensor()) return writer.add_value(path, leaf);
                               write_shard(writer, path, whole_shard(leaf.as_tensor()), bar);
                             });
  for (const auto* shard : written_shards(items)) {
    write_shard(writer, path_of(items, *shard), *shard, bar);
  }
  return writer.entries();
}

std::int64_t bytes_in(const ShardItems& items) {
  std::int64_t bytes = 0;
  for (const auto* shard : written_shards(items)) {
    bytes += shard->range().count() * static_cast<std::int64_t>(at::elementSize(shard->dtype));
  }
  formats::for_each_dcp_leaf(items.values, {}, [&](const Value::List&, const Value& leaf) {
    if (leaf.is_tensor()) bytes += static_cast<std::int64_t>(leaf.as_tensor().nbytes());
  });
  return bytes;
}

Value gathered_state(const ShardItems& items, const Exchange& exchange) {
  const auto rank = static_cast<std::size_t>(PartialState().process_index());
  std::vector<Value> descriptions;
  for (const auto& part : exchange([&] { return formats::pickle_dumps(described(items)); })) {
    descriptions.push_back(formats::pickle_loads(part));
  }
  const auto tensors = tensors_of(descriptions);
  Value state = rank == 0 ? items.values : Value(Value::Dict());
  for (std::size_t begin = 0; begin < tensors.size();) {
    std::size_t end = begin;
    for (std::int64_t bytes = 0; end < tensors.size() && (end == begin || bytes < kBatchBytes);) {
      bytes += tensors[end++].bytes();
    }
    const auto batch = std::span(tensors).subspan(begin, end - begin);
    const auto messages = exchange([&] { return pieces_of(items, batch, rank); });
    std::vector<std::string_view> rest(messages.begin(), messages.end());
    for (const auto& tensor : batch) {
      if (rank == 0) set_at(state, tensor.path, Value(assembled(tensor, rest)));
    }
    begin = end;
  }
  // What others save whole, such as counters of parameters that begin with them. Tensors among
  // these are shards of their own.
  const auto others =
      exchange([&] { return rank == 0 ? std::string() : formats::pickle_dumps(items.values); });
  for (std::size_t other = 1; rank == 0 && other < others.size(); ++other) {
    merge_into(state, formats::pickle_loads(others[other]));
  }
  return state;
}

std::string sharded_folder_name(ShardedPart part, std::size_t index) {
  return str(base_name(part), "_", index);
}

std::string deepspeed_folder_name(std::size_t index) {
  return str(kModelName, index == 0 ? "" : str("_", index));
}

std::string full_file_name(ShardedPart part, std::size_t index) {
  return str(base_name(part), index == 0 ? "" : str("_", index), ".bin");
}

std::string local_file_name(ShardedPart part, std::size_t index, int process_index,
                            bool first_has_number) {
  return str(base_name(part), index == 0 && !first_has_number ? "" : str("_", index), "_rank",
             process_index, ".bin");
}

}  // namespace accelerate::detail::checkpoint
