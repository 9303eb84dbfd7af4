#include "accelerate/state_dict.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"
#include "modeling/tensors.h"

namespace accelerate {
namespace {

void add_states(const torch::nn::Module& module, const std::string& prefix, StateDict& all) {
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
    all.insert(prefix + entry.key(), entry.value());
  }
  for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
    if (detail::modeling::is_non_persistent(entry.value())) continue;
    all.insert(prefix + entry.key(), entry.value());
  }
  for (const auto& entry : module.named_children()) {
    add_states(*entry.value(), prefix + entry.key() + ".", all);
  }
}

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict all("Tensor");
  add_states(module, "", all);
  return all;
}

namespace detail::modeling {

void check_fits(const StateDict& own, const StateDict& state, bool strict) {
  std::vector<std::string> missing, unexpected;
  std::string problems;
  for (const auto& entry : own) {
    const auto* const given = state.find(entry.key());
    if (given == nullptr) {
      missing.push_back(detail::str('"', entry.key(), '"'));
    } else if (given->sizes() != entry.value().sizes()) {
      problems += detail::str("\n\tsize mismatch for ", entry.key(), ": the state has shape ",
                              given->sizes(), ", the module ", entry.value().sizes(), ".");
    }
  }
  for (const auto& entry : state) {
    if (!own.contains(entry.key())) unexpected.push_back(detail::str('"', entry.key(), '"'));
  }
  const auto list = [&](const char* what, const std::vector<std::string>& names) {
    if (strict && !names.empty()) {
      problems += detail::str("\n\t", what, " key(s) in state_dict: ", detail::join(names), ".");
    }
  };
  list("Unexpected", unexpected);
  list("Missing", missing);
  if (!problems.empty()) {
    throw StateDictMismatch(detail::str("The state does not fit the module:", problems));
  }
}

}  // namespace detail::modeling

void load_state_dict(torch::nn::Module& module, const StateDict& state, bool strict) {
  const auto own = state_dict(module);
  detail::modeling::check_fits(own, state, strict);
  const at::NoGradGuard no_grad;
  for (const auto& entry : own) {
    if (const auto* given = state.find(entry.key())) entry.value().copy_(*given);
  }
}

}  // namespace accelerate
