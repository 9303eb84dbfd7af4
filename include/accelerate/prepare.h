// accelerate/prepare.h - what `Accelerator::prepare` makes of each kind of object.
//
// Part of accelerate/accelerator.h. Templates here find out what an object is; the work is done by
// the functions without templates at the top.
#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/accelerated_scheduler.h"
#include "accelerate/api.h"
#include "accelerate/name_collectives.h"
#include "accelerate/optimizer.h"
#include "accelerate/prepared_loader.h"
#include "accelerate/prepared_model.h"
#include "accelerate/training_scopes.h"

// Named here only to be refused.
namespace torch::data {
template <class Dataset, class Batch, class BatchRequest>
class DataLoaderBase;
}
namespace torch::jit {
struct Module;
}
namespace torch::nn {
class AnyModule;
}

namespace accelerate {

/// Which of the objects of a `prepare` are put on the device: `prepare(DevicePlacement{true,
/// false}, model, loader)`.
class DevicePlacement {
 public:
  DevicePlacement(std::initializer_list<bool> flags) : flags_(flags) {}
  explicit DevicePlacement(std::vector<bool> flags) : flags_(std::move(flags)) {}
  [[nodiscard]] const std::vector<bool>& flags() const { return flags_; }

 private:
  std::vector<bool> flags_;
};

namespace detail {

template <class... Ts>
inline constexpr bool kBeginsWithPlacement = false;
template <class First, class... Rest>
inline constexpr bool kBeginsWithPlacement<First, Rest...> =
    std::same_as<std::remove_cvref_t<First>, DevicePlacement>;
template <class... Ts>
concept BeginsWithPlacement = kBeginsWithPlacement<Ts...>;

/// What an accelerator knows and has prepared.
struct AcceleratorCore;
class AtCallSite;

/// While it lives collectives of this thread are called from the user's line.
class ACCELERATE_API CalledFrom {
 public:
  explicit CalledFrom(const std::source_location& where);
  ~CalledFrom();
  CalledFrom(const CalledFrom&) = delete;
  CalledFrom& operator=(const CalledFrom&) = delete;

