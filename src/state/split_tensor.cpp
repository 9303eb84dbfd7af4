// Tensors and dynamic values in `split_between_processes`.
#include <ATen/ATen.h>

#include "accelerate/errors.h"
#include "accelerate/state/split.h"
#include "accelerate/value.h"
#include "core/text.h"

namespace accelerate::detail::state {

SplitPart SplitLeaf::part(std::int64_t length, SplitShare& share, const std::string& path,
                          PadWith pad_with) {
  if (share.num_processes > 1) share.lengths.add(path, length);
  return split_part(length, share.num_processes, share.process_index, share.options, pad_with);
}

at::Tensor SplitLeaf::split(const at::Tensor& tensor, SplitShare& share, const std::string& path) {
  if (share.num_processes == 1) return tensor;
  if (!tensor.defined() || tensor.dim() == 0) {
    throw ArgumentError(
        "split_between_processes: a tensor without dimensions has no rows to share out. Give it "
        "one with `unsqueeze(0)`, or leave it out.");
  }
  const SplitPart part = SplitLeaf::part(tensor.size(0), share, path, PadWith::kLastOfInput);
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

Value SplitLeaf::split(const Value& value, SplitShare& share, const std::string& path) {
  if (share.num_processes == 1) return value;
  if (value.is_dict()) {
    Value::Dict mine;
    for (const auto& [key, item] : value.as_dict()) {
      mine.set(key, split(item, share, str(path, path.empty() ? "" : ".", key.to_string())));
    }
    return Value(std::move(mine));
  }
  if (value.is_list() || value.is_tuple()) {
    const auto items = value.items();
    const SplitPart part = SplitLeaf::part(static_cast<std::int64_t>(items.size()), share, path);
    Value::List mine;
    for (std::int64_t i = 0; i < part.size(); ++i) {
      mine.push_back(items[static_cast<std::size_t>(part.at(i))]);
    }
    return Value(std::move(mine));
  }
  if (value.is_tensor()) return Value(split(value.as_tensor(), share, path));
  return value;
}

void SplitLeaf::refuse_unknown_size() {
  throw ArgumentError(
      "split_between_processes: the dataset does not know its size. Split the list of what it "
      "reads from instead, such as its files.");
}

}  // namespace accelerate::detail::state
