// accelerate/sharding/gathered_parameters.h - the whole parameters of a sharded model.
//
// Part of accelerate/sharding.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

struct GatheredParametersOptions {
  /// The rank whose changes inside the scope are kept; nullopt means that no rank makes any.
  std::optional<int> modifier_rank = std::nullopt;
  /// Whether to gather and check anything at all.
  bool enabled = true;
};

namespace detail::sharding {

/// While it lives, parameters are whole. Collective, as `finish` is; the destructor is not.
class ACCELERATE_API GatheredScope {
 public:
  GatheredScope(std::span<const at::Tensor> parameters, const GatheredParametersOptions& options);
  ~GatheredScope();
  GatheredScope(const GatheredScope&) = delete;
  GatheredScope& operator=(const GatheredScope&) = delete;

  /// Sends the changes of `modifier_rank` to all processes.
  void finish();

 private:
  struct Gathered;
  std::unique_ptr<Gathered> gathered_;
};

}  // namespace detail::sharding

/// Collective if a parameter is of a sharded model. Runs `f` with all of `parameters` whole and
/// returns what it returns. Processes must give the same parameters; parameters that every process
/// holds whole need nothing to be sent. What `modifier_rank` changes in parameters of sharded
/// models all processes get when `f` has returned; changes of others throw or are lost.
///
///     gathered_parameters(model.parameters(), {.modifier_rank = 0}, [&] { init(net); });
template <class F>
auto gathered_parameters(std::span<const at::Tensor> parameters,
                         const GatheredParametersOptions& options, F&& f) {
  detail::sharding::GatheredScope scope(parameters, options);
  if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
    std::forward<F>(f)();
    scope.finish();
  } else {
    auto result = std::forward<F>(f)();
    scope.finish();
    return result;
  }
}

/// The same for all parameters of a model: a prepared one, or a module.
template <class Model, class F>
  requires requires(const Model& model) {
    { model.parameters() } -> std::convertible_to<std::vector<at::Tensor>>;
  }
auto gathered_parameters(const Model& model, const GatheredParametersOptions& options, F&& f) {
  const std::vector<at::Tensor> parameters = model.parameters();
  return gathered_parameters(std::span<const at::Tensor>(parameters), options, std::forward<F>(f));
}

}  // namespace accelerate
