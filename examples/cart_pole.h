// The classic control task: keep a pole upright on a cart by pushing the cart left or right.
//
// The equations are those of Barto, Sutton and Anderson (1983), the limits those that later
// programs made the custom: an episode ends when the pole leans by 12 degrees, the cart is 2.4 m
// off, or after 500 steps. Each step is worth 1.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "dice.h"

namespace examples {

/// Several carts at once. One that has finished an episode begins the next by itself.
class CartPoles {
 public:
  static constexpr std::int64_t kObservations = 4, kActions = 2, kMaxSteps = 500;

  struct Outcome {
    torch::Tensor observations;  // [count, 4], before a new episode begins
    torch::Tensor fell;          // [count], 1 where the episode failed
    torch::Tensor over;          // [count], 1 where it ended, by a fall or by its length
  };

  CartPoles(std::int64_t count, std::uint64_t seed) : carts_(count), seed_(seed) {
    for (auto& cart : carts_) begin(cart);
  }

  [[nodiscard]] torch::Tensor observations() const {  // [count, 4]
    auto out = torch::empty({std::ssize(carts_), kObservations});
    auto* value = out.data_ptr<float>();
    for (const auto& cart : carts_) {
      for (const double x : {cart.place, cart.speed, cart.angle, cart.spin}) {
        *value++ = static_cast<float>(x);
      }
    }
    return out;
  }

  /// Pushes each cart: `actions` [count] are 0 for left and 1 for right.
  Outcome step(const torch::Tensor& actions) {
    const auto pushes = actions.accessor<std::int64_t, 1>();
    for (std::int64_t i = 0; i < std::ssize(carts_); ++i) move(carts_[i], pushes[i] ? 10.0 : -10.0);

    Outcome outcome = {observations(), torch::zeros({std::ssize(carts_)}),
                       torch::zeros({std::ssize(carts_)})};
    for (std::int64_t i = 0; i < std::ssize(carts_); ++i) {
      auto& cart = carts_[i];
      const bool fell = std::abs(cart.place) > 2.4 || std::abs(cart.angle) > 12 * M_PI / 180;
      if (!fell && cart.steps < kMaxSteps) continue;
      outcome.fell[i] = fell ? 1 : 0;
      outcome.over[i] = 1;
      returns_.push_back(static_cast<double>(cart.steps));
      begin(cart);
    }
    return outcome;
  }

  /// What each finished episode was worth, in the order they ended.
  [[nodiscard]] const std::vector<double>& returns() const { return returns_; }

 private:
  struct Cart {
    double place = 0, speed = 0, angle = 0, spin = 0;
    std::int64_t steps = 0;
  };

  void begin(Cart& cart) {
    Dice dice(seed_, episodes_++);
    const auto near_zero = [&] { return dice.uniform(-0.05, 0.05); };
    cart = {near_zero(), near_zero(), near_zero(), near_zero(), 0};
  }

  static void move(Cart& cart, double force) {
    constexpr double kGravity = 9.8, kMass = 1.1, kPoleMass = 0.1, kHalfPole = 0.5, kSeconds = 0.02;
    const double sine = std::sin(cart.angle), cosine = std::cos(cart.angle);
    const double pull = (force + kPoleMass * kHalfPole * cart.spin * cart.spin * sine) / kMass;
    const double turn = (kGravity * sine - cosine * pull) /
                        (kHalfPole * (4.0 / 3.0 - kPoleMass * cosine * cosine / kMass));
    const double push = pull - kPoleMass * kHalfPole * turn * cosine / kMass;
    cart.place += kSeconds * cart.speed;
    cart.speed += kSeconds * push;
    cart.angle += kSeconds * cart.spin;
    cart.spin += kSeconds * turn;
    ++cart.steps;
  }

  std::vector<Cart> carts_;
  std::vector<double> returns_;
  std::uint64_t seed_, episodes_ = 0;
};

}  // namespace examples
