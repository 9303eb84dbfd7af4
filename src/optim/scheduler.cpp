#include "accelerate/scheduler.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numbers>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "accelerate/state/gradient_state.h"
#include "core/log.h"
#include "core/text.h"
#include "optim/group_schedule.h"
#include "optim/scheduler_core.h"
#include "optim/scheduler_state.h"

namespace accelerate {

using detail::str;

namespace detail::optim {

std::shared_ptr<GroupSchedule> schedule_of(torch::optim::OptimizerParamGroup& group) {
  auto& options = group.options();
  if (auto* const own = dynamic_cast<ParamGroupOptions*>(&options)) {
    if (!own->_schedule()) own->_schedule() = std::make_shared<GroupSchedule>();
    return own->_schedule();
  }
  using Known =
      std::unordered_map<const torch::optim::OptimizerOptions*, std::weak_ptr<GroupSchedule>>;
  static std::mutex mutex;
  static auto& known = *new Known;  // schedulers may outlive every static object
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = known[&options];
  auto schedule = entry.lock();
  if (!schedule) entry = schedule = std::make_shared<GroupSchedule>();
  return schedule;
}

double group_lr(const torch::optim::OptimizerParamGroup& group) {
  try {
    return group.options().get_lr();
  } catch (const c10::Error& error) {
    throw UnsupportedError(str("The optimizer's options do not give their learning rate, which a ",
                               "scheduler needs; override get_lr and set_lr in them. ",
                               error.what_without_backtrace()));
  }
}

void refuse_group_count(std::size_t scheduled, std::size_t groups) {
  throw StateError(str("The scheduler has learning rates for ", scheduled,
                       " parameter groups, but its optimizer has ", groups,
                       ". Build a new scheduler after adding a group."));
}

}  // namespace detail::optim

std::vector<double> PerGroup::expand(std::string_view name, std::size_t groups) const {
  if (!is_set())
    throw ArgumentError(str(name, " is not set; give a number, or one for each group."));
  if (!is_list_) return std::vector<double>(groups, values_.front());
  if (values_.size() != groups) {
    throw ArgumentError(str(name, " must have the same length as optimizer.param_groups. ", name,
                            " has ", values_.size(), " values, param_groups has ", groups, "."));
  }
  return values_;
}

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {
  for (auto& group : optimizer.param_groups())
    schedules_.push_back(detail::optim::schedule_of(group));
}
LRScheduler::LRScheduler(LRScheduler&&) noexcept = default;
LRScheduler& LRScheduler::operator=(LRScheduler&&) noexcept = default;
LRScheduler::~LRScheduler() = default;

void LRScheduler::initialize(std::int64_t last_epoch) {
  if (last_epoch < -1) {
    throw ArgumentError(
        str("last_epoch is ", last_epoch, "; give -1 to start from the beginning."));
  }
  base_lrs_.clear();
  const auto lrs = group_lrs();
  for (std::size_t i = 0; i < lrs.size(); ++i) {
    auto& initial_lr = schedule(i).initial_lr;
    if (!initial_lr && last_epoch != -1) {
      throw ArgumentError(
          str("param 'initial_lr' is not specified in param_groups[", i,
              "] when resuming scheduler with last_epoch = ", last_epoch,
              ": no scheduler of this optimizer has set it. Build the scheduler with ",
              "last_epoch = -1 and call load_state_dict."));
    }
    if (!initial_lr) initial_lr = lrs[i];
    base_lrs_.push_back(*initial_lr);
  }
  last_epoch_ = last_epoch;
  initial_step();
}

void LRScheduler::initial_step() {
  step_count_ = 0;
  is_initial_ = true;
  try {
    step();
  } catch (...) {
    is_initial_ = false;
    throw;
  }
  is_initial_ = false;
}

namespace {

/// A scheduler that is not prepared knows nothing of accumulation.
void check_accumulation() {
  if (detail::optim::PreparedStep::runs() || !GradientState::initialized()) return;
  const GradientState state;
  if (state.sync_gradients()) return;
  detail::warn_once(
      str("step: a scheduler that is not prepared takes a step with a batch whose gradients are "
          "only accumulated (gradient_accumulation_steps is ",
          state.num_steps(),
          "): the learning rate moves, but the optimizer does not. Prepare the scheduler, or guard "
          "its step: if (accelerator.sync_gradients()) ..."));
}

}  // namespace

void LRScheduler::step() {
  if (!is_initial_) check_accumulation();
  ++step_count_;
  try {
    update_lr();
  } catch (...) {
    --step_count_;
    throw;
  }
}

void LRScheduler::update_lr(std::optional<std::int64_t> epoch) {
  const auto before = last_epoch_;
  last_epoch_ = epoch.value_or(last_epoch_ + 1);
  try {
    std::optional<std::vector<double>> lrs;
    if (epoch) lrs = get_closed_form_lr();
    set_group_lrs(lrs ? *lrs : get_lr());
  } catch (...) {
    last_epoch_ = before;
    throw;
  }
  last_lr_ = group_lrs();
}

std::optional<std::vector<double>> LRScheduler::get_closed_form_lr() const { return std::nullopt; }

std::vector<double> LRScheduler::group_lrs() const {
  std::vector<double> lrs;
  for (const auto& group : optimizer_->param_groups())
    lrs.push_back(detail::optim::group_lr(group));
  return lrs;
}

void LRScheduler::set_group_lrs(const std::vector<double>& lrs) {
  if (lrs.size() != group_count()) detail::optim::refuse_group_count(lrs.size(), group_count());
  for (std::size_t i = 0; i < lrs.size(); ++i) {
    optimizer_->param_groups()[i].options().set_lr(lrs[i]);
  }
}

detail::optim::GroupSchedule& LRScheduler::schedule(std::size_t group) {
  while (schedules_.size() <= group) {  // groups that were added later
    schedules_.push_back(detail::optim::schedule_of(optimizer_->param_groups()[schedules_.size()]));
  }
  return *schedules_[group];
}

void LRScheduler::rebind(torch::optim::Optimizer& optimizer) {
  auto& groups = optimizer.param_groups();
  if (groups.size() < schedules_.size()) {
    throw ArgumentError(str("A scheduler of ", schedules_.size(),
                            " parameter groups cannot go on with an optimizer of ", groups.size(),
                            "; build a new one."));
  }
  for (std::size_t i = 0; i < schedules_.size(); ++i) {
    auto schedule =
        detail::optim::schedule_of(groups[i]);  // the same one if the optimizer was moved
    *schedule = *schedules_[i];
    schedules_[i] = std::move(schedule);
  }
  optimizer_ = &optimizer;
}

Value LRScheduler::state_dict() const {
  Value::Dict state;
  write_state(state);
  return state;
}

void LRScheduler::load_state_dict(const Value& state) {
  if (!state.is_dict()) {
    throw ArgumentError(str("The state of a scheduler is a dict, but this is a ", state.kind_name(),
                            ". Pass what state_dict() returned."));
  }
  const auto before = state_dict();
  try {
    read_state(state.as_dict());
  } catch (...) {
    read_state(before.as_dict());
    throw;
  }
}

void LRScheduler::write_state(Value::Dict& state) const {
  state.set("base_lrs", base_lrs_);
  state.set("last_epoch", last_epoch_);
  state.set("_step_count", step_count_);
  // Python sets these two during a step, and its schedulers expect them in the state.
  state.set("_is_initial", is_initial_);
  state.set("_get_lr_called_within_step", false);
  state.set("_last_lr", last_lr_);
}

void LRScheduler::read_state(const Value::Dict& state) {
  if (!state.contains("last_epoch")) {
    throw ArgumentError(
        "The state has no 'last_epoch', so it is not the state of such a scheduler.");
  }
  using Rates = std::pair<std::vector<double>, std::vector<double>>;
  Rates rates(base_lrs_, last_lr_);
  detail::optim::read_fields(
      state, rates,
      std::tuple{field("base_lrs", &Rates::first), field("_last_lr", &Rates::second)});
  if (rates.first.size() != base_lrs_.size() || rates.second.size() != last_lr_.size()) {
    throw ArgumentError(str("The state has learning rates for ", rates.second.size(),
                            " parameter groups, but the optimizer has ", group_count(), "."));
  }
  std::tie(base_lrs_, last_lr_) = std::move(rates);
  detail::optim::read_fields(state, *this,
                             std::tuple{field("last_epoch", &LRScheduler::last_epoch_),
                                        field("_step_count", &LRScheduler::step_count_)});
}

namespace {

/// A factor that rises from 0 to 1 in `num_warmup_steps` and then is `after(step, warmup)`.
template <class F>
LambdaLR with_warmup(torch::optim::Optimizer& optimizer, std::int64_t num_warmup_steps,
                     std::int64_t last_epoch, F after) {
  const auto warmup = static_cast<double>(num_warmup_steps);
  const auto factor = [warmup, after](std::int64_t epoch) {
    const auto step = static_cast<double>(epoch);
    return step < warmup ? step / std::max(1.0, warmup) : after(step, warmup);
  };
  return {optimizer, factor, last_epoch};
}

}  // namespace

LambdaLR get_constant_schedule(torch::optim::Optimizer& optimizer, std::int64_t last_epoch) {
  return {optimizer, [](std::int64_t) { return 1.0; }, last_epoch};
}

LambdaLR get_constant_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                           std::int64_t num_warmup_steps, std::int64_t last_epoch) {
  return with_warmup(optimizer, num_warmup_steps, last_epoch,
                     [](double /*step*/, double /*warmup*/) { return 1.0; });
}

LambdaLR get_linear_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                         std::int64_t num_warmup_steps,
                                         std::int64_t num_training_steps, std::int64_t last_epoch) {
  const auto end = static_cast<double>(num_training_steps);
  return with_warmup(optimizer, num_warmup_steps, last_epoch, [end](double step, double warmup) {
    return std::max(0.0, (end - step) / std::max(1.0, end - warmup));
  });
}

LambdaLR get_cosine_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                         std::int64_t num_warmup_steps,
                                         std::int64_t num_training_steps, double num_cycles,
                                         std::int64_t last_epoch) {
  const auto end = static_cast<double>(num_training_steps);
  const auto cosine = [end, num_cycles](double step, double warmup) {
    const auto progress = (step - warmup) / std::max(1.0, end - warmup);
    return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * num_cycles * 2.0 * progress)));
  };
  return with_warmup(optimizer, num_warmup_steps, last_epoch, cosine);
}

}  // namespace accelerate
