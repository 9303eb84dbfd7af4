#include "optim/elementwise.h"

#include <c10/util/Type.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <typeinfo>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "core/log.h"
#include "core/text.h"
#include "optim/torch_optimizers.h"

namespace accelerate::detail::optim {
namespace {

using torch::optim::Optimizer;

/// Optimizers whose step of an element needs other elements of its matrix.
constexpr auto kWholeMatrix = std::to_array<std::string_view>(
    {"lbfgs", "adafactor", "muon", "lamb", "lars", "shampoo", "soap", "galore"});

}  // namespace

void check_elementwise(const Optimizer& optimizer) {
  const auto name = c10::demangle(typeid(optimizer).name());
  const auto lower = to_lower(name);
  const auto needs_matrices = [&](std::string_view one) {
    return lower.find(one) != std::string::npos;
  };
  if (std::ranges::any_of(kWholeMatrix, needs_matrices)) {
    throw UnsupportedError(
        str("prepare: the optimizer ", name,
            " needs whole matrices to step one of their elements, but the parameters of the model "
            "are kept in parts. Use AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax or "
            "Lion."));
  }
  const bool known = dynamic_cast<const FusedOptimizer*>(&optimizer) != nullptr ||
                     with_torch_adapter(optimizer, [](auto) {});
  if (known) return;
  warn_once(str("prepare: the optimizer ", name,
                " is not known here. It steps on parts of the parameters of a model, which "
                "is right only if it treats each element alone."));
}

}  // namespace accelerate::detail::optim
