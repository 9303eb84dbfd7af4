// Tensors and dynamic values in `split_between_processes`.
#include <ATen/ATen.h>

#include "accelerate/errors.h"
#include "accelerate/split.h"
#include "accelerate/value.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

void require_rows(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() == 0) {
    throw ArgumentError(
        "split_between_processes: a tensor without dimensions has no rows to share out. Give it "
        "one with `unsqueeze(0)`, or leave it out.");
  }
}

Value split_list(std::span<const Value> items, const SplitPart& part) {
  Value::List mine;
  for (std::int64_t i = 0; i < part.size(); ++i) {
    mine.push_back(items[static_cast<std::size_t>(part.at(i))]);
  }
  return Value(std::move(mine));
}

}  // namespace

at::Tensor split_leaf(const at::Tensor& tensor, const SplitShare& share) {
  if (share.num_processes == 1) return tensor;
  require_rows(tensor);
  const SplitPart part = share.part(tensor.size(0), PadWith::kLastOfInput);
  at::Tensor mine = tensor.slice(0, part.start, part.end);
  if (!share.options.apply_padding) return mine;
  if (part.padding > 0) {
    const auto last = tensor.slice(0, part.padding_index, part.padding_index + 1);
    auto sizes = tensor.sizes().vec();
    sizes[0] = part.padding;
    mine = at::cat({mine, last.expand(sizes)}, 0);
  }
  return mine.to(share.device);
}

void add_lengths(const at::Tensor& tensor, const std::string& path, SplitLengths& to) {
  require_rows(tensor);
  to.add(path, tensor.size(0));
}

void add_lengths(const Value& value, const std::string& path, SplitLengths& to) {
  if (value.is_dict()) {
    for (const auto& [key, item] : value.as_dict()) {
      add_lengths(item, str(path, path.empty() ? "" : ".", key.to_string()), to);
    }
  } else if (value.is_list() || value.is_tuple()) {
    to.add(path, static_cast<std::int64_t>(value.items().size()));
  } else if (value.is_tensor()) {
    add_lengths(value.as_tensor(), path, to);
  }
}

Value split_leaf(const Value& value, const SplitShare& share) {
  if (share.num_processes == 1) return value;
  if (value.is_dict()) {
    Value::Dict mine;
    for (const auto& [key, item] : value.as_dict()) mine.set(key, split_leaf(item, share));
    return Value(std::move(mine));
  }
  if (value.is_list() || value.is_tuple()) {
    const auto items = value.items();
    return split_list(items, share.part(static_cast<std::int64_t>(items.size())));
  }
  if (value.is_tensor()) return Value(split_leaf(value.as_tensor(), share));
  return value;
}

}  // namespace accelerate::detail
