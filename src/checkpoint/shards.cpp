// Storages of tensors: the split into files, and aliases.
#include <ATen/ATen.h>

#include <unordered_map>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "core/bytes.h"
#include "core/log.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/shards.h"
#include "modeling/tensors.h"

namespace accelerate {
namespace {

std::int64_t bytes_of(const ShardSize& size) {
  if (const auto* text = std::get_if<std::string>(&size)) return parse_size_to_int(*text);
  return std::get<std::int64_t>(size);
}

}  // namespace

std::int64_t parse_size_to_int(std::string_view size) { return detail::parse_size_to_int(size); }

StateDictSplit split_torch_state_dict_into_shards(const StateDict& state,
                                                  const SplitStateDictOptions& options) {
  std::vector<detail::formats::ShardItem> items;
  std::unordered_map<TensorStorageId, std::size_t> numbers;
  for (const auto& entry : state) {
    const auto id = id_tensor_storage(entry.value());
    std::optional<std::size_t> storage;
    if (!entry.value().is_meta()) storage = numbers.emplace(id, numbers.size()).first->second;
    items.push_back({.name = entry.key(), .storage = storage, .bytes = id.bytes});
  }
  return detail::formats::split_into_shards(items, options.filename_pattern,
                                            bytes_of(options.max_shard_size));
}

StateDictSplit shard_checkpoint(const StateDict& state, const ShardSize& max_shard_size,
                                std::string_view weights_name) {
  const auto dot = std::min(weights_name.rfind('.'), weights_name.size());
  return split_torch_state_dict_into_shards(
      state, {.filename_pattern =
                  detail::str(weights_name.substr(0, dot), "{suffix}", weights_name.substr(dot)),
              .max_shard_size = max_shard_size});
}

StateDict clean_state_dict_for_safetensors(const StateDict& state) {
  const auto groups = detail::modeling::same_elements(state);
  std::unordered_map<TensorStorageId, int> views;  // that stay, per storage
  for (const auto& names : groups) {
    const auto& tensor = state[names.front()];
    if (tensor.numel() != 0) ++views[id_tensor_storage(tensor)];
  }
  StateDict clean("Tensor");
  std::vector<std::string> removed;
  for (const auto& names : groups) {
    auto tensor = state[names.front()].detach();
    // Parity: Python keeps one view of a storage and drops the others, and with them their data.
    const bool shares = tensor.numel() != 0 && views[id_tensor_storage(tensor)] > 1;
    clean.insert(names.front(),
                 shares ? tensor.clone(at::MemoryFormat::Contiguous) : tensor.contiguous());
    for (std::size_t i = 1; i < names.size(); ++i) {
      removed.push_back(detail::python_repr(std::string_view(names[i])));
    }
  }
  if (!removed.empty()) {
    detail::warn(detail::str("Removed shared tensor {", detail::join(removed),
                             "} while saving. This should be OK, but check by verifying that you "
                             "don't receive any warning while reloading"));
  }
  return clean;
}

}  // namespace accelerate
