// A small convolutional network for images of 28 x 28 points.
#pragma once

#include <accelerate/nn.h>
#include <torch/torch.h>

namespace examples {

class DigitNetImpl : public torch::nn::Module {
 public:
  DigitNetImpl() {
    using torch::nn::Conv2d, torch::nn::Conv2dOptions;
    conv1_ = register_module("conv1", Conv2d(Conv2dOptions(1, 16, 3).padding(1)));
    conv2_ = register_module("conv2", Conv2d(Conv2dOptions(16, 32, 3).padding(1)));
    fc1_ = register_module("fc1", accelerate::nn::Linear(32 * 7 * 7, 64));
    fc2_ = register_module("fc2", accelerate::nn::Linear(64, 10));
  }

  torch::Tensor forward(torch::Tensor x) {             // [batch, 1, 28, 28]
    x = torch::max_pool2d(torch::relu(conv1_(x)), 2);  // [batch, 16, 14, 14]
    x = torch::max_pool2d(torch::relu(conv2_(x)), 2);  // [batch, 32, 7, 7]
    return fc2_(torch::relu(fc1_(x.flatten(1))));      // [batch, 10]
  }

 private:
  torch::nn::Conv2d conv1_ = nullptr, conv2_ = nullptr;
  accelerate::nn::Linear fc1_ = nullptr, fc2_ = nullptr;
};
TORCH_MODULE(DigitNet);

}  // namespace examples