 private:
  std::unique_ptr<AtCallSite> here_;
};

/// Throws `StateError` when the state was reset, and `ArgumentError` for another number of flags.
ACCELERATE_API void check_prepare(const DevicePlacement* placement, std::size_t objects);

// Each also registers what it makes, or was given, unless it is registered already.
[[nodiscard]] ACCELERATE_API std::shared_ptr<ModelCore> prepare_module(
    AcceleratorCore& core, std::shared_ptr<torch::nn::Module> module, std::optional<bool> placement,
    bool evaluation_mode);
[[nodiscard]] ACCELERATE_API std::shared_ptr<OptimizerCore> prepare_optimizer_core(
    AcceleratorCore& core, std::shared_ptr<torch::optim::Optimizer> optimizer,
    const torch::optim::Optimizer* moved_from, std::optional<bool> placement);
[[nodiscard]] ACCELERATE_API std::shared_ptr<SchedulerCore> prepare_scheduler_core(
    AcceleratorCore& core, SchedulerParts parts);
ACCELERATE_API void register_prepared(AcceleratorCore& core, std::shared_ptr<ModelCore> model);
ACCELERATE_API void register_prepared(AcceleratorCore& core,
                                      std::shared_ptr<OptimizerCore> optimizer);
ACCELERATE_API void register_prepared(AcceleratorCore& core,
                                      std::shared_ptr<SchedulerCore> scheduler);
ACCELERATE_API void register_prepared(AcceleratorCore& core,
                                      std::shared_ptr<AnyPreparedLoader> loader);
[[nodiscard]] ACCELERATE_API PrepareDataLoaderOptions loader_options(const AcceleratorCore& core,
                                                                     std::optional<bool> placement);

/// Throws `UnsupportedError` that says why there is no such member, or when it comes.
[[noreturn]] ACCELERATE_API void refuse_member(const char* name);

// What an argument points to, however it is given.
template <class T>
struct Target {
  using type = T;
};
template <class T>
struct Target<std::shared_ptr<T>> {
  using type = T;
};
template <class T, class D>
struct Target<std::unique_ptr<T, D>> {
  using type = T;
};

template <class T>
concept AnyOptimizer = std::derived_from<typename Target<T>::type, torch::optim::Optimizer>;
template <class T>
concept SchedulerArgument = AnyScheduler<typename Target<T>::type>;
template <class T>
inline constexpr bool kIsDataLoader = false;
template <class Batch>
inline constexpr bool kIsDataLoader<DataLoader<Batch>> = true;
/// A model in a form that cannot be taken over: by value, or owned by one pointer alone.
template <class T>
concept BareModel = (std::is_pointer_v<T> && std::convertible_to<T, const torch::nn::Module*>) ||
                    std::derived_from<typename Target<T>::type, torch::nn::Module> ||
                    std::same_as<typename Target<T>::type, torch::jit::Module> ||
                    std::same_as<typename Target<T>::type, torch::nn::AnyModule>;

template <class Dataset, class Batch, class Request>
std::true_type is_torch_loader(const torch::data::DataLoaderBase<Dataset, Batch, Request>*);
std::false_type is_torch_loader(...);
template <class T>
concept TorchLoader = std::is_class_v<typename Target<T>::type> &&
    decltype(is_torch_loader(static_cast<typename Target<T>::type*>(nullptr)))::value;

template <class T>
concept IsScheduler = SchedulerArgument<T> || std::same_as<T, AcceleratedScheduler>;

/// Shares, owns or refers to the object: as it was given.
template <class Base, class Arg>
std::shared_ptr<Base> taken(Arg&& object) {
  using T = std::remove_cvref_t<Arg>;
  static_assert(
      !std::is_const_v<std::remove_reference_t<Arg>> || !std::same_as<typename Target<T>::type, T>,
      "accelerate: this object is const, but training changes it.");
  if constexpr (!std::same_as<typename Target<T>::type, T>) {
    return std::shared_ptr<Base>(std::forward<Arg>(object));
  } else if constexpr (std::is_lvalue_reference_v<Arg>) {
    return std::shared_ptr<Base>(std::shared_ptr<void>(), std::addressof(object));
  } else {
    return std::make_shared<T>(std::move(object));
  }
}

template <class Model>
auto prepare_model(AcceleratorCore& core, const Model& model, std::optional<bool> placement,
                   bool evaluation_mode) {
  static_assert(AnyModel<Model>,
                "accelerate: prepare_model takes a module holder (TORCH_MODULE) "
                "or a std::shared_ptr to a module.");
  if constexpr (kIsPreparedModel<Model>) {
    if (!model) refuse_empty_model();
    register_prepared(core, model._core());
    return model;
  } else {
    const auto& module = ModuleOf<Model>::pointer(model);
    return PreparedModel<Model>(model, prepare_module(core, module, placement, evaluation_mode));
  }
}

template <class Arg>
AcceleratedOptimizer prepare_optimizer(AcceleratorCore& core, Arg&& optimizer,
                                       std::optional<bool> placement) {
  using T = std::remove_cvref_t<Arg>;
  if constexpr (std::same_as<T, AcceleratedOptimizer>) {
    if (!optimizer) refuse_empty_optimizer();
    register_prepared(core, optimizer._core());
    return optimizer;
  } else {
    static_assert(AnyOptimizer<T>, "accelerate: this is no torch::optim::Optimizer.");
    const torch::optim::Optimizer* moved_from = nullptr;
    if constexpr (std::same_as<typename Target<T>::type, T> && !std::is_lvalue_reference_v<Arg>) {
      moved_from = std::addressof(optimizer);
    }
    auto made = prepare_optimizer_core(
        core, taken<torch::optim::Optimizer>(std::forward<Arg>(optimizer)), moved_from, placement);
    using O = typename Target<T>::type;
    if constexpr (requires(O & own) {
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
AcceleratedScheduler prepare_scheduler(AcceleratorCore& core, Arg&& scheduler) {
  using T = std::remove_cvref_t<Arg>;
  if constexpr (std::same_as<T, AcceleratedScheduler>) {
    if (!scheduler) refuse_empty_scheduler();
    register_prepared(core, scheduler._core());
    return scheduler;
  } else {
    static_assert(SchedulerArgument<T>,
                  "accelerate: this is no scheduler of accelerate/scheduler.h or torch::optim.");
    using S = typename Target<T>::type;
    return AcceleratedScheduler(
        prepare_scheduler_core(core, scheduler_parts(taken<S>(std::forward<Arg>(scheduler)))));
  }
}

template <class Batch>
DataLoader<Batch> prepare_loader(AcceleratorCore& core, const DataLoader<Batch>& loader,
                                 std::optional<bool> placement,
                                 SliceFunction<Batch> slice_fn_for_dispatch = {}) {
  auto prepared = accelerate::prepare_data_loader(loader, loader_options(core, placement),
                                                  std::move(slice_fn_for_dispatch));
  register_prepared(core, std::dynamic_pointer_cast<AnyPreparedLoader>(prepared._core()));
  return prepared;
}

/// What is none of these comes back as it is: a copy where that can be made, or the object itself.
template <class Arg>
using PassedOn = std::conditional_t<!std::is_lvalue_reference_v<Arg> ||
                                        std::copy_constructible<std::remove_cvref_t<Arg>>,
                                    std::decay_t<Arg>, Arg>;

template <class Arg>
auto prepare_one(AcceleratorCore& core, Arg&& object, std::optional<bool> placement) {
  using T = std::remove_cvref_t<Arg>;
  // In a tuple, which can hold a reference too.
  if constexpr (AnyModel<T>) {
    return std::tuple(prepare_model(core, object, placement, /*evaluation_mode=*/false));
  } else if constexpr (kIsDataLoader<T>) {
    return std::tuple(prepare_loader(core, object, placement));
  } else if constexpr (AnyOptimizer<T> || std::same_as<T, AcceleratedOptimizer>) {
    return std::tuple(prepare_optimizer(core, std::forward<Arg>(object), placement));
  } else if constexpr (IsScheduler<T>) {
    return std::tuple(prepare_scheduler(core, std::forward<Arg>(object)));
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
inline constexpr bool kMovesOptimizer =
    ((AnyOptimizer<std::remove_cvref_t<Ts>> &&
      std::same_as<typename Target<std::remove_cvref_t<Ts>>::type, std::remove_cvref_t<Ts>> &&
      !std::is_lvalue_reference_v<Ts>) ||
     ...);
template <class... Ts>
inline constexpr bool kHasLibTorchScheduler =
    (LibTorchScheduler<typename Target<std::remove_cvref_t<Ts>>::type> || ...);

template <class... Ts>
auto prepare_all(AcceleratorCore& core, const DevicePlacement* placement, Ts&&... objects) {
  static_assert(!(kMovesOptimizer<Ts...> && kHasLibTorchScheduler<Ts...>),
                "accelerate: LibTorch's schedulers keep a reference to their optimizer that cannot "
                "be changed, so the optimizer must not be moved: give it by name (lvalue), or use "
                "the scheduler of the same name in accelerate/scheduler.h.");
  const auto named = name_collectives("prepare");
  check_prepare(placement, sizeof...(Ts));
  std::tuple<std::optional<decltype(prepare_one(core, std::declval<Ts>(), true))>...> slots;

  // Schedulers come last: they follow the optimizers of the same call, wherever these stand.
  const auto pass = [&]<std::size_t... I>(std::index_sequence<I...>, auto schedulers) {
    const auto one = [&]<std::size_t J>(std::integral_constant<std::size_t, J>, auto& object) {
      using Arg = std::tuple_element_t<J, std::tuple<Ts&&...>>;
      if constexpr (IsScheduler<std::remove_cvref_t<Arg>> == schedulers.value) {
        std::optional<bool> on_device;
        if (placement != nullptr) on_device = placement->flags()[J];
        std::get<J>(slots).emplace(prepare_one(core, static_cast<Arg>(object), on_device));
      }
    };
    (one(std::integral_constant<std::size_t, I>(), objects), ...);
  };
  pass(std::index_sequence_for<Ts...>(), std::false_type());
  pass(std::index_sequence_for<Ts...>(), std::true_type());

  return std::apply(
      [](auto&... slot) {
        auto all = std::tuple_cat(std::move(*slot)...);
        if constexpr (sizeof...(slot) == 1) {
          using Only = std::tuple_element_t<0, decltype(all)>;
          return static_cast<Only>(std::get<0>(std::move(all)));
        } else {
          return all;
        }
      },
      slots);
}

}  // namespace detail
}  // namespace accelerate
