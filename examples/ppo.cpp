// Proximal policy optimization: several processes, each with carts of its own, learn one policy.
//
//     accelerate launch --num_processes 2 build/dev/examples/ppo
//
// Last line: "result: mean return 475..500 after 10..30 updates on all ranks"
//
// How long this takes depends on the data, so processes would leave the loop at different times and
// wait for each other without end. `agree_to_stop` makes it one decision.
#include <accelerate/accelerate.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cart_pole.h"

namespace {

constexpr std::int64_t kSteps = 128;  // of each cart, between two updates
constexpr double kDiscount = 0.99, kTrace = 0.95, kClip = 0.2, kMaxChange = 0.03;
constexpr std::int64_t kEpisodes = 20;  // the mean return is taken over this many on each process

struct Options {
  std::int64_t carts = 16;  // of each process
  std::int64_t updates = 200, passes = 6, batch_size = 256;
  std::int64_t goal = 475, seed = 42;
  std::optional<accelerate::PrecisionType> mixed_precision = std::nullopt;
  bool capture = false;  // a GPU repeats the step from a recording
};

Options parse(int argc, char** argv) {
  Options options;
  examples::read_arguments(argc, argv,
                           {{"--carts", options.carts},
                            {"--updates", options.updates},
                            {"--passes", options.passes},
                            {"--batch_size", options.batch_size},
                            {"--goal", options.goal, /*least=*/0},
                            {"--seed", options.seed, /*least=*/0},
                            {"--mixed_precision", options.mixed_precision},
                            {"--capture", options.capture}});
  return options;
}

/// The actor says how much it likes each action, the critic what it expects from here on.
class ActorCriticImpl : public torch::nn::Module {
 public:
  ActorCriticImpl() {
    actor_ = register_module("actor", layers(examples::CartPoles::kActions));
    critic_ = register_module("critic", layers(1));
  }
  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& observations) {
    return {torch::log_softmax(actor_->forward(observations), -1),  // [..., actions]
            critic_->forward(observations).squeeze(-1)};            // [...]
  }

 private:
  static torch::nn::Sequential layers(std::int64_t outputs) {
    using accelerate::nn::Linear, torch::nn::Tanh;
    return torch::nn::Sequential(Linear(examples::CartPoles::kObservations, 64), Tanh(),
                                 Linear(64, 64), Tanh(), Linear(64, outputs));
  }
  torch::nn::Sequential actor_ = nullptr, critic_ = nullptr;
};
TORCH_MODULE(ActorCritic);

/// What was seen, done and earned; one row for each step of each cart.
struct Experience {
  torch::Tensor observations, actions, log_probs, advantages, returns;

  [[nodiscard]] Experience rows(const torch::Tensor& index) const {
    const auto take = [&](const torch::Tensor& all) { return all.index_select(0, index); };
    return {take(observations), take(actions), take(log_probs), take(advantages), take(returns)};
  }
};

constexpr auto tensor_tree_fields(std::type_identity<Experience>) {
  return ACCELERATE_FIELDS(Experience, observations, actions, log_probs, advantages, returns);
}

torch::Tensor chosen(const torch::Tensor& log_probs, const torch::Tensor& actions) {
  return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1);
}

template <class Model>
Experience play(Model& model, examples::CartPoles& carts, torch::Device device) {
  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> seen, actions, next, fell, over;
  for (std::int64_t t = 0; t < kSteps; ++t) {
    seen.push_back(carts.observations().to(device));
    actions.push_back(model(seen.back()).first.exp().multinomial(1).squeeze(-1));
    const auto outcome = carts.step(actions.back().cpu());
    next.push_back(outcome.observations.to(device));
    fell.push_back(outcome.fell.to(device));
    over.push_back(outcome.over.to(device));
  }
  const auto observations = torch::stack(seen),
             done = torch::stack(actions);  // [steps, carts, ...]
  const auto [log_probs, values] = model(observations);
  const auto next_values = model(torch::stack(next)).second;

  // Generalized advantage estimation, backwards in time. Nothing is to be earned after a fall; an
  // episode that was only too long would have gone on.
  const auto surprise = 1 + kDiscount * next_values * (1 - torch::stack(fell)) - values;
  const auto advantages = torch::empty_like(values);
  auto advantage = torch::zeros_like(values[0]);
  for (std::int64_t t = kSteps - 1; t >= 0; --t) {
    advantage = surprise[t] + kDiscount * kTrace * (1 - over[t]) * advantage;
    advantages[t].copy_(advantage);
  }
  return {observations.flatten(0, 1), done.flatten(), chosen(log_probs, done).flatten(),
          advantages.flatten(), (advantages + values).flatten()};
}

