// accelerate/detail/accelerator/prepare.h - what `Accelerator::prepare` makes of each kind of
// object.
//
// Part of accelerate/accelerator.h. Templates find out what an object is, the rest does the work.
#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/detail/accelerator/prepare_arguments.h"
#include "accelerate/detail/core/refuse_empty.h"
#include "accelerate/logging/name_collectives.h"
#include "accelerate/state/stateful.h"

namespace accelerate::detail::inline core {
class AtCallSite;
}  // namespace accelerate::detail::inline core

namespace accelerate::detail::accelerator {

/// What an accelerator knows and has prepared.
struct AcceleratorCore;

/// While it lives, error reports show the line of the user for the collectives of this thread.
class ACCELERATE_API CalledFrom {
 public:
  explicit CalledFrom(const std::source_location& where);
  ~CalledFrom();
  CalledFrom(const CalledFrom&) = delete;
  CalledFrom& operator=(const CalledFrom&) = delete;

 private:
  std::unique_ptr<AtCallSite> here_;
};

/// What `prepare` does to objects of each kind, without templates.
class ACCELERATE_API Preparer {
 public:
  explicit Preparer(AcceleratorCore& core) : core_(core) {}

  /// Throws `StateError` if the state was reset, `ArgumentError` for another number of flags, and
  /// as `begin_deepspeed`.
  void begin(const PrepareObjects& given, const DevicePlacement* placement, std::size_t size) const;
  /// Makes what the configuration of the run has, but is not among the objects.
  void finish(const PrepareObjects& given) const;

  // Collective. Each registers what it makes.
  [[nodiscard]] std::shared_ptr<ModelCore> model(std::shared_ptr<torch::nn::Module> module,
                                                 std::optional<bool> placement,
                                                 bool evaluation_mode) const;
  [[nodiscard]] std::shared_ptr<optim::OptimizerCore> optimizer(
      std::shared_ptr<torch::optim::Optimizer> optimizer, const torch::optim::Optimizer* moved_from,
      std::optional<bool> placement) const;
  [[nodiscard]] std::shared_ptr<optim::SchedulerCore> scheduler(optim::SchedulerParts parts) const;
  [[nodiscard]] PrepareDataLoaderOptions loader_options(std::optional<bool> placement) const;

  // Register an object that is prepared already, unless it is known.
  void add(const std::shared_ptr<ModelCore>& model) const;
  void add(const std::shared_ptr<optim::OptimizerCore>& optimizer) const;
  void add(const std::shared_ptr<optim::SchedulerCore>& scheduler) const;
  void add(const std::shared_ptr<data::LoaderCore>& loader) const;

