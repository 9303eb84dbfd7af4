#include "parallel/reached_leaves.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <typeinfo>
#include <utility>

namespace accelerate::detail::parallel {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

void AddressSet::clear() {
  std::ranges::fill(slots_, nullptr);
  count_ = 0;
}

namespace {

// The low bits of addresses are alike: multiply, and take the high ones.
std::size_t slot_of(const void* address, std::size_t slots) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address) * 0x9E3779B97F4A7C15ULL;
  return static_cast<std::size_t>(bits >> 20U) & (slots - 1);
}

}  // namespace

bool AddressSet::insert(const void* address) {
  if (2 * (count_ + 1) > slots_.size()) grow();
  for (auto i = slot_of(address, slots_.size());; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i] == address) return false;
    if (slots_[i] != nullptr) continue;
    slots_[i] = address;
    ++count_;
    return true;
  }
}

bool AddressSet::contains(const void* address) const {
  if (slots_.empty()) return false;
  for (auto i = slot_of(address, slots_.size());; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i] == address) return true;
    if (slots_[i] == nullptr) return false;
  }
}

void AddressSet::grow() {
  const auto before =
      std::exchange(slots_, std::vector<const void*>(std::max<std::size_t>(64, 2 * slots_.size())));
  count_ = 0;
  for (const void* address : before) {
    if (address != nullptr) insert(address);
  }
}

bool ReachedLeaves::contains(const at::Tensor& leaf) const {
  return leaves_.contains(leaf.unsafeGetTensorImpl());
}

void ReachedLeaves::walk(const at::Tensor& output) {
  leaves_.clear();
  seen_.clear();
  open_.clear();
  const auto meet = [this](Node* node) {
    if (!seen_.insert(node)) return;
    if (node->num_outputs() > 0) {
      open_.push_back(node);
    } else if (const Node& end = *node; typeid(end) == typeid(AccumulateGrad)) {
      // Only ends of the graph can be one, and nothing derives from it: no cast has to search.
      leaves_.insert(static_cast<const AccumulateGrad&>(end).variable.unsafeGetTensorImpl());
    }
  };
  if (const auto& node = output.grad_fn()) meet(node.get());
  if (output.is_leaf() && output.requires_grad()) leaves_.insert(output.unsafeGetTensorImpl());
  while (!open_.empty()) {
    const Node* const node = open_.back();
    open_.pop_back();
    for (const auto& edge : node->next_edges()) {
      if (edge.function) meet(edge.function.get());
    }
  }
}

}  // namespace accelerate::detail::parallel
