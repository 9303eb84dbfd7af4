#include "accelerate/scheduler/scheduler_chains.h"

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/scheduler/reduce_lr_on_plateau.h"
#include "core/text.h"
#include "optim/group_schedule.h"
#include "optim/scheduler_state.h"

namespace accelerate {
namespace {

using detail::str;

torch::optim::Optimizer& optimizer_of_first(const SchedulerList::Pointers& schedulers) {
  if (schedulers.empty() || !schedulers.front()) {
    throw ArgumentError(
        "ChainedScheduler expects at least one scheduler to be chained, but got no scheduler.");
  }
  return schedulers.front()->optimizer();
}

void require_schedulers(const SchedulerList::Pointers& schedulers,
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

/// The step count of a chain: it counts no steps itself. Python gives it the entries '_step_count'
/// and '_is_initial' when a SequentialLR begins with it.
constexpr std::int64_t kNeverBegun = -1;

}  // namespace

SchedulerChain::SchedulerChain(std::string_view name, torch::optim::Optimizer& optimizer,
                               SchedulerList::Pointers schedulers)
    : LRScheduler(optimizer), name_(name), schedulers_(std::move(schedulers)) {
  require_schedulers(schedulers_, optimizer, name);
  step_count_ = kNeverBegun;
}

void SchedulerChain::undo_initial_step() {
  for (const auto& scheduler : schedulers_) scheduler->undo_initial_step();
}

void SchedulerChain::rebind(torch::optim::Optimizer& optimizer) {
  LRScheduler::rebind(optimizer);
  for (const auto& scheduler : schedulers_) scheduler->rebind(optimizer);
}

std::vector<double> SchedulerChain::get_lr() {
  throw UnsupportedError(str("A ", name_,
                             " cannot begin at a milestone of a SequentialLR, also not ",
                             "in PyTorch. Put it first, or list its schedulers themselves."));
}

void SchedulerChain::write_state(Value::Dict& state) const {
  if (step_count_ != kNeverBegun) {
    state.set("_step_count", step_count_);
    state.set("_is_initial", false);
  }
  Value::List states;
  for (const auto& scheduler : schedulers_) states.push_back(scheduler->state_dict());
  state.set("_schedulers", std::move(states));
}

void SchedulerChain::read_state(const Value::Dict& state) {
  step_count_ = state.get("_step_count", kNeverBegun).as_int();
  const auto states = state.at("_schedulers").items();
  if (states.size() != schedulers_.size()) {
    throw ArgumentError(str("The state has ", states.size(), " schedulers, but there are ",
                            schedulers_.size(), "."));
  }
  for (std::size_t i = 0; i < states.size(); ++i) schedulers_[i]->load_state_dict(states[i]);
}

SequentialLR::SequentialLR(torch::optim::Optimizer& optimizer, SequentialLROptions options)
    : SchedulerChain("SequentialLR", optimizer, std::move(options.schedulers).schedulers()),
      milestones_(std::move(options.milestones)) {
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

  // Building the schedulers changed the learning rates; only the first may do that.
  std::vector<double> initial_lrs;
  for (std::size_t i = 0; i < group_count(); ++i) {
    const auto& initial_lr = schedule(i).initial_lr;
    if (!initial_lr) {
      throw ArgumentError(str("Parameter group ", i, " was added after the schedulers of ",
                              "SequentialLR were built. Build them again."));
    }
    initial_lrs.push_back(*initial_lr);
  }
  set_group_lrs(initial_lrs);
  undo_initial_step();
  schedulers_.front()->initial_step();
  last_lr_ = schedulers_.front()->get_last_lr();
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

void SequentialLR::write_state(Value::Dict& state) const {
  state.set("_milestones", milestones_);
  state.set("last_epoch", last_epoch_);
  state.set("_last_lr", last_lr_);
  SchedulerChain::write_state(state);
}

void SequentialLR::read_state(const Value::Dict& state) {
  detail::optim::read_fields(state, *this,
                             std::tuple{field("_milestones", &SequentialLR::milestones_)});
  const auto expected = schedulers_.size() - 1;
  if (milestones_.size() != expected) {
    throw ArgumentError(str("The state has ", milestones_.size(),
                            " milestones, but SequentialLR has ", expected, "."));
  }
  LRScheduler::read_state(state);
  SchedulerChain::read_state(state);
}

ChainedScheduler::ChainedScheduler(SchedulerList schedulers)
    : ChainedScheduler(schedulers, optimizer_of_first(schedulers.schedulers())) {}

ChainedScheduler::ChainedScheduler(SchedulerList schedulers, torch::optim::Optimizer& optimizer)
    : SchedulerChain("ChainedScheduler", optimizer, std::move(schedulers).schedulers()) {
  last_lr_ = group_lrs();
}

void ChainedScheduler::step() {
  for (const auto& scheduler : schedulers()) scheduler->step();
  last_lr_ = group_lrs();
}

std::int64_t ChainedScheduler::last_epoch() const { return schedulers().front()->last_epoch(); }
std::int64_t ChainedScheduler::step_count() const { return schedulers().front()->step_count(); }

void ChainedScheduler::write_state(Value::Dict& state) const {
  state.set("_last_lr", last_lr_);
  SchedulerChain::write_state(state);
}

void ChainedScheduler::read_state(const Value::Dict& state) {
  detail::optim::read_fields(state, *this,
                             std::tuple{field("_last_lr", &ChainedScheduler::last_lr_)});
  SchedulerChain::read_state(state);
}

}  // namespace accelerate