 private:
  AcceleratorCore& core_;
};

/// A module as an object with a state.
[[nodiscard]] ACCELERATE_API std::shared_ptr<Stateful> stateful_module(
    std::shared_ptr<torch::nn::Module> module);

/// Throws `ArgumentError` for an empty pointer that `register_for_checkpointing` was given.
[[noreturn]] ACCELERATE_API void refuse_empty_pointer();

/// True; a compile error says what is taken instead of another type.
template <class T>
consteval bool check_stateful() {
  static_assert(HasStateDict<T>,
                "accelerate: register_for_checkpointing takes objects with state_dict() and "
                "load_state_dict(const accelerate::Value&), and modules.");
  return true;
}

/// What `register_for_checkpointing` makes of an object.
template <class Arg>
std::shared_ptr<Stateful> stateful_of(Arg&& object) {
  using T = std::remove_cvref_t<Arg>;
  if constexpr (ModelHolder<T>) {
    return stateful_module(module_of(object));
  } else if constexpr (!std::same_as<typename Target<T>::type, T>) {
    static_assert(check_stateful<typename Target<T>::type>());
    if (!object) refuse_empty_pointer();
    return state::make_stateful(
        std::shared_ptr<typename Target<T>::type>(std::forward<Arg>(object)));
  } else {
    static_assert(check_stateful<std::remove_reference_t<Arg>>());
    static_assert(std::is_lvalue_reference_v<Arg>,
                  "accelerate: register_for_checkpointing refers to an object, which must outlive "
                  "the accelerator: give it by name, or as a std::shared_ptr.");
    return state::make_stateful(object);
  }
}

template <class Model>
auto prepare_model(const Preparer& preparer, const Model& model, std::optional<bool> placement,
                   bool evaluation_mode) {
  if constexpr (kIsPreparedModel<Model>) {
    if (!model) refuse_empty("model");
    preparer.add(model._core());
    return model;
  } else {
    auto core = preparer.model(module_of(model), placement, evaluation_mode);
    if constexpr (kIsDispatched<Model>) core->dispatched = model._core();
    return PreparedModel(holder_of(model), std::move(core));
  }
}

template <class Arg>
AcceleratedOptimizer prepare_optimizer(const Preparer& preparer, Arg&& optimizer,
                                       std::optional<bool> placement) {
  using T = std::remove_cvref_t<Arg>;
  if constexpr (std::same_as<T, AcceleratedOptimizer>) {
    if (!optimizer) refuse_empty("optimizer");
    preparer.add(optimizer._core());
    return optimizer;
  } else {
    static_assert(AnyOptimizer<T>, "accelerate: this is no torch::optim::Optimizer.");
    const torch::optim::Optimizer* moved_from = nullptr;
    if constexpr (std::same_as<typename Target<T>::type, T> && !std::is_lvalue_reference_v<Arg>) {
      moved_from = std::addressof(optimizer);
    }
    auto made = preparer.optimizer(taken<torch::optim::Optimizer>(std::forward<Arg>(optimizer)),
                                   moved_from, placement);
    using O = typename Target<T>::type;
    if constexpr (requires(O& own) {
                    own.train();
                    own.eval();
                  }) {
      set_modes(*made, [](torch::optim::Optimizer& own, bool training) {
        auto& it = dynamic_cast<O&>(own);
        training ? static_cast<void>(it.train()) : static_cast<void>(it.eval());
      });
    }
    return AcceleratedOptimizer(std::move(made));
  }
}

template <class Arg>
AcceleratedScheduler prepare_scheduler(const Preparer& preparer, Arg&& scheduler) {
  using T = std::remove_cvref_t<Arg>;
  if constexpr (std::same_as<T, AcceleratedScheduler>) {
    if (!scheduler) refuse_empty("scheduler");
    preparer.add(scheduler._core());
    return scheduler;
  } else {
    static_assert(SchedulerArgument<T>,
                  "accelerate: this is no scheduler of accelerate/scheduler.h or torch::optim.");
    using S = typename Target<T>::type;
    return AcceleratedScheduler(
        preparer.scheduler(optim::scheduler_parts(taken<S>(std::forward<Arg>(scheduler)))));
  }
}

template <class Batch>
DataLoader<Batch> prepare_loader(const Preparer& preparer, const DataLoader<Batch>& loader,
                                 std::optional<bool> placement,
                                 SliceFunction<Batch> slice_fn_for_dispatch = {}) {
  auto prepared = accelerate::prepare_data_loader(loader, preparer.loader_options(placement),
                                                  std::move(slice_fn_for_dispatch));
  preparer.add(prepared._core());
  return prepared;
}

template <class Arg>
auto prepare_one(const Preparer& preparer, Arg&& object, std::optional<bool> placement) {
  using T = std::remove_cvref_t<Arg>;
  // In a tuple, which can hold a reference too.
  if constexpr (AnyModel<T>) {
    return std::tuple(prepare_model(preparer, object, placement, /*evaluation_mode=*/false));
  } else if constexpr (kIsDataLoader<T>) {
    return std::tuple(prepare_loader(preparer, object, placement));
  } else if constexpr (AnyOptimizer<T> || std::same_as<T, AcceleratedOptimizer>) {
    return std::tuple(prepare_optimizer(preparer, std::forward<Arg>(object), placement));
  } else if constexpr (IsScheduler<T>) {
    return std::tuple(prepare_scheduler(preparer, std::forward<Arg>(object)));
  } else {
    static_assert(!BareModel<T>,
                  "accelerate: prepare takes a model as a module holder (TORCH_MODULE) or as a "
                  "std::shared_ptr to the module, which it shares with the program. A module by "
                  "value, a pointer to it, a std::unique_ptr, torch::nn::AnyModule and "
                  "torch::jit::Module would come back as they are and train each process alone.");
    static_assert(!TorchLoader<T>,
                  "accelerate: a loader of torch::data cannot be shared between processes: each "
                  "would read all of the data. Make it with accelerate::make_data_loader, which "
                  "takes any dataset with size() and get(i).");
    return std::tuple<PassedOn<Arg>>(std::forward<Arg>(object));
  }
}

template <class... Ts>
auto prepare_all(const Preparer& preparer, const DevicePlacement* placement, Ts&&... objects) {
  static_assert(!(kMovesOptimizer<Ts...> && kHasLibTorchScheduler<Ts...>),
                "accelerate: LibTorch's schedulers keep a reference to their optimizer that cannot "
                "be changed, so the optimizer must not be moved: give it by name (lvalue), or use "
                "the scheduler of the same name in accelerate/scheduler.h.");
  const auto named = name_collectives("prepare");
  PrepareObjects given;
  (given.add(std::as_const(objects)), ...);
  preparer.begin(given, placement, sizeof...(Ts));
  std::tuple<std::optional<decltype(prepare_one(preparer, std::declval<Ts>(), true))>...> slots;

  const auto prepare_stage = [&]<PrepareStage stage, std::size_t... I>(
                                 std::integral_constant<PrepareStage, stage>,
                                 std::index_sequence<I...>) {
    const auto one = [&]<std::size_t J>(std::integral_constant<std::size_t, J>, auto& object) {
      using Arg = std::tuple_element_t<J, std::tuple<Ts&&...>>;
      if constexpr (stage_of<std::remove_cvref_t<Arg>>() == stage) {
        std::optional<bool> on_device;
        if (placement != nullptr) on_device = placement->flags()[J];
        std::get<J>(slots).emplace(prepare_one(preparer, static_cast<Arg>(object), on_device));
      }
    };
    (one(std::integral_constant<std::size_t, I>(), objects), ...);
  };
  const auto indices = std::index_sequence_for<Ts...>();
  using enum PrepareStage;
  prepare_stage(std::integral_constant<PrepareStage, kModels>(), indices);
  prepare_stage(std::integral_constant<PrepareStage, kOptimizers>(), indices);
  prepare_stage(std::integral_constant<PrepareStage, kSchedulers>(), indices);
  prepare_stage(std::integral_constant<PrepareStage, kLoaders>(), indices);
  preparer.finish(given);

  auto all = std::apply([](auto&... slot) { return std::tuple_cat(std::move(*slot)...); }, slots);
  if constexpr (sizeof...(Ts) == 1) {
    using Only = std::tuple_element_t<0, decltype(all)>;
    return static_cast<Only>(std::get<0>(std::move(all)));
  } else {
    return all;
  }
}

}  // namespace accelerate::detail::accelerator
