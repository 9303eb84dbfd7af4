// accelerate/optim/options.h - the options of the optimizers in accelerate/optim.h.
//
// Part of accelerate/optim.h. Fields have Python's names, order and defaults. The fastest kernels
// are always used, so there is no `foreach` or `fused`; differentiable steps are not supported.
//
// `capturable`: the learning rate and the step count live on the device of the parameters, so that
// a captured graph reads their current values. It has no effect on parameters on the CPU.
#pragma once

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "accelerate/value/fields.h"

// The classes made from these structs are exported; with GCC that needs visible template arguments.
#pragma GCC visibility push(default)

namespace accelerate {

struct AdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  bool capturable = false;
  bool decoupled_weight_decay = false;
};

struct AdamWOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
  bool capturable = false;
};

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  bool capturable = false;  // not in Python
};

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;
  bool capturable = false;  // not in Python
};

struct RMSpropOptions {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool capturable = false;
  bool maximize = false;
};

struct NAdamOptions {
  double lr = 2e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum_decay = 4e-3;
  bool decoupled_weight_decay = false;
  bool maximize = false;
  bool capturable = false;
};

struct RAdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled_weight_decay = false;
  bool maximize = false;
  bool capturable = false;
};

struct AdamaxOptions {
  double lr = 2e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool maximize = false;
  bool capturable = false;
};

/// "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2. PyTorch has no Lion.
struct LionOptions {
  double lr = 1e-4;
  std::pair<double, double> betas{0.9, 0.99};
  double weight_decay = 0;
  bool maximize = false;
  bool capturable = false;
};

struct AdafactorOptions {
  double lr = 1e-2;
  double beta2_decay = -0.8;
  /// If the first is not set, it is the machine epsilon of the parameters' type.
  std::pair<std::optional<double>, double> eps{std::nullopt, 1e-3};
  double d = 1;
  double weight_decay = 0;
  bool maximize = false;
  bool capturable = false;  // not in Python
};

// The fields in Python's order: `to_value` and `from_value` convert these structs.
ACCELERATE_VALUE_FIELDS(AdamOptions, lr, betas, eps, weight_decay, amsgrad, maximize, capturable,
                        decoupled_weight_decay);
ACCELERATE_VALUE_FIELDS(AdamWOptions, lr, betas, eps, weight_decay, amsgrad, maximize, capturable);
ACCELERATE_VALUE_FIELDS(SGDOptions, lr, momentum, dampening, weight_decay, nesterov, maximize,
                        capturable);
ACCELERATE_VALUE_FIELDS(AdagradOptions, lr, lr_decay, weight_decay, initial_accumulator_value, eps,
                        maximize, capturable);
ACCELERATE_VALUE_FIELDS(RMSpropOptions, lr, alpha, eps, weight_decay, momentum, centered,
                        capturable, maximize);
ACCELERATE_VALUE_FIELDS(NAdamOptions, lr, betas, eps, weight_decay, momentum_decay,
                        decoupled_weight_decay, maximize, capturable);
ACCELERATE_VALUE_FIELDS(RAdamOptions, lr, betas, eps, weight_decay, decoupled_weight_decay,
                        maximize, capturable);
ACCELERATE_VALUE_FIELDS(AdamaxOptions, lr, betas, eps, weight_decay, maximize, capturable);
ACCELERATE_VALUE_FIELDS(LionOptions, lr, betas, weight_decay, maximize, capturable);
ACCELERATE_VALUE_FIELDS(AdafactorOptions, lr, beta2_decay, eps, d, weight_decay, maximize,
                        capturable);

}  // namespace accelerate

#pragma GCC visibility pop
