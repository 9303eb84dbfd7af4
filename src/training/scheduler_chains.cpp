#include "accelerate/scheduler_chains.h"

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/reduce_lr_on_plateau.h"
#include "core/text.h"
#include "training/group_memory.h"
#include "training/state_fields.h"

namespace accelerate {
namespace {

using detail::str;
using detail::take_field;

torch::optim::Optimizer& optimizer_of_first(const SchedulerList::Pointers& schedulers) {
  if (schedulers.empty() || !schedulers.front()) {
    throw ArgumentError(
        "ChainedScheduler expects at least one scheduler to be chained, but got no scheduler.");
  }
  return schedulers.front()->optimizer();
}

void require_held(const SchedulerList::Pointers& schedulers,
                  const torch::optim::Optimizer& optimizer, std::string_view holder) {
  if (schedulers.empty()) {
    throw ArgumentError(str(holder, " expects at least one scheduler, but got no scheduler."));
  }
  for (std::size_t i = 0; i < schedulers.size(); ++i) {
    const auto* scheduler = schedulers[i].get();
    if (!scheduler)
      throw ArgumentError(str("The scheduler at index ", i, " of ", holder, " is null."));
    if (dynamic_cast<const ReduceLROnPlateau*>(scheduler)) {
      throw ArgumentError(str(holder, " does not support `ReduceLROnPlateau` scheduler as it ",
                              "requires a metric at each step, but got one at index ", i,
                              " in the given schedulers sequence."));
    }
    if (&scheduler->optimizer() != &optimizer) {
      throw ArgumentError(str(holder,
                              " expects all schedulers to belong to the same optimizer, but ",
                              "the scheduler at index ", i, " has another one."));
    }
  }
}

Value states_of(const SchedulerList::Pointers& schedulers) {
  Value::List states;
  for (const auto& scheduler : schedulers) states.push_back(scheduler->state_dict());
  return Value(std::move(states));
}

void load_states(const SchedulerList::Pointers& schedulers, const Value::Dict& state) {
  const auto states = state.at("_schedulers").items();
  if (states.size() != schedulers.size()) {
    throw ArgumentError(str("The state has ", states.size(), " schedulers, but there are ",
                            schedulers.size(), "."));
  }
  for (std::size_t i = 0; i < states.size(); ++i) schedulers[i]->load_state_dict(states[i]);
}

/// Chains count no steps. Python gives them these keys when a SequentialLR begins with them.
constexpr std::int64_t kNeverBegun = -1;

void write_begun(Value::Dict& state, std::int64_t step_count) {
  if (step_count == kNeverBegun) return;
  state.set("_step_count", step_count);
  state.set("_is_initial", false);
}

std::int64_t read_begun(const Value::Dict& state) {
  return state.get("_step_count", kNeverBegun).as_int();
}

[[noreturn]] void refuse_milestone(std::string_view holder) {
  throw UnsupportedError(str("A ", holder,
                             " cannot begin at a milestone of a SequentialLR, also not ",
                             "in PyTorch. Let it come first, or list its schedulers themselves."));
}

}  // namespace

SequentialLR::SequentialLR(torch::optim::Optimizer& optimizer, SequentialLROptions options)
    : LRScheduler(optimizer),
      schedulers_(std::move(options.schedulers).schedulers()),
      milestones_(std::move(options.milestones)) {
  require_held(schedulers_, optimizer, "SequentialLR");
  if (milestones_.size() != schedulers_.size() - 1) {
    throw ArgumentError(
        str("Sequential Schedulers expects number of schedulers provided to be one ",
            "more than the number of milestone points, but got number of schedulers ",
            schedulers_.size(), " and the number of milestones to be equal to ", milestones_.size(),
            "."));
  }
  if (!std::is_sorted(milestones_.begin(), milestones_.end())) {
    throw ArgumentError(
        str("The milestones of SequentialLR must rise, but are ", detail::join(milestones_), "."));
  }
  last_epoch_ = options.last_epoch + 1;
  step_count_ = kNeverBegun;

  // Building the schedulers changed the learning rates; only the first may do that.
  std::vector<double> initial_lrs;
  for (std::size_t i = 0; i < group_count(); ++i) {
    const auto& initial_lr = memory(i).initial_lr;
    if (!initial_lr) {
      throw ArgumentError(str("The learning rate of parameter group ", i, " was changed after the ",
                              "schedulers of SequentialLR were built. Build them anew."));
    }
    initial_lrs.push_back(*initial_lr);
  }
  set_group_lrs(initial_lrs);
  SequentialLR::undo_initial_step();
  schedulers_.front()->initial_step();
  last_lr_ = schedulers_.front()->get_last_lr();
}

void SequentialLR::undo_initial_step() {
  for (const auto& scheduler : schedulers_) scheduler->undo_initial_step();
}

void SequentialLR::step() {
  const auto epoch = last_epoch_ + 1;
  const auto passed = std::upper_bound(milestones_.begin(), milestones_.end(), epoch);
  auto& scheduler = *schedulers_[static_cast<std::size_t>(passed - milestones_.begin())];
  if (passed != milestones_.begin() && *(passed - 1) == epoch) {
    scheduler.update_lr(0);
  } else {
    scheduler.step();
  }
  last_epoch_ = epoch;
  last_lr_ = scheduler.get_last_lr();
}

std::vector<double> SequentialLR::get_lr() { refuse_milestone("SequentialLR"); }

void SequentialLR::rebind(torch::optim::Optimizer& optimizer) {
  LRScheduler::rebind(optimizer);
  for (const auto& scheduler : schedulers_) scheduler->rebind(optimizer);
}

void SequentialLR::write_state(Value::Dict& state) const {
  state.set("_milestones", milestones_);
  state.set("last_epoch", last_epoch_);
  state.set("_last_lr", last_lr_);
  write_begun(state, step_count_);
  state.set("_schedulers", states_of(schedulers_));
}

void SequentialLR::read_state(const Value::Dict& state) {
  auto milestones = milestones_;
  take_field(state, "_milestones", milestones);
  if (milestones.size() != milestones_.size()) {
    throw ArgumentError(str("The state has ", milestones.size(),
                            " milestones, but SequentialLR has ", milestones_.size(), "."));
  }
  milestones_ = std::move(milestones);
  LRScheduler::read_state(state);
  step_count_ = read_begun(state);
  load_states(schedulers_, state);
}

ChainedScheduler::ChainedScheduler(SchedulerList schedulers)
    : ChainedScheduler(schedulers, optimizer_of_first(schedulers.schedulers())) {}

ChainedScheduler::ChainedScheduler(SchedulerList schedulers, torch::optim::Optimizer& optimizer)
    : LRScheduler(optimizer), schedulers_(std::move(schedulers).schedulers()) {
  require_held(schedulers_, optimizer, "ChainedScheduler");
  step_count_ = kNeverBegun;
  last_lr_ = group_lrs();
}

void ChainedScheduler::step() {
  for (const auto& scheduler : schedulers_) scheduler->step();
  last_lr_ = group_lrs();
}

std::int64_t ChainedScheduler::last_epoch() const { return schedulers_.front()->last_epoch(); }
std::int64_t ChainedScheduler::step_count() const { return schedulers_.front()->step_count(); }

std::vector<double> ChainedScheduler::get_lr() { refuse_milestone("ChainedScheduler"); }

void ChainedScheduler::undo_initial_step() {
  for (const auto& scheduler : schedulers_) scheduler->undo_initial_step();
}

void ChainedScheduler::rebind(torch::optim::Optimizer& optimizer) {
  LRScheduler::rebind(optimizer);
  for (const auto& scheduler : schedulers_) scheduler->rebind(optimizer);
}

void ChainedScheduler::write_state(Value::Dict& state) const {
  state.set("_last_lr", last_lr_);
  write_begun(state, step_count_);
  state.set("_schedulers", states_of(schedulers_));
}

void ChainedScheduler::read_state(const Value::Dict& state) {
  take_field(state, "_last_lr", last_lr_);
  step_count_ = read_begun(state);
  load_states(schedulers_, state);
}

}  // namespace accelerate
