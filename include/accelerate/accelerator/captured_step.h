// accelerate/accelerator/captured_step.h - a training step that a GPU repeats from a recording.
//
//     auto step = accelerator.capture([&](Batch& batch) {
//       auto accumulating = accelerator.accumulate(model);
//       auto loss = cross_entropy(model(batch.first), batch.second);
//       accelerator.backward(loss);
//       optimizer.step();
//       scheduler.step();
//       optimizer.zero_grad();
//       return loss;
//     });
//     for (auto& batch : loader) loss_of_epoch += step(batch);
//
// Part of accelerate/accelerator.h. docs/capture.md says what may be in a step.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/detail/accelerator/step_capture.h"
#include "accelerate/tree.h"

namespace accelerate {

struct CaptureOptions {
  /// Steps that run as they are before one of these shapes is recorded; at least 1.
  std::int64_t warmup = 3;
  /// Recordings that are kept, one for each set of shapes and dtypes; the one that was not used for
  /// the longest time makes room for a new one.
  std::int64_t max_graphs = 8;
  /// Whether a step that cannot be recorded runs as it is, with a warning, instead of an error.
  /// Unset: only if `dynamo_plugin` asks for CUDAGRAPHS without `fullgraph`.
  std::optional<bool> fallback_to_eager = std::nullopt;
};

/// What `Accelerator::capture` returns: `F` with the same arguments and the same result, whose
/// tensors are detached.
template <class F>
class CapturedStep {
 public:
  CapturedStep(F f, std::unique_ptr<detail::accelerator::StepCapture> capture)
      : f_(std::make_shared<F>(std::move(f))), capture_(std::move(capture)) {}

  template <class... Args>
    requires std::invocable<F&, std::remove_cvref_t<Args>&...>
  auto operator()(Args&&... args) {
    using Inputs = std::tuple<std::remove_cvref_t<Args>...>;
    using Result = std::remove_cvref_t<std::invoke_result_t<F&, std::remove_cvref_t<Args>&...>>;
    static_assert(
        (PureTensorTree<std::remove_cvref_t<Args>> && ...),
        "accelerate: a captured step takes tensors and trees of tensors only: a recording "
        "would keep other values of its first call. Capture them by reference in the "
        "function, outside of what changes from step to step.");
    static_assert(std::is_void_v<Result> || PureTensorTree<Result>,
                  "accelerate: a captured step returns tensors, a tree of tensors, or nothing.");
    Inputs inputs(args...);
    const auto tensors = tensors_of(inputs);
    // Keeps a copy of the arguments, for recordings.
    const auto body = [f = f_, inputs](const std::vector<at::Tensor>& given) {
      auto own = with_tensors(inputs, given);
      detail::accelerator::StepOutput output;
      if constexpr (std::is_void_v<Result>) {
        std::apply(*f, own);
      } else {
        const auto detach = [](const at::Tensor& one) { return one.detach(); };
        auto result = std::make_shared<Result>(tree::map(detach, std::apply(*f, own)));
        output.tensors = tree::leaves(*result);
        output.tree = std::move(result);
      }
      return output;
    };
    const auto output = capture_->run(tensors, body);
    if constexpr (!std::is_void_v<Result>) {
      return tree::unflatten(*static_cast<const Result*>(output.tree.get()), output.tensors);
    }
  }

  /// How many recordings there are now; 0 on a CPU.
  [[nodiscard]] std::int64_t num_graphs() const { return capture_->num_graphs(); }

 private:
  template <class Inputs>
  static std::vector<at::Tensor> tensors_of(const Inputs& inputs) {
    if constexpr (std::tuple_size_v<Inputs> > 0) {
      return tree::leaves(inputs);
    } else {
      return {};
    }
  }
  template <class Inputs>
  static Inputs with_tensors(const Inputs& inputs, const std::vector<at::Tensor>& tensors) {
    if constexpr (std::tuple_size_v<Inputs> > 0) {
      return tree::unflatten(inputs, tensors);
    } else {
      return inputs;
    }
  }

  std::shared_ptr<F> f_;
  std::unique_ptr<detail::accelerator::StepCapture> capture_;
};

}  // namespace accelerate
