// Members of Python's Accelerator that are not there, and why.
#include <array>
#include <string_view>

#include "accelerate/accelerator/refused_members.h"
#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {
namespace detail::accelerator {
namespace {

struct Refusal {
  std::string_view member;
  std::string_view reason;
};

constexpr auto kRefusals = std::to_array<Refusal>({
    {"capture", "this version does not capture steps yet. Steps run the same without."},
    {"lomo_backward",
     "the LOMO optimizers are a Python package that applies gradients within backward. Use an "
     "optimizer of accelerate/optim.h and backward; Lion and Adafactor keep little state."},
});

}  // namespace

void refuse_member(const char* name) {
  for (const auto& [member, reason] : kRefusals) {
    if (member == name) {
      throw UnsupportedError(str("Accelerator::", name, " is not available: ", reason));
    }
  }
  throw UnsupportedError(str("Accelerator::", name, " is not available."));
}

}  // namespace detail::accelerator

void RefusedMembers::lomo_backward(const at::Tensor&, double) {
  detail::accelerator::refuse_member("lomo_backward");
}

}  // namespace accelerate
