#include "model_parallel/parameter_part.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::model_parallel {
namespace {

struct Entry {
  /// No other tensor gets the address while the entry exists.
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  std::shared_ptr<const ParameterPart> part;
};

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Entry> entries;
};

// Never destroyed: a module may be static.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

}  // namespace

std::vector<formats::Box> ParameterPart::boxes() const {
  if (!dim) return {};
  const auto axis = static_cast<std::size_t>(*dim);
  std::vector<formats::Box> result;
  std::int64_t begin = 0;
  for (const auto block : blocks.empty() ? std::vector{sizes[axis]} : blocks) {
    const auto share = block / group->getSize();
    formats::Box box{.offsets = std::vector<std::int64_t>(sizes.size()), .sizes = sizes};
    box.offsets[axis] = begin + group->getRank() * share;
    box.sizes[axis] = share;
    result.push_back(std::move(box));
    begin += block;
  }
  return result;
}

at::Tensor ParameterPart::cut(const at::Tensor& whole) const {
  if (!dim) return whole.clone(at::MemoryFormat::Contiguous);
  std::vector<at::Tensor> parts;
  for (const auto& box : boxes()) {
    const auto axis = static_cast<std::size_t>(*dim);
    parts.push_back(whole.narrow(*dim, box.offsets[axis], box.sizes[axis]));
  }
  return at::cat(parts, *dim).contiguous();
}

at::Tensor ParameterPart::join(const at::Tensor& values) const {
  if (!dim) return values;
  const at::NoGradGuard no_grad;
  auto whole = at::zeros(sizes, values.options().requires_grad(false));
  std::int64_t done = 0;
  for (const auto& box : boxes()) {
    const auto axis = static_cast<std::size_t>(*dim);
    whole.narrow(*dim, box.offsets[axis], box.sizes[axis])
        .copy_(values.detach().narrow(*dim, done, box.sizes[axis]));
    done += box.sizes[axis];
  }
  all_reduce(whole, group, "whole " + name);
  return whole;
}

void check_divisible(const ParameterPart& part) {
  const auto size = part.sizes[static_cast<std::size_t>(*part.dim)];
  const auto processes = part.group->getSize();
  const auto fits = [&](std::int64_t block) { return block % processes == 0; };
  if (part.blocks.empty() ? fits(size) : std::ranges::all_of(part.blocks, fits)) return;
  throw ArgumentError(detail::str(
      "Dimension ", *part.dim, " of '", part.name, "' has size ", size,
      part.blocks.empty() ? "" : detail::str(" in blocks of ", join(part.blocks)),
      ", which cannot be divided among ", processes, " processes of tensor parallelism. Pad ",
      part.blocks.empty() ? "it" : "each of them", " to a multiple of ", processes,
      ", leave the layer out of the plan, or set another tp_size."));
}

void set_part(const at::Tensor& parameter, std::shared_ptr<const ParameterPart> part) {
  auto rule = part->rule;
  {
    const std::unique_lock lock(registry().mutex);
    auto& entries = registry().entries;
    std::erase_if(entries, [](const auto& one) { return one.second.tensor.expired(); });
    entries.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        Entry{c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()),
              std::move(part)});
  }
  if (rule) lazy::set_rule(parameter, std::move(rule));
}

std::shared_ptr<const ParameterPart> find_part(const at::Tensor& parameter) {
  const std::shared_lock lock(registry().mutex);
  const auto found = registry().entries.find(parameter.unsafeGetTensorImpl());
  return found == registry().entries.end() ? nullptr : found->second.part;
}

bool is_cut(const torch::nn::Module& module) {
  return std::ranges::any_of(module.parameters(), [](const at::Tensor& one) {
    const auto part = find_part(one);
    return part && part->dim;
  });
}

void cut_in_place(const at::Tensor& parameter, const std::shared_ptr<const ParameterPart>& part) {
  if (part->dim) {
    const at::NoGradGuard no_grad;
    const auto values = part->cut(parameter.detach());
    const auto gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
    parameter.set_data(values);
    if (gradient.defined()) parameter.mutable_grad() = part->cut(gradient);
    // The gradient accumulator has the old shape.
    torch::autograd::impl::materialize_autograd_meta(parameter)->grad_accumulator_.reset();
  }
  set_part(parameter, part);
}

void take_rules_off(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    const auto part = find_part(parameter);
    if (part && part->rule) lazy::set_rule(parameter, nullptr);
  }
}

void renew_rule(const at::Tensor& parameter, const ParameterPart& part) {
  if (part.rule && lazy::find_rule(parameter) != part.rule) lazy::set_rule(parameter, part.rule);
}

}  // namespace accelerate::detail::model_parallel
