#include "modeling/outline.h"

#include <algorithm>
#include <unordered_map>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "core/text.h"
#include "modeling/tensors.h"
#include "modeling/torch_dtype.h"

namespace accelerate {
namespace {

using detail::str;

std::int64_t bits_of(c10::ScalarType dtype) {
  // A bool counts as one bit, as in Python, although Torch stores it in a byte.
  return dtype == c10::ScalarType::Bool ? 1
                                        : static_cast<std::int64_t>(c10::elementSize(dtype)) * 8;
}

std::int64_t bits_of(CustomDtype dtype) {
  switch (dtype) {
    case CustomDtype::kFp8:
      return 8;
    case CustomDtype::kInt4:
      return 4;
    case CustomDtype::kInt2:
      return 2;
  }
  return 8;
}

std::int64_t bits_of(const std::string& name) {
  for (const auto custom : {CustomDtype::kFp8, CustomDtype::kInt4, CustomDtype::kInt2}) {
    if (to_string(custom) == name) return bits_of(custom);
  }
  const auto plain = name.starts_with("torch.") ? name.substr(6) : name;
  if (const auto dtype = detail::modeling::dtype_of(plain)) return bits_of(*dtype);
  throw ArgumentError(str("`dtype` is not a valid dtype: ", name,
                          ". Use a name of Torch such as 'float16', or 'fp8', 'int4', 'int2'."));
}

std::int64_t bits_of(const DtypeLike& dtype) {
  return std::visit([](const auto& one) { return bits_of(one); }, dtype);
}

/// Appends modules, in the order of `Module::apply`, with their tensors.
class OutlineBuilder {
 public:
  explicit OutlineBuilder(const detail::modeling::OutlineOptions& options) {
    if (options.dtype) dtype_bits_ = bits_of(*options.dtype);
    for (const auto& [name, dtype] : options.special_dtypes) special_bits_[name] = bits_of(dtype);
  }

  void add_module(const std::string& name, const torch::nn::Module& module) {
    const auto depth =
        name.empty() ? 0 : static_cast<std::size_t>(std::ranges::count(name, '.')) + 1;
    close_down_to(depth);
    open_.push_back(append(name, PartKind::kModule));
    built_.modules.back() = &module;
    const auto prefix = name.empty() ? std::string() : name + ".";
    for (const auto& entry : detail::modeling::own_parameters(module)) {
      if (entry.value().defined()) {
        add_tensor(prefix + entry.key(), PartKind::kParameter, entry.value());
      }
    }
    for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
      add_tensor(prefix + entry.key(), PartKind::kBuffer, entry.value());
    }
  }

  detail::modeling::ModuleOutline finish() {
    close_down_to(0);
    auto& parts = built_.outline.parts;
    std::vector<std::vector<std::size_t>> groups;
    for (auto& [first, parts_of_group] : tied_) groups.push_back(std::move(parts_of_group));
    for (auto& group : groups) {
      std::ranges::sort(group, {},
                        [&](std::size_t part) -> const auto& { return parts[part].name; });
    }
    built_.outline.ties = std::move(groups);
    return std::move(built_);
  }

 private:
  using PartKind = detail::PartKind;
  struct Seen {
    at::Tensor tensor;
    std::size_t part;
  };
  using Memory = std::unordered_multimap<const void*, Seen>;

  std::size_t append(std::string name, PartKind kind) {
    auto& parts = built_.outline.parts;
    parts.push_back({.name = std::move(name), .kind = kind, .end = parts.size() + 1});
    built_.modules.push_back(nullptr);
    return parts.size() - 1;
  }

  /// Modules at this depth and below are complete.
  void close_down_to(std::size_t depth) {
    auto& parts = built_.outline.parts;
    for (; open_.size() > depth; open_.pop_back()) {
      auto& closed = parts[open_.back()];
      closed.end = parts.size();
      if (open_.size() < 2) continue;
      auto& parent = parts[open_[open_.size() - 2]];
      parent.bits += closed.bits;
      parent.buffer_bits += closed.buffer_bits;
    }
  }

  void add_tensor(std::string name, PartKind kind, const at::Tensor& tensor) {
    const bool is_buffer = kind == PartKind::kBuffer;
    const auto part = append(std::move(name), kind);
    auto& memory = is_buffer ? buffers_ : parameters_;
    const auto* const place = detail::modeling::memory_of(tensor);
    auto [known, end] = memory.equal_range(place);
    while (known != end && !detail::modeling::same_view(known->second.tensor, tensor)) ++known;
    auto& added = built_.outline.parts[part];
    if (known != end) {
      added.alias = true;
      if (is_buffer) return;
      auto& group = tied_[known->second.part];
      if (group.empty()) group.push_back(known->second.part);
      group.push_back(part);
      return;
    }
    memory.emplace(place, Seen{tensor, part});
    added.bits = tensor.numel() * element_bits(added.name, tensor);
    if (is_buffer) added.buffer_bits = added.bits;
    auto& owner = built_.outline.parts[open_.back()];
    owner.bits += added.bits;
    owner.buffer_bits += added.buffer_bits;
  }

  [[nodiscard]] std::int64_t element_bits(const std::string& name, const at::Tensor& tensor) const {
    if (!special_bits_.empty()) {
      const auto special = special_bits_.find(name);
      if (special != special_bits_.end()) return special->second;
    }
    const auto own = bits_of(tensor.scalar_type());
    if (!dtype_bits_ || at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) return own;
    return std::min(own, *dtype_bits_);
  }

  std::optional<std::int64_t> dtype_bits_;
  std::unordered_map<std::string, std::int64_t> special_bits_;
  detail::modeling::ModuleOutline built_;
  std::vector<std::size_t> open_;  // the modules that the last one is in, and itself
  Memory parameters_;
  Memory buffers_;
  std::map<std::size_t, std::vector<std::size_t>> tied_;  // by the part that came first
};

}  // namespace

namespace detail::modeling {

ModuleOutline outline_of(const torch::nn::Module& model, const OutlineOptions& options) {
  OutlineBuilder builder(options);
  model.apply([&](const std::string& name, const torch::nn::Module& module) {
    builder.add_module(name, module);
  });
  auto built = builder.finish();
  if (options.no_split_module_classes.empty()) return built;
  // Names of classes are slow: only where it matters.
  for (std::size_t part = 0; part < built.modules.size(); ++part) {
    if (built.modules[part] == nullptr || !built.outline.has_children(part)) continue;
    built.outline.parts[part].no_split =
        has_class(*built.modules[part], options.no_split_module_classes);
  }
  return built;
}

bool has_class(const torch::nn::Module& module, const std::vector<std::string>& names) {
  const auto& full = module.name();
  const auto bare = short_class_name(full);
  return std::ranges::any_of(names, [&](const std::string& name) {
    const bool qualified = name.find("::") != name.npos;
    return name == full || (!qualified && short_class_name(name) == bare);
  });
}

}  // namespace detail::modeling

double dtype_byte_size(const DtypeLike& dtype) { return static_cast<double>(bits_of(dtype)) / 8; }

}  // namespace accelerate
