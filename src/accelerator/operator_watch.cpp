#include "accelerator/operator_watch.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "core/text.h"

namespace accelerate::detail::accelerator {
namespace {

std::atomic<OperatorWatch*> watching{nullptr};
thread_local int depth = 0;  // of operators in operators

constexpr const char* kWaits =
    "waits for the device: item(), a branch on a tensor, or a copy to the host";
constexpr const char* kShape =
    "has a result whose shape depends on values, which the host must know";
constexpr const char* kOnHost = "computes on the CPU, where a recording has no part";

constexpr auto kRefused = std::to_array<std::pair<std::string_view, const char*>>({
    {"aten::item", kWaits},
    {"aten::_local_scalar_dense", kWaits},
    {"aten::equal", kWaits},
    {"aten::nonzero", kShape},
    {"aten::masked_select", kShape},
    {"aten::_unique2", kShape},
    {"aten::unique_dim", kShape},
    {"aten::unique_consecutive", kShape},
    {"aten::repeat_interleave.Tensor", kShape},
});

}  // namespace

OperatorWatch::OperatorWatch(c10::Device device) : device_(device) {
  watching = this;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begins, &ends)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

OperatorWatch::~OperatorWatch() {
  at::removeCallback(handle_);
  watching = nullptr;
}

void OperatorWatch::note(const char* name, const char* reason) {
  if (reason_.exchange(reason) == nullptr) name_ = name;
}

std::unique_ptr<at::ObserverContext> OperatorWatch::begins(const at::RecordFunction& call) {
  auto* const watch = watching.load();
  const bool outermost = depth++ == 0;
  if (watch == nullptr) return nullptr;
  // Nodes of backward and scopes of users have names that end with them.
  if (call.operator_name()) watch->last_ = call.name();
  const auto on_device = [&](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined() &&
           value.toTensor().device().type() == watch->device_.type();
  };
  for (const auto& [name, reason] : kRefused) {
    if (name != call.name() || !std::ranges::any_of(call.inputs(), on_device)) continue;
    // Kernels of the CPU read numbers by themselves, and nothing waits.
    if (watch->device_.is_cpu() && !outermost) continue;
    watch->note(call.name(), reason);
  }
  return nullptr;
}

void OperatorWatch::ends(const at::RecordFunction& call, at::ObserverContext* /*context*/) {
  --depth;
  auto* const watch = watching.load();
  if (watch == nullptr || watch->device_.is_cpu()) return;
  const auto on_host = [](const c10::IValue& value) {
    // Numbers are arguments of kernels.
    return value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu() &&
           value.toTensor().dim() > 0;
  };
  if (std::ranges::any_of(call.outputs(), on_host)) watch->note(call.name(), kOnHost);
}

std::string OperatorWatch::problem() const {
  const char* reason = reason_;
  const char* name = name_;
  return reason == nullptr ? "" : str(name != nullptr ? name : "an operator", " ", reason);
}

std::string OperatorWatch::last() const {
  const char* name = last_;
  return name == nullptr ? "" : name;
}

}  // namespace accelerate::detail::accelerator
