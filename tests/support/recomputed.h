// tests/support/recomputed.h - a part of a net whose activations are computed again in backward.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace accelerate::test {

/// Keeps no graph of what it runs: runs it again in backward, with a backward of its own.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Part = std::function<torch::Tensor(const torch::Tensor&)>;

  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const std::shared_ptr<Part>& part) {
    context->save_for_backward({x});
    auto* kept = new std::shared_ptr<Part>(part);
    context->saved_data["part"] = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(kept));
    return (*part)(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const std::unique_ptr<std::shared_ptr<Part>> part(
        reinterpret_cast<std::shared_ptr<Part>*>(  // NOLINT(performance-no-int-to-ptr)
            static_cast<std::intptr_t>(context->saved_data["part"].toInt())));
    const torch::AutoGradMode with_gradients(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_(true);
    torch::autograd::backward({(**part)(x)}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

inline torch::Tensor recomputed(const torch::Tensor& x, Recomputed::Part part) {
  return Recomputed::apply(x, std::make_shared<Recomputed::Part>(std::move(part)));
}

}  // namespace accelerate::test