/// The clipped objective, the error of the critic, and a little praise for staying undecided. The
/// second value says how far the policy has moved from the one that played.
template <class Model>
std::pair<torch::Tensor, torch::Tensor> loss_of(Model& model, const Experience& batch) {
  const auto [log_probs, values] = model(batch.observations);
  const auto change = chosen(log_probs, batch.actions) - batch.log_probs;
  const auto ratio = change.exp();
  const auto gain =
      torch::min(ratio * batch.advantages, ratio.clamp(1 - kClip, 1 + kClip) * batch.advantages);
  const auto entropy = -(log_probs * log_probs.exp()).sum(-1);
  const auto loss =
      -gain.mean() + 0.5 * torch::mse_loss(values, batch.returns) - 0.01 * entropy.mean();
  return {loss, (ratio - 1 - change).mean().detach()};
}

/// The mean over the last episodes of all processes.
double mean_return(accelerate::Accelerator& accelerator, const examples::CartPoles& carts) {
  const auto& all = carts.returns();
  const auto count = std::min(std::ssize(all), kEpisodes);
  const auto last = torch::tensor(std::vector<double>(all.end() - count, all.end()));
  const auto sums = torch::stack({last.sum(), torch::tensor(static_cast<double>(count))});
  const auto total = accelerator.reduce(sums.to(torch::kFloat).to(accelerator.device()),
                                        accelerate::Reduction::kSum);
  return (total[0] / total[1].clamp_min(1)).item<double>();
}

void run(const Options& options) {
  accelerate::Accelerator accelerator({.mixed_precision = options.mixed_precision});
  const auto processes = accelerator.num_processes();
  accelerator.print(processes, processes == 1 ? "process" : "processes");
  accelerate::set_seed(options.seed);

  ActorCritic net;
  accelerate::Adam adam(net->parameters(), {.lr = 2e-3});
  auto [model, optimizer] = accelerator.prepare(net, std::move(adam));

  // One policy, but other carts and other luck on each process.
  accelerate::set_seed(options.seed, {.device_specific = true});
  examples::CartPoles carts(options.carts, options.seed + accelerator.process_index());

  const auto body = [&, &model = model, &optimizer = optimizer](Experience& batch) {
    const auto [loss, change] = loss_of(model, batch);
    accelerator.backward(loss);
    accelerator.clip_grad_norm_(model.parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
    return change;
  };
  auto captured = accelerator.capture(body);

  std::int64_t update = 0;
  double mean = 0;
  while (update < options.updates) {
    auto experience = play(model, carts, accelerator.device());
    const auto everywhere = accelerator.gather(experience.advantages);
    experience.advantages = (experience.advantages - everywhere.mean()) / (everywhere.std() + 1e-8);

    for (std::int64_t pass = 0; pass < options.passes; ++pass) {
      double furthest = 0;
      const auto order = torch::randperm(experience.actions.numel(), experience.actions.options());
      for (const auto& index : order.split(options.batch_size)) {
        auto batch = experience.rows(index);
        const auto change = options.capture ? captured(batch) : body(batch);
        furthest = std::max(furthest, change.item<double>());
      }
      // The data have become old: for all processes as soon as they have for one.
      if (accelerator.agree_to_stop(furthest > kMaxChange)) break;
    }

    ++update;
    mean = mean_return(accelerator, carts);
    if (update % 5 == 0) accelerator.print("update", update, "mean return", std::round(mean));
    if (accelerator.agree_to_stop(mean >= static_cast<double>(options.goal))) break;
  }
  accelerator.print("result: mean return", std::round(mean), "after", update,
                    "updates on all ranks");
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] { run(parse(argc, argv)); });
}
