#include "accelerate/state_dict.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"
#include "modeling/stand_in.h"
#include "modeling/tensors.h"

namespace accelerate {
namespace {

void add_states(const torch::nn::Module& module, const std::string& prefix, StateDict& all) {
  StateDict behind("Tensor");  // statistics of packed weights come after the biases, as in Python
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
    const auto name = prefix + entry.key();
    const auto stand_in = detail::modeling::find_stand_in(entry.value());
    if (stand_in == nullptr) {
      all.insert(name, entry.value());
      continue;
    }
    for (const auto& part : stand_in->state(name)) {
      (part.key() == name ? all : behind).insert(part.key(), part.value());
    }
  }
  for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
    if (detail::modeling::is_non_persistent(entry.value())) continue;
    all.insert(prefix + entry.key(), entry.value());
  }
  for (const auto& part : behind) all.insert(part.key(), part.value());
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
  const auto packed = detail::modeling::stand_ins(module);
  for (const auto& entry : own) {
    const auto* const given = state.find(entry.key());
    if (given == nullptr || detail::modeling::owner_of(entry.key(), packed) != nullptr) continue;
    detail::modeling::refuse_codes(
        entry.key(), entry.value().scalar_type(),
        [&](const std::string& name) { return state.contains(name); },
        [&] { return given->scalar_type(); });
  }
  if (packed.empty()) {
    detail::modeling::check_fits(own, state, strict);
  } else {
    // What belongs to packed weights fits or not as a whole.
    const auto ordinary = [&](const StateDict& all) {
      StateDict part("Tensor");
      for (const auto& entry : all) {
        if (detail::modeling::owner_of(entry.key(), packed) == nullptr) {
          part.insert(entry.key(), entry.value());
        }
      }
      for (const auto& [name, parameter, stand_in] : packed) {
        if (all.contains(name)) part.insert(name, parameter);
      }
      return part;
    };
    detail::modeling::check_fits(ordinary(own), ordinary(state), strict);
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter, stand_in] : packed) {
    if (state.contains(name))
      stand_in->load(name, detail::modeling::part_of(name, *stand_in, state));
  }
  for (const auto& entry : own) {
    if (detail::modeling::owner_of(entry.key(), packed) != nullptr) continue;
    if (const auto* given = state.find(entry.key())) entry.value().copy_(*given);
  }
}

}  // namespace accelerate
