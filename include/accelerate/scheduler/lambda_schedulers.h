// accelerate/scheduler/lambda_schedulers.h - schedulers that call functions of the program.
//
//     auto halve = [](std::int64_t epoch) { return std::pow(0.5, epoch / 10); };
//     LambdaLR schedule(optimizer, halve);
//     LambdaLR one_for_each_group(optimizer, {.lr_lambda = {first, second}});
//
// Part of accelerate/scheduler.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/scheduler/lr_schedulers.h"

namespace accelerate {

/// Returns the factor of an epoch.
using LrLambda = std::function<double(std::int64_t epoch)>;

/// One function for all parameter groups, or a list with one for each.
class ACCELERATE_API LrLambdas {
 public:
  // NOLINTBEGIN(google-explicit-constructor): `.lr_lambda = f` and `.lr_lambda = {f, g}`
  LrLambdas() = default;
  template <class F>
    requires std::is_invocable_r_v<double, F&, std::int64_t>
  LrLambdas(F function) : functions_{LrLambda(std::move(function))} {}
  LrLambdas(std::initializer_list<LrLambda> list) : functions_(list), is_list_(true) {}
  LrLambdas(std::vector<LrLambda> list) : functions_(std::move(list)), is_list_(true) {}
  // NOLINTEND(google-explicit-constructor)

  /// One function for each of `groups`. Throws `ArgumentError` for a list of another length and for
  /// an empty function.
  [[nodiscard]] std::vector<LrLambda> expand(std::size_t groups) const;
  [[nodiscard]] const std::vector<LrLambda>& functions() const { return functions_; }

 private:
  std::vector<LrLambda> functions_;
  bool is_list_ = false;
};

// See accelerate/scheduler/lr_schedulers.h.
#pragma GCC visibility push(default)

struct LambdaLROptions {
  LrLambdas lr_lambda = {};
  std::int64_t last_epoch = -1;
};

struct MultiplicativeLROptions {
  LrLambdas lr_lambda = {};
  std::int64_t last_epoch = -1;
};

#pragma GCC visibility pop

/// Multiplies the initial learning rate by a function of the epoch. Functions are not in the state.
using LambdaLR = FormulaLR<LambdaLROptions>;
/// Multiplies the current learning rate by a function of the epoch. Functions are not in the state.
using MultiplicativeLR = FormulaLR<MultiplicativeLROptions>;

extern template class FormulaLR<LambdaLROptions>;
extern template class FormulaLR<MultiplicativeLROptions>;

}  // namespace accelerate
