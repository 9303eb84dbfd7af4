#include "accelerate/scheduler.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numbers>
#include <unordered_map>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "training/group_memory.h"
#include "training/state_fields.h"

namespace accelerate {

using detail::str;
using detail::take_field;

namespace detail {
namespace {

struct Memories {
  std::mutex mutex;
  std::unordered_map<const torch::optim::OptimizerOptions*, std::weak_ptr<GroupMemory>> by_options;
};

Memories& memories() {
  static auto* all = new Memories;  // schedulers may outlive every static object
  return *all;
}

}  // namespace

GroupMemory::~GroupMemory() {
  const std::lock_guard lock(memories().mutex);
  const auto found = memories().by_options.find(key);
  // Another memory may have taken the place.
  if (found != memories().by_options.end() && found->second.expired()) {
    memories().by_options.erase(found);
  }
}

std::shared_ptr<GroupMemory> memory_of(const torch::optim::OptimizerParamGroup& group) {
  const auto* options = &group.options();
  const auto lr = group_lr(group);
  std::shared_ptr<GroupMemory> known;  // let go after the lock, which its end would take too
  const std::lock_guard lock(memories().mutex);
  auto& slot = memories().by_options[options];
  known = slot.lock();
  if (known && known->lr_set == lr) return known;
  auto memory = std::make_shared<GroupMemory>(options);
  slot = memory;
  return memory;
}

std::shared_ptr<GroupMemory> memory_moved(const std::shared_ptr<GroupMemory>& memory,
                                          const torch::optim::OptimizerParamGroup& group) {
  if (memory->key == &group.options()) return memory;
  auto moved = memory_of(group);
  moved->initial_lr = memory->initial_lr;
  moved->max_lr = memory->max_lr;
  moved->min_lr = memory->min_lr;
  moved->max_momentum = memory->max_momentum;
  moved->base_momentum = memory->base_momentum;
  moved->lr_set = group_lr(group);
  return moved;
}

double group_lr(const torch::optim::OptimizerParamGroup& group) {
  try {
    return group.options().get_lr();
  } catch (const c10::Error& error) {
    throw UnsupportedError(str("The optimizer's options do not tell their learning rate, which a ",
                               "scheduler needs; override get_lr and set_lr in them. ",
                               error.what_without_backtrace()));
  }
}

}  // namespace detail

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
  for (const auto& group : optimizer.param_groups()) memory_.push_back(detail::memory_of(group));
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
    auto& initial_lr = memory(i).initial_lr;
    if (!initial_lr && last_epoch != -1) {
      throw ArgumentError(
          str("param 'initial_lr' is not specified in param_groups[", i,
              "] when resuming scheduler with last_epoch = ", last_epoch,
              ": no scheduler of this optimizer noted it. Build the scheduler with ",
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

void LRScheduler::step() {
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
  for (const auto& group : optimizer_->param_groups()) lrs.push_back(detail::group_lr(group));
  return lrs;
}

void LRScheduler::set_group_lrs(const std::vector<double>& lrs) {
  if (lrs.size() != group_count()) {
    throw StateError(str("The scheduler has learning rates for ", lrs.size(),
                         " parameter groups, but its optimizer has ", group_count(),
                         ". Build a new scheduler after adding a group."));
  }
  for (std::size_t i = 0; i < lrs.size(); ++i) {
    optimizer_->param_groups()[i].options().set_lr(lrs[i]);
    memory(i).lr_set = lrs[i];
  }
}

detail::GroupMemory& LRScheduler::memory(std::size_t group) {
  while (memory_.size() <= group) {  // groups that were added later
    memory_.push_back(detail::memory_of(optimizer_->param_groups()[memory_.size()]));
  }
  return *memory_[group];
}

void LRScheduler::rebind(torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  if (groups.size() < memory_.size()) {
    throw ArgumentError(str("A scheduler of ", memory_.size(),
                            " parameter groups cannot go on with ", "an optimizer of ",
                            groups.size(), "; build a new one."));
  }
  std::vector<std::shared_ptr<detail::GroupMemory>> memory;
  for (std::size_t i = 0; i < memory_.size(); ++i) {
    memory.push_back(detail::memory_moved(memory_[i], groups[i]));
  }
  memory_ = std::move(memory);
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
  // Python has these two while a step is under way; its schedulers expect to find them.
  state.set("_is_initial", is_initial_);
  state.set("_get_lr_called_within_step", false);
  state.set("_last_lr", last_lr_);
}

void LRScheduler::read_state(const Value::Dict& state) {
  if (!state.contains("last_epoch")) {
    throw ArgumentError(
        "The state has no 'last_epoch', so it is not that of a scheduler like this.");
  }
  auto base_lrs = base_lrs_;
  auto last_lr = last_lr_;
  take_field(state, "base_lrs", base_lrs);
  take_field(state, "_last_lr", last_lr);
  if (base_lrs.size() != base_lrs_.size() || last_lr.size() != last_lr_.size()) {
    throw ArgumentError(str("The state has learning rates for ", last_lr.size(),
                            " parameter groups, but the optimizer has ", group_count(), "."));
  }
  base_lrs_ = std::move(base_lrs);
  last_lr_ = std::move(last_lr);
  take_field(state, "last_epoch", last_epoch_);
  take_field(state, "_step_count", step_count_);
}

LambdaLR get_constant_schedule(torch::optim::Optimizer& optimizer, std::int64_t last_epoch) {
  return {optimizer, [](std::int64_t) { return 1.0; }, last_epoch};
}

LambdaLR get_constant_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                           std::int64_t num_warmup_steps, std::int64_t last_epoch) {
  const auto warmup = static_cast<double>(num_warmup_steps);
  const auto factor = [warmup](std::int64_t epoch) {
    const auto step = static_cast<double>(epoch);
    return step < warmup ? step / std::max(1.0, warmup) : 1.0;
  };
  return {optimizer, factor, last_epoch};
}

LambdaLR get_linear_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                         std::int64_t num_warmup_steps,
                                         std::int64_t num_training_steps, std::int64_t last_epoch) {
  const auto warmup = static_cast<double>(num_warmup_steps);
  const auto end = static_cast<double>(num_training_steps);
  const auto factor = [warmup, end](std::int64_t epoch) {
    const auto step = static_cast<double>(epoch);
    if (step < warmup) return step / std::max(1.0, warmup);
    return std::max(0.0, (end - step) / std::max(1.0, end - warmup));
  };
  return {optimizer, factor, last_epoch};
}

LambdaLR get_cosine_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                         std::int64_t num_warmup_steps,
                                         std::int64_t num_training_steps, double num_cycles,
                                         std::int64_t last_epoch) {
  const auto warmup = static_cast<double>(num_warmup_steps);
  const auto end = static_cast<double>(num_training_steps);
  const auto factor = [warmup, end, num_cycles](std::int64_t epoch) {
    const auto step = static_cast<double>(epoch);
    if (step < warmup) return step / std::max(1.0, warmup);
    const auto progress = (step - warmup) / std::max(1.0, end - warmup);
    return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * num_cycles * 2.0 * progress)));
  };
  return {optimizer, factor, last_epoch};
}

}  // namespace accelerate
