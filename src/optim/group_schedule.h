// src/optim/group_schedule.h - the numbers that schedulers keep with a parameter group.
//
// Python keeps them in the group itself ('initial_lr', 'max_lr'), where all schedulers of an
// optimizer share them. Our own options have a member for them (`ParamGroupOptions::_schedule`),
// which lives as long as the group.
//
// A group of torch::optim has no member that could hold them: `OptimizerParamGroup` has only its
// parameters and its options, options cannot be replaced while the program may hold references to
// them, and nothing reports the end of an optimizer. For these groups the key is the address of the
// options object, which does not change when an optimizer is moved. The schedulers own the numbers,
// and an optimizer must outlive its schedulers or be replaced by `rebind`, so an address is in use
// by one group as long as its numbers exist.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "accelerate/value/fields.h"

namespace accelerate::detail::optim {

struct GroupSchedule {
  std::optional<double> initial_lr;
  std::optional<double> max_lr;
  std::optional<double> min_lr;
  std::optional<double> max_momentum;
  std::optional<double> base_momentum;
};
inline constexpr auto kGroupScheduleFields =
    ACCELERATE_FIELDS(GroupSchedule, initial_lr, max_lr, min_lr, max_momentum, base_momentum);

/// The numbers of a group; new if no scheduler has kept any.
[[nodiscard]] std::shared_ptr<GroupSchedule> schedule_of(torch::optim::OptimizerParamGroup& group);

/// The learning rate of a group. Throws `UnsupportedError` for options without `get_lr`.
[[nodiscard]] double group_lr(const torch::optim::OptimizerParamGroup& group);

/// Throws `StateError`: a group was added after the scheduler was built.
[[noreturn]] void refuse_group_count(std::size_t scheduled, std::size_t groups);

}  // namespace accelerate::detail::optim
