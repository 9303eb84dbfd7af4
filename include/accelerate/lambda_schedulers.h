// accelerate/lambda_schedulers.h - schedulers that ask functions of the program.
//
//     LambdaLR halve_each_ten(optimizer, [](std::int64_t epoch) { return std::pow(0.5, epoch / 10);
//     }); LambdaLR one_for_each_group(optimizer, {.lr_lambda = {first, second}});
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/lr_scheduler.h"

namespace accelerate {

/// The factor of an epoch.
using LrLambda = std::function<double(std::int64_t epoch)>;

/// One function for all parameter groups, or a list with one for each.
class ACCELERATE_API LrLambdas {
 public:
  // NOLINTBEGIN(google-explicit-constructor): `.lr_lambda = f` and `.lr_lambda = {f, g}`
  LrLambdas() = default;
  template <class F>
  requires std::is_invocable_r_v<double, F&, std::int64_t> LrLambdas(F function)
      : functions_{LrLambda(std::move(function))} {}
  LrLambdas(std::initializer_list<LrLambda> list) : functions_(list), is_list_(true) {}
  LrLambdas(std::vector<LrLambda> list) : functions_(std::move(list)), is_list_(true) {}
  // NOLINTEND(google-explicit-constructor)

  /// One function for each of `groups`. Throws `ArgumentError` for a list of another length and for
  /// a function that is empty.
  [[nodiscard]] std::vector<LrLambda> expand(std::size_t groups) const;

 private:
  std::vector<LrLambda> functions_;
  bool is_list_ = false;
};

struct LambdaLROptions {
  LrLambdas lr_lambda = {};
  std::int64_t last_epoch = -1;
};

/// A scheduler that asks functions of the program. They are no part of its state.
class ACCELERATE_API LambdaSchedulerBase : public LRScheduler {
 protected:
  LambdaSchedulerBase(torch::optim::Optimizer& optimizer, const LrLambdas& lambdas);

  /// What the functions say of this epoch.
  [[nodiscard]] std::vector<double> factors() const;
  void write_state(Value::Dict& state) const override;

 private:
  std::vector<LrLambda> lr_lambdas_;
};

/// The initial learning rate times a function of the epoch.
class ACCELERATE_API LambdaLR : public LambdaSchedulerBase {
 public:
  LambdaLR(torch::optim::Optimizer& optimizer, const LambdaLROptions& options);
  template <std::convertible_to<LrLambdas> F>
  LambdaLR(torch::optim::Optimizer& optimizer, F lr_lambda, std::int64_t last_epoch = -1)
      : LambdaLR(optimizer, LambdaLROptions{std::move(lr_lambda), last_epoch}) {}

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
};

struct MultiplicativeLROptions {
  LrLambdas lr_lambda = {};
  std::int64_t last_epoch = -1;
};

/// The current learning rate times a function of the epoch.
class ACCELERATE_API MultiplicativeLR : public LambdaSchedulerBase {
 public:
  MultiplicativeLR(torch::optim::Optimizer& optimizer, const MultiplicativeLROptions& options);
  template <std::convertible_to<LrLambdas> F>
  MultiplicativeLR(torch::optim::Optimizer& optimizer, F lr_lambda, std::int64_t last_epoch = -1)
      : MultiplicativeLR(optimizer, MultiplicativeLROptions{std::move(lr_lambda), last_epoch}) {}

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
};

}  // namespace accelerate
