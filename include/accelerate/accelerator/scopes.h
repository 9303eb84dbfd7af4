// accelerate/accelerator/scopes.h - parts of a training loop in which gradients are treated
// otherwise.
//
// Part of accelerate/accelerator.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/detail/core/refuse_empty.h"
#include "accelerate/detail/modeling/module_of.h"
#include "accelerate/prepared_model.h"

namespace accelerate {

template <detail::modeling::ModelHolder Holder>
class Dispatched;

/// What `accumulate`, `no_sync` and `trigger_sync_in_backward` return: until it ends, backward
/// synchronizes the gradients of some models or not. Scopes nest, and restore what they found.
template <std::size_t N>
class [[nodiscard]] GradientSyncScope {
 public:
  using Models = std::array<std::shared_ptr<detail::accelerator::ModelCore>, N>;

  /// nullopt keeps the current setting; false keeps gradients local.
  GradientSyncScope(std::optional<bool> synchronizes, Models models) {
    if (!synchronizes) return;
    models_ = std::move(models);
    for (std::size_t i = 0; i < N; ++i) {
      if (models_[i]) before_[i] = std::exchange(models_[i]->synchronizes, *synchronizes);
    }
  }
  ~GradientSyncScope() {
    for (std::size_t i = N; i-- > 0;) {
      if (models_[i]) models_[i]->synchronizes = before_[i];
    }
  }
  GradientSyncScope(const GradientSyncScope&) = delete;
  GradientSyncScope& operator=(const GradientSyncScope&) = delete;

 private:
  Models models_ = {};
  std::array<bool, N> before_ = {};
};

/// What `maybe_context_parallel` splits between processes until the scope ends.
struct ContextParallelOptions {
  std::vector<at::Tensor> buffers = {};
  /// The dimension of each buffer that is the sequence.
  std::vector<std::int64_t> buffer_seq_dims = {};
  /// Those of them that stay split at the end of the scope.
  std::vector<at::Tensor> no_restore_buffers = {};
};

/// What `maybe_context_parallel` returns. It gives the buffers back what they had, without
/// communication, also when an exception ends it. Without context parallelism it has no effect.
class [[nodiscard]] ContextParallelScope {
 public:
  ContextParallelScope() = default;
  /// For this library.
  explicit ContextParallelScope(std::shared_ptr<void> entered) : entered_(std::move(entered)) {}
  ~ContextParallelScope() = default;
  ContextParallelScope(const ContextParallelScope&) = delete;
  ContextParallelScope& operator=(const ContextParallelScope&) = delete;

 private:
  std::shared_ptr<void> entered_ = nullptr;
};

struct JoinOptions {
  std::optional<bool> even_batches = std::nullopt;
};

namespace detail::accelerator {

template <class T>
inline constexpr bool kIsPreparedModel = false;
template <class Holder>
inline constexpr bool kIsPreparedModel<PreparedModel<Holder>> = true;

template <class T>
inline constexpr bool kIsDispatched = false;
template <class Holder>
inline constexpr bool kIsDispatched<Dispatched<Holder>> = true;

/// A prepared model, or one that is not prepared: a holder, or what dispatching has made of it.
template <class T>
concept AnyModel = kIsPreparedModel<std::remove_cvref_t<T>> ||
                   kIsDispatched<std::remove_cvref_t<T>> || ModelHolder<std::remove_cvref_t<T>>;

/// True; a compile error says what is taken instead of another type.
template <class Model>
consteval bool check_model() {
  static_assert(AnyModel<Model>,
                "accelerate: this is no model: give a prepared model, a module holder "
                "(TORCH_MODULE) or a std::shared_ptr to a module.");
  return true;
}

/// Throws `StateError` for a prepared model that is empty.
template <class Model>
std::shared_ptr<ModelCore> core_of(const Model& model) {
  static_assert(check_model<Model>());
  if constexpr (kIsPreparedModel<Model>) {
    if (!model) refuse_empty("model");
    return model._core();
  } else {
    return nullptr;
  }
}

/// Of a model that is not prepared.
template <class Model>
const auto& holder_of(const Model& model) {
  static_assert(check_model<Model>());
  if constexpr (kIsDispatched<Model>) {
    return model.holder();
  } else {
    return model;
  }
}

/// A module in it has a device map with more than one entry.
[[nodiscard]] ACCELERATE_API bool is_spread(const torch::nn::Module& module);

/// Throws `StateError` for a prepared or dispatched model that is empty, `ArgumentError` for an
/// empty holder.
template <class Model>
std::shared_ptr<torch::nn::Module> module_of(const Model& model) {
  static_assert(check_model<Model>());
  if constexpr (kIsPreparedModel<Model>) {
    if (!model) refuse_empty("model");
    return model._core()->module;
  } else if constexpr (kIsDispatched<Model>) {
    return module_of(model.holder());
  } else {
    std::shared_ptr<torch::nn::Module> module = ModuleOf<Model>::pointer(model);
    if (!module) refuse_empty_holder();
    return module;
  }
}

}  // namespace detail::accelerator
}  // namespace accelerate
