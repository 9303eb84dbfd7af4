// accelerate/detail/accelerator/prepare_arguments.h - what an argument of `Accelerator::prepare`
// is, by its type.
//
// Part of accelerate/accelerator.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/accelerator/scopes.h"
#include "accelerate/api.h"
#include "accelerate/optimizer.h"
#include "accelerate/prepared_loader.h"
#include "accelerate/prepared_model.h"
#include "accelerate/scheduler/accelerated_scheduler.h"

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

namespace detail::accelerator {

template <class... Ts>
inline constexpr bool kBeginsWithPlacement = false;
template <class First, class... Rest>
inline constexpr bool kBeginsWithPlacement<First, Rest...> =
    std::same_as<std::remove_cvref_t<First>, DevicePlacement>;
template <class... Ts>
concept BeginsWithPlacement = kBeginsWithPlacement<Ts...>;

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
concept SchedulerArgument = optim::AnyScheduler<typename Target<T>::type>;
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
concept TorchLoader =
    std::is_class_v<typename Target<T>::type> &&
    decltype(is_torch_loader(static_cast<typename Target<T>::type*>(nullptr)))::value;

template <class T>
concept IsScheduler = SchedulerArgument<T> || std::same_as<T, AcceleratedScheduler>;

/// The order in which `prepare` takes its arguments, wherever they stand: an optimizer follows the
/// engines of the models of the same call, and a scheduler its optimizers.
enum class PrepareStage : std::uint8_t { kModels, kOptimizers, kSchedulers, kLoaders };

/// The stage of an argument. What `prepare` passes through comes last.
template <class T>
[[nodiscard]] constexpr PrepareStage stage_of() {
  if (AnyModel<T>) return PrepareStage::kModels;
  if (AnyOptimizer<T> || std::same_as<T, AcceleratedOptimizer>) return PrepareStage::kOptimizers;
  if (IsScheduler<T>) return PrepareStage::kSchedulers;
  return PrepareStage::kLoaders;
}

/// Where the object is, however it is given; null for an empty pointer.
template <class Arg>
const typename Target<Arg>::type* address_of(const Arg& object) {
  if constexpr (std::same_as<typename Target<Arg>::type, Arg>) {
    return std::addressof(object);
  } else {
    return object.get();
  }
}

/// What a call of `prepare` was given that is not prepared already. Loaders may be.
struct PrepareObjects {
  std::vector<std::shared_ptr<torch::nn::Module>> models = {};
  std::vector<const torch::optim::Optimizer*> optimizers = {};
  /// Null for one of LibTorch.
  std::vector<const LRScheduler*> schedulers = {};
  /// Of each loader; nullopt if it has none.
  std::vector<std::optional<std::int64_t>> batch_sizes = {};

  template <class Arg>
  void add(const Arg& object) {
    if constexpr (kIsPreparedModel<Arg> || std::same_as<Arg, AcceleratedOptimizer> ||
                  std::same_as<Arg, AcceleratedScheduler>) {
      return;
    } else if constexpr (AnyModel<Arg>) {
      models.push_back(module_of(object));
    } else if constexpr (kIsDataLoader<Arg>) {
      batch_sizes.push_back(object.batch_size());
    } else if constexpr (AnyOptimizer<Arg>) {
      optimizers.push_back(address_of(object));
    } else if constexpr (SchedulerArgument<Arg>) {
      if constexpr (std::derived_from<typename Target<Arg>::type, LRScheduler>) {
        schedulers.push_back(address_of(object));
      } else {
        schedulers.push_back(nullptr);
      }
    }
  }
};

/// The object as a shared pointer that shares, owns or refers to it, as it was given.
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
    return std::make_shared<T>(std::forward<Arg>(object));
  }
}

/// An object that `prepare` passes through: a copy, or a reference if it cannot be copied.
template <class Arg>
using PassedOn = std::conditional_t<!std::is_lvalue_reference_v<Arg> ||
                                        std::copy_constructible<std::remove_cvref_t<Arg>>,
                                    std::decay_t<Arg>, Arg>;

template <class... Ts>
inline constexpr bool kMovesOptimizer =
    ((AnyOptimizer<std::remove_cvref_t<Ts>> &&
      std::same_as<typename Target<std::remove_cvref_t<Ts>>::type, std::remove_cvref_t<Ts>> &&
      !std::is_lvalue_reference_v<Ts>) ||
     ...);
template <class... Ts>
inline constexpr bool kHasLibTorchScheduler =
    (optim::LibTorchScheduler<typename Target<std::remove_cvref_t<Ts>>::type> || ...);

}  // namespace detail::accelerator
}  // namespace accelerate
