// accelerate/lr_schedulers.h - schedulers that follow one formula.
//
//     auto schedule = CosineAnnealingLR(optimizer, {.t_max = 100});
//
// Options have Python's names, order and defaults. `last_epoch` is that of
// `LRScheduler::initialize`.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/lr_scheduler.h"

namespace accelerate {

struct StepLROptions {
  /// Must be set.
  std::int64_t step_size = 0;
  double gamma = 0.1;
  std::int64_t last_epoch = -1;
};

/// Times `gamma` every `step_size` epochs.
class ACCELERATE_API StepLR : public LRScheduler {
 public:
  StepLR(torch::optim::Optimizer& optimizer, const StepLROptions& options);

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  [[nodiscard]] std::optional<std::vector<double>> get_closed_form_lr() const override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  std::int64_t step_size_;
  double gamma_;
};

struct MultiStepLROptions {
  /// In any order; one that comes twice counts twice.
  std::vector<std::int64_t> milestones = {};
  double gamma = 0.1;
  std::int64_t last_epoch = -1;
};

/// Times `gamma` at each milestone.
class ACCELERATE_API MultiStepLR : public LRScheduler {
 public:
  MultiStepLR(torch::optim::Optimizer& optimizer, const MultiStepLROptions& options);

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  [[nodiscard]] std::optional<std::vector<double>> get_closed_form_lr() const override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  std::map<std::int64_t, std::int64_t> milestones_;  // epoch: how often
  double gamma_;
};

struct ConstantLROptions {
  /// From 0 to 1.
  double factor = 1.0 / 3;
  std::int64_t total_iters = 5;
  std::int64_t last_epoch = -1;
};

/// Times `factor` until epoch `total_iters`.
class ACCELERATE_API ConstantLR : public LRScheduler {
 public:
  explicit ConstantLR(torch::optim::Optimizer& optimizer, const ConstantLROptions& options = {});

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  [[nodiscard]] std::optional<std::vector<double>> get_closed_form_lr() const override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  double factor_;
  std::int64_t total_iters_;
};

struct LinearLROptions {
  /// Above 0, up to 1.
  double start_factor = 1.0 / 3;
  /// From 0 to 1.
  double end_factor = 1.0;
  std::int64_t total_iters = 5;
  std::int64_t last_epoch = -1;
};

/// Times a factor that goes in a line from `start_factor` to `end_factor`.
class ACCELERATE_API LinearLR : public LRScheduler {
 public:
  explicit LinearLR(torch::optim::Optimizer& optimizer, const LinearLROptions& options = {});

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  [[nodiscard]] std::optional<std::vector<double>> get_closed_form_lr() const override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  double start_factor_;
  double end_factor_;
  std::int64_t total_iters_;
};

struct ExponentialLROptions {
  /// Must be set.
  std::optional<double> gamma = std::nullopt;
  std::int64_t last_epoch = -1;
};

/// Times `gamma` every epoch.
class ACCELERATE_API ExponentialLR : public LRScheduler {
 public:
  ExponentialLR(torch::optim::Optimizer& optimizer, const ExponentialLROptions& options);

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  [[nodiscard]] std::optional<std::vector<double>> get_closed_form_lr() const override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  double gamma_;
};

struct PolynomialLROptions {
  std::int64_t total_iters = 5;
  double power = 1.0;
  std::int64_t last_epoch = -1;
};

/// Down to 0 in `total_iters` epochs, as (1 - epoch / total_iters) ** power.
class ACCELERATE_API PolynomialLR : public LRScheduler {
 public:
  explicit PolynomialLR(torch::optim::Optimizer& optimizer,
                        const PolynomialLROptions& options = {});

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  [[nodiscard]] std::optional<std::vector<double>> get_closed_form_lr() const override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  std::int64_t total_iters_;
  double power_;
};

struct CosineAnnealingLROptions {
  /// Must be set: the epochs from the highest to the lowest learning rate.
  std::int64_t t_max = 0;
  double eta_min = 0.0;
  std::int64_t last_epoch = -1;
};

/// A cosine between the initial learning rate and `eta_min`.
class ACCELERATE_API CosineAnnealingLR : public LRScheduler {
 public:
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, const CosineAnnealingLROptions& options);

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  [[nodiscard]] std::optional<std::vector<double>> get_closed_form_lr() const override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  std::int64_t t_max_;
  double eta_min_;
};

}  // namespace accelerate
