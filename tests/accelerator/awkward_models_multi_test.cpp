// Models and losses that do not fit the plain loop: each is trained right or refused with a reason,
// and never hangs.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/patience.h"
#include "support/recomputed.h"

namespace accelerate {
namespace {

using test::anew;
using test::averaging;
using test::copy_parameters;
using test::distance;
using test::expect_gradients;
using test::forget_gradients;
using test::Fork;
using test::gradients_same_everywhere;
using test::input_of;
using test::means_of;
using test::message_of;
using test::Mlp;
using test::recomputed;
using test::same_everywhere;

using Kwargs = DistributedDataParallelKwargs;

/// A few steps of one model, each compared with the mean that one process computes with `alone`.
template <class Holder, class Loss>
void expect_means(Accelerator& accelerator, Holder net, Holder alone, const Loss& loss_of,
                  const char* what, int steps = 3) {
  const int rank = accelerator.process_index();
  auto [model, optimizer] = accelerator.prepare(
      net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.05)));
  for (int step = 0; step < steps; ++step) {
    copy_parameters(alone, net);
    const auto wanted = means_of(alone->parameters(), accelerator.num_processes(),
                                 [&](int r) { return loss_of(alone, r, step); });
    accelerator.backward(loss_of(net, rank, step));
    expect_gradients(net->parameters(), wanted, what);
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_TRUE(same_everywhere(net->parameters())) << what;
}

torch::Tensor one_head(Fork& net, int rank, int step) { return net(input_of(rank, step)).first; }

torch::Tensor both_heads(Fork& net, int rank, int step) {
  const auto [left, right] = net(input_of(rank, step));
  return left + right;
}

TEST(AwkwardModels, ParametersThatALossDoesNotUse) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    {
      Accelerator accelerator(anew());
      Fork net;
      auto model = accelerator.prepare(net);
      for (int i = 0; i < 2; ++i) {
        const auto message =
            message_of<ArgumentError>([&] { accelerator.backward(one_head(net, rank, 0)); });
        EXPECT_NE(message.find("right.weight, right.bias"), std::string::npos) << message;
        EXPECT_NE(message.find("find_unused_parameters"), std::string::npos) << message;
        EXPECT_FALSE(net->left->weight.grad().defined()) << "nothing has happened";
      }
      // The next loss is averaged as if nothing had been.
      const auto wanted =
          means_of(net->parameters(), 2, [&](int r) { return both_heads(net, r, 0); });
      accelerator.backward(both_heads(net, rank, 0));
      expect_gradients(net->parameters(), wanted);
      // A batch that is only accumulated may leave out what it likes.
      const auto alone = accelerator.no_sync(model);
      accelerator.backward(one_head(net, rank, 0));
    }
    for (const bool views : {false, true}) {
      Accelerator accelerator(
          averaging(Kwargs{.find_unused_parameters = true, .gradient_as_bucket_view = views}));
      expect_means(accelerator, Fork(), Fork(), one_head, "one head");
      // Another head on each process: both get a gradient everywhere.
      expect_means(
          accelerator, Fork(), Fork(),
          [](Fork& net, int r, int step) {
            const auto [left, right] = net(input_of(r, step));
            return r == 0 ? left : right;
          },
          "a head each");
      // Now this one, now that one.
      expect_means(
          accelerator, Fork(), Fork(),
          [](Fork& net, int r, int step) {
            const auto [left, right] = net(input_of(r, step));
            return step % 2 == 0 ? left : right;
          },
          "in turns", 4);
    }
  });
}

TEST(AwkwardModels, AFrozenHalf) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(anew());
    Fork net;
    for (auto& parameter : net->body->parameters()) parameter.requires_grad_(false);
    {
      const torch::NoGradGuard no_grad;
      net->body->weight.add_(rank);
    }
    auto model = accelerator.prepare(net);
    EXPECT_TRUE(same_everywhere(net->body->weight)) << "what is frozen is given to all too";
    const auto wanted =
        means_of(net->parameters(), 2, [&](int r) { return both_heads(net, r, 0); });
    accelerator.backward(both_heads(net, rank, 0));
    EXPECT_FALSE(net->body->weight.grad().defined());
    expect_gradients(net->parameters(), wanted);

    // Frozen after prepare: the others wait for nothing, since it is said.
    net->left->weight.requires_grad_(false);
    const auto message =
        message_of<ArgumentError>([&] { accelerator.backward(both_heads(net, rank, 0)); });
    EXPECT_NE(message.find("left.weight"), std::string::npos) << message;
  });
}

TEST(AwkwardModels, AParameterUsedTwice) {
  on_processes(2, [](PartialState&) {
    struct TiedImpl : torch::nn::Module {
      TiedImpl() {
        register_module("embed", embed);
        register_module("middle", middle);
      }
      torch::Tensor forward(const torch::Tensor& x) {
        const auto hidden = torch::tanh(middle(x.matmul(embed->weight)));
        return hidden.matmul(embed->weight.t());
      }
      torch::nn::Embedding embed{3, 4};
      torch::nn::Linear middle{4, 4};
    };
    const auto loss_of = [](std::shared_ptr<TiedImpl>& net, int r, int step) {
      return net->forward(input_of(r, step)).pow(2).mean();
    };
    for (const bool is_static : {false, true}) {
      Accelerator accelerator(averaging(Kwargs{.static_graph = is_static}));
      expect_means(accelerator, std::make_shared<TiedImpl>(), std::make_shared<TiedImpl>(), loss_of,
                   "tied weights");
      // And the whole model twice in one loss.
      expect_means(
          accelerator, Mlp(), Mlp(),
          [](Mlp& net, int r, int step) {
            return net(input_of(r, step)).pow(2).mean() + net(input_of(r, step + 5)).mean();
          },
          "two passes");
    }
  });
}

TEST(AwkwardModels, TwoHeadsWithALossEach) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const bool views : {false, true}) {
      Accelerator accelerator(
          averaging(Kwargs{.find_unused_parameters = true, .gradient_as_bucket_view = views}));
      Fork net, alone;
      auto [model, optimizer] = accelerator.prepare(
          net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.05)));
      for (int step = 0; step < 3; ++step) {
        copy_parameters(alone, net);
        const auto wanted =
            means_of(alone->parameters(), 2, [&](int r) { return both_heads(alone, r, step); });
        const auto [left, right] = model(input_of(rank, step));
        accelerator.backward(left, {.retain_graph = true});
        accelerator.backward(right);
        expect_gradients(net->parameters(), wanted, views ? "views" : "copies");
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_TRUE(same_everywhere(net->parameters()));
    }
    // Without: the first one under no_sync, the second one averages both, if it reaches all.
    Accelerator accelerator(anew());
    Fork net;
    auto model = accelerator.prepare(net);
    const auto wanted = means_of(net->parameters(), 2, [&](int r) {
      const auto [left, right] = net(input_of(r));
      return 2 * left + right;
    });
    const auto [left, right] = model(input_of(rank));
    {
      const auto alone = accelerator.no_sync(model);
      accelerator.backward(left, {.retain_graph = true});
    }
    accelerator.backward(left + right);
    expect_gradients(net->parameters(), wanted);
  });
}

torch::Tensor precise(int rank, int step) { return input_of(rank, step).to(torch::kDouble); }

/// One step of both players, with the gradient of the judge's answer punished.
struct Game {
  Mlp maker{3, 3};
  Mlp judge{3, 1};
  Game() {
    maker->to(torch::kDouble);
    judge->to(torch::kDouble);
  }

  torch::Tensor judging_loss(const torch::Tensor& real, const torch::Tensor& noise) {
    const auto seen = real.detach().requires_grad_(true);
    const auto answer = judge(seen);
    const auto slope = torch::autograd::grad({answer.sum()}, {seen}, {}, /*retain_graph=*/true,
                                             /*create_graph=*/true)[0];
    const auto made = maker(noise).detach();
    return torch::softplus(-answer).mean() + torch::softplus(judge(made)).mean() +
           slope.pow(2).sum(1).mean();
  }
  torch::Tensor making_loss(const torch::Tensor& noise) {
    return torch::softplus(-judge(maker(noise))).mean();
  }
};

TEST(AwkwardModels, TwoPlayersWithAnOptimizerEach) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    const auto real = [](int r, int step) { return precise(r, step).sin(); };
    const auto noise = [](int r, int step) { return precise(r, step + 3).cos(); };
    for (const bool aside : {false, true}) {
      Accelerator accelerator(anew());
      torch::manual_seed(4);
      Game game, alone;
      copy_parameters(alone.maker, game.maker);
      copy_parameters(alone.judge, game.judge);
      auto [maker, judge, making, judging] =
          accelerator.prepare(game.maker, game.judge, AdamW(game.maker->parameters(), {.lr = 1e-2}),
                              AdamW(game.judge->parameters(), {.lr = 1e-2}));
      AdamW plain_making(alone.maker->parameters(), {.lr = 1e-2});
      AdamW plain_judging(alone.judge->parameters(), {.lr = 1e-2});
      for (int step = 0; step < 5; ++step) {
        accelerator.backward(game.judging_loss(real(rank, step), noise(rank, step)));
        EXPECT_FALSE(game.maker->first->weight.grad().defined()) << "it was detached";
        judging.step();
        judging.zero_grad();
        {
          // The judge gets gradients of this loss as well: averaged for nothing, or left alone.
          const auto loss = game.making_loss(noise(rank, step));
          if (aside) {
            const auto scope = accelerator.no_sync(judge);
            accelerator.backward(loss);
          } else {
            accelerator.backward(loss);
          }
        }
        making.step();
        making.zero_grad();
        judging.zero_grad();

        for (int r = 0; r < 2; ++r) {
          (alone.judging_loss(real(r, step), noise(r, step)) / 2).backward();
        }
        plain_judging.step();
        plain_judging.zero_grad();
        for (int r = 0; r < 2; ++r) (alone.making_loss(noise(r, step)) / 2).backward();
        plain_making.step();
        plain_making.zero_grad();
        plain_judging.zero_grad();
        EXPECT_LT(distance(game.maker, alone.maker), 1e-10) << step;
        EXPECT_LT(distance(game.judge, alone.judge), 1e-10) << step;
      }
    }
  });
}

TEST(AwkwardModels, CheckpointedActivations) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    const auto all_hidden = [](Mlp& net, int r, int step) {
      const auto x = input_of(r, step).requires_grad_(true);
      auto first = net->first;
      auto second = net->second;
      const auto hidden =
          recomputed(x, [first](const torch::Tensor& t) mutable { return torch::tanh(first(t)); });
      const auto output =
          recomputed(hidden, [second](const torch::Tensor& t) mutable { return second(t); });
      return output.pow(2).mean();
    };
    const auto half_hidden = [](Mlp& net, int r, int step) {
      auto first = net->first;
      const auto hidden =
          recomputed(input_of(r, step).requires_grad_(true),
                     [first](const torch::Tensor& t) mutable { return torch::tanh(first(t)); });
      return net->second(hidden).pow(2).mean();
    };
    for (const bool views : {false, true}) {
      for (const auto* what : {"all of it", "a half"}) {
        Accelerator accelerator(
            averaging(Kwargs{.gradient_as_bucket_view = views, .static_graph = true}));
        if (std::string(what) == "a half") {
          expect_means(accelerator, Mlp(), Mlp(), half_hidden, what);
        } else {
          expect_means(accelerator, Mlp(), Mlp(), all_hidden, what);
        }
      }
    }
    // Otherwise it is said which parameters are hidden.
    Accelerator accelerator(anew());
    Mlp net;
    auto model = accelerator.prepare(net);
    auto message =
        message_of<ArgumentError>([&] { accelerator.backward(half_hidden(net, rank, 0)); });
    EXPECT_NE(message.find("first.weight, first.bias"), std::string::npos) << message;
    message = message_of<ArgumentError>([&] { accelerator.backward(all_hidden(net, rank, 0)); });
    EXPECT_NE(message.find("static_graph"), std::string::npos) << message;
    {
      const auto alone = accelerator.no_sync(model);
      accelerator.backward(all_hidden(net, rank, 0));
    }
    // Hidden ones look like unused ones, until their gradients come.
    Accelerator searching(averaging(Kwargs{.find_unused_parameters = true}));
    Mlp other;
    auto searched = searching.prepare(other);
    message = message_of<c10::Error>([&] { searching.backward(half_hidden(other, rank, 0)); });
    EXPECT_NE(message.find("static_graph"), std::string::npos) << message;
  });
}

TEST(AwkwardModels, ThreeOptimizersAndSeveralLossesInAStep) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    struct TemperatureImpl : torch::nn::Module {
      TemperatureImpl() { value = register_parameter("value", torch::zeros({1}, torch::kDouble)); }
      torch::Tensor value;
    };
    struct Agent {
      Mlp actor{3, 3}, critic{3, 1};
      std::shared_ptr<TemperatureImpl> temperature = std::make_shared<TemperatureImpl>();
      Agent() {
        actor->to(torch::kDouble);
        critic->to(torch::kDouble);
      }

      torch::Tensor value_loss(const torch::Tensor& x) { return (critic(x) - 1).pow(2).mean(); }
      torch::Tensor policy_loss(const torch::Tensor& action) {
        return (temperature->value.exp().detach() * action.pow(2).sum(1)).mean() -
               critic(action).mean();
      }
      torch::Tensor temperature_loss(const torch::Tensor& action) {
        return (temperature->value.exp() * (action.detach().pow(2).sum(1) - 0.5)).mean();
      }
    };
    Accelerator accelerator(anew());
    torch::manual_seed(6);
    Agent agent, alone;
    copy_parameters(alone.actor, agent.actor);
    copy_parameters(alone.critic, agent.critic);
    const auto adam = [](const auto& module, double lr) {
      return torch::optim::Adam(module->parameters(), torch::optim::AdamOptions(lr));
    };
    auto [actor, critic, temperature, acting, judging, heating] =
        accelerator.prepare(agent.actor, agent.critic, agent.temperature, adam(agent.actor, 1e-2),
                            adam(agent.critic, 2e-2), adam(agent.temperature, 3e-2));
    auto plain_acting = adam(alone.actor, 1e-2);
    auto plain_judging = adam(alone.critic, 2e-2);
    auto plain_heating = adam(alone.temperature, 3e-2);
    for (int step = 0; step < 4; ++step) {
      // Two losses of the critic in one step of it.
      accelerator.backward(agent.value_loss(precise(rank, step)));
      accelerator.backward(agent.value_loss(precise(rank, step + 1)));
      judging.step();
      judging.zero_grad();
      const auto action = actor(precise(rank, step));
      accelerator.backward(agent.policy_loss(action), {.retain_graph = true});
      accelerator.backward(agent.policy_loss(action));
      acting.step();
      acting.zero_grad();
      judging.zero_grad();
      accelerator.backward(agent.temperature_loss(action));
      heating.step();
      heating.zero_grad();

      for (int r = 0; r < 2; ++r) {
        ((alone.value_loss(precise(r, step)) + alone.value_loss(precise(r, step + 1))) / 2)
            .backward();
      }
      plain_judging.step();
      plain_judging.zero_grad();
      std::vector<torch::Tensor> actions;
      for (int r = 0; r < 2; ++r) {
        actions.push_back(alone.actor(precise(r, step)));
        alone.policy_loss(actions.back()).backward();  // two of them, over two processes
      }
      plain_acting.step();
      plain_acting.zero_grad();
      plain_judging.zero_grad();
      for (int r = 0; r < 2; ++r) (alone.temperature_loss(actions[r]) / 2).backward();
      plain_heating.step();
      plain_heating.zero_grad();
      EXPECT_LT(distance(agent.actor, alone.actor), 1e-10) << step;
      EXPECT_LT(distance(agent.critic, alone.critic), 1e-10) << step;
      EXPECT_LT(distance(agent.temperature, alone.temperature), 1e-10) << step;
    }
  });
}

TEST(AwkwardModels, AModelThatAStepDoesNotUse) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(anew());
    Mlp a, b;
    auto [first, second] = accelerator.prepare(a, b);
    const auto loss_of = [](Mlp& net, int r, int step) {
      return net(input_of(r, step)).pow(2).mean();
    };
    for (int step = 0; step < 6; ++step) {
      auto& used = step % 3 == 1 ? b : a;
      auto& idle = step % 3 == 1 ? a : b;
      forget_gradients(a->parameters());
      forget_gradients(b->parameters());
      const auto wanted =
          means_of(used->parameters(), 2, [&](int r) { return loss_of(used, r, step); });
      accelerator.backward(loss_of(used, rank, step));
      expect_gradients(used->parameters(), wanted);
      EXPECT_FALSE(idle->first->weight.grad().defined());
    }
    // A loss of something that is not prepared, on one process alone.
    if (rank == 1) {
      Mlp own;
      accelerator.backward(loss_of(own, rank, 0));
      EXPECT_TRUE(own->first->weight.grad().defined());
    }
    accelerator.wait_for_everyone();
  });
}

TEST(AwkwardModels, AnEncoderThatTwoModelsShare) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    struct HeadedImpl : torch::nn::Module {
      explicit HeadedImpl(const torch::nn::Linear& shared) : encoder(shared) {
        register_module("encoder", encoder);
        register_module("head", head);
      }
      torch::Tensor forward(const torch::Tensor& x) { return head(torch::tanh(encoder(x))); }
      torch::nn::Linear encoder, head{4, 1};
    };
    Accelerator accelerator(anew());
    torch::nn::Linear shared(3, 4);
    const auto a = std::make_shared<HeadedImpl>(shared);
    const auto b = std::make_shared<HeadedImpl>(shared);
    auto [actor, critic] = accelerator.prepare(a, b);
    std::vector<torch::Tensor> parameters;
    for (const auto& module : {shared, a->head, b->head}) {
      for (const auto& parameter : module->parameters()) parameters.push_back(parameter);
    }
    for (int step = 0; step < 3; ++step) {
      const auto loss_of = [&](int r) {
        return a->forward(input_of(r, step)).pow(2).mean() + b->forward(input_of(r, step)).mean();
      };
      const auto wanted = means_of(parameters, 2, loss_of);
      forget_gradients(parameters);
      accelerator.backward(loss_of(rank));
      expect_gradients(parameters, wanted, "shared");
    }
    const auto message =
        message_of<ArgumentError>([&] { accelerator.backward(a->forward(input_of(0)).mean()); });
    EXPECT_NE(message.find("head.weight, head.bias"), std::string::npos) << message;
  });
}

TEST(AwkwardModels, GradientsOfSomeInputsOnly) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const bool searches : {false, true}) {
      Accelerator accelerator(averaging(Kwargs{.find_unused_parameters = searches}));
      Mlp a(3, 3), b;
      auto [first, second] = accelerator.prepare(a, b);
      const auto loss_of = [&](int r) { return b(a(input_of(r))).pow(2).mean(); };
      // All of one model: the other one is left out.
      const auto wanted = means_of(a->parameters(), 2, loss_of);
      forget_gradients(b->parameters());
      accelerator.backward(loss_of(rank), {.inputs = a->parameters()});
      expect_gradients(a->parameters(), wanted);
      EXPECT_FALSE(b->first->weight.grad().defined());
      // A part of one: its average would wait for the rest.
      const auto message = message_of<ArgumentError>(
          [&] { accelerator.backward(loss_of(rank), {.inputs = b->first->parameters()}); });
      EXPECT_NE(message.find("inputs"), std::string::npos) << message;
      EXPECT_FALSE(b->first->weight.grad().defined());
      {
        const auto alone = accelerator.no_sync(second);
        accelerator.backward(loss_of(rank), {.inputs = b->first->parameters()});
        EXPECT_FALSE(gradients_same_everywhere(b->first->parameters()));
      }
      forget_gradients(b->parameters());
      forget_gradients(a->parameters());
      const auto both = means_of(b->parameters(), 2, loss_of);
      forget_gradients(a->parameters());
      accelerator.backward(loss_of(rank));
      expect_gradients(b->parameters(), both, "the next step is a plain one");
      expect_gradients(a->parameters(), wanted);
    }
  });
}

TEST(AwkwardModels, NumbersOfOtherKinds) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(anew());
    Mlp whole, alone;
    whole->to(torch::kDouble);
    alone->to(torch::kDouble);
    expect_means(
        accelerator, whole, alone,
        [](Mlp& net, int r, int step) { return net(precise(r, step)).pow(2).mean(); }, "double");
    EXPECT_EQ(whole->first->weight.scalar_type(), torch::kDouble);

    // Some of each.
    Mlp mixed, mixed_alone;
    mixed->second->to(torch::kDouble);
    mixed_alone->second->to(torch::kDouble);
    expect_means(
        accelerator, mixed, mixed_alone,
        [](Mlp& net, int r, int step) {
          return net->second(torch::tanh(net->first(input_of(r, step))).to(torch::kDouble))
              .pow(2)
              .mean();
        },
        "float and double");

    struct WaveImpl : torch::nn::Module {
      WaveImpl() { value = register_parameter("value", torch::ones({3}, torch::kComplexFloat)); }
      torch::Tensor value;
    };
    auto wave = std::make_shared<WaveImpl>();
    auto model = accelerator.prepare(wave);
    const auto loss_of = [&](int r) {
      return torch::real(wave->value * c10::complex<float>(1, static_cast<float>(r + 1))).sum();
    };
    const auto wanted = means_of(wave->parameters(), 2, loss_of);
    accelerator.backward(loss_of(rank));
    expect_gradients(wave->parameters(), wanted, "complex");
  });
}

TEST(AwkwardModels, GradientsThatAreViewsOfBuckets) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const bool to_none : {true, false}) {
      Accelerator accelerator(
          anew(AcceleratorOptions{.gradient_accumulation_steps = 2,
                                  .kwargs_handlers = {Kwargs{.gradient_as_bucket_view = true}}}));
      Mlp net, alone;
      auto [model, optimizer] = accelerator.prepare(
          net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)));
      copy_parameters(alone, net);
      torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 8; ++step) {
        const auto accumulating = accelerator.accumulate(model);
        accelerator.backward(model(input_of(rank, step)).pow(2).mean());
        if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 0.1);
        optimizer.step();
        optimizer.zero_grad(to_none);
        for (int r = 0; r < 2; ++r) {
          (alone(input_of(r, step)).pow(2).mean() / 4).backward();
        }
        if (step % 2 == 1) {
          torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.1);
          plain.step();
          plain.zero_grad();
        }
        EXPECT_LT(distance(net, alone), 1e-6) << to_none << " " << step;
      }
      EXPECT_EQ(net->first->weight.grad().defined(), !to_none);
    }
  });
}

// ---- what cannot go well ------------------------------------------------------------------------

/// All ranks that do not end well end soon, and one of them at least says `text`.
void expect_told(const std::vector<RankOutcome>& outcomes, const std::string& text) {
  bool told = false;
  bool failed = false;
  std::string all;
  for (const auto& outcome : outcomes) {
    EXPECT_FALSE(outcome.timed_out);
    EXPECT_LT(outcome.seconds, test::patient(test::Seconds(10)).count());
    told |= outcome.output_contains(text);
    failed |= !outcome.ok();
    all += outcome.output + "----\n";
  }
  EXPECT_TRUE(failed) << all;
  EXPECT_TRUE(told) << "nobody says '" << text << "':\n" << all;
}

TEST(AwkwardModels, ALossThatReachesNoModelOnOneProcess) {
  const OnProcessesOptions options{.timeout = std::chrono::seconds(30)};
  const auto outcomes = run_processes(2, options, [](PartialState& state) {
    Accelerator accelerator(anew());
    Mlp net, other;
    auto model = accelerator.prepare(net);
    for (int step = 0; step < 3; ++step) {
      auto& used = state.process_index() == 1 && step == 1 ? other : net;
      accelerator.backward(used(input_of(0)).sum());
    }
    accelerator.wait_for_everyone();
  });
  expect_told(outcomes, "rank 1");
  expect_told(outcomes, "backward");
}

TEST(AwkwardModels, AParameterThatOneProcessDoesNotUse) {
  const OnProcessesOptions options{.timeout = std::chrono::seconds(30)};
  const auto outcomes = run_processes(2, options, [](PartialState& state) {
    Accelerator accelerator(anew());
    Fork net;
    auto model = accelerator.prepare(net);
    accelerator.backward(both_heads(net, 0, 0));
    accelerator.backward(state.process_index() == 1 ? one_head(net, 0, 1) : both_heads(net, 0, 1));
  });
  expect_told(outcomes, "right.weight, right.bias");
}

TEST(AwkwardModels, MoreBatchesOnOneProcess) {
  const OnProcessesOptions options{.timeout = std::chrono::seconds(30)};
  const auto outcomes = run_processes(2, options, [](PartialState&) {
    Accelerator accelerator(anew(AcceleratorOptions{.dataloader_config = {.even_batches = false}}));
    Mlp net;
    auto [model, loader] = accelerator.prepare(net, make_data_loader(torch::rand({3, 3})));
    for (auto& x : loader) accelerator.backward(model(x).sum());
    accelerator.wait_for_everyone();
  });
  expect_told(outcomes, "rank 1");
}

TEST(AwkwardModels, AnErrorInBackward) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(anew());
    Mlp net, alone;
    auto model = accelerator.prepare(net);
    copy_parameters(alone, net);
    const auto loss_of = [](Mlp& one, int r) { return one(input_of(r)).pow(2).mean(); };
    const auto fail = [&] {
      auto output = net->first(input_of(rank));
      output.register_hook([](const torch::Tensor&) { throw std::runtime_error("in a hook"); });
      accelerator.backward(net->second(output).pow(2).mean());
    };
    for (int round = 0; round < 2; ++round) {
      accelerator.backward(loss_of(net, rank));
      EXPECT_NE(message_of<std::runtime_error>(fail).find("in a hook"), std::string::npos);
      // It is said, also twice, until the model is prepared anew.
      for (int i = 0; i < 2; ++i) {
        const auto message =
            message_of<StateError>([&] { accelerator.backward(loss_of(net, rank)); });
        EXPECT_NE(message.find("free_memory"), std::string::npos) << message;
      }
      accelerator.free_memory(model);
      model = accelerator.prepare(net);
      forget_gradients(net->parameters());
      accelerator.backward(loss_of(net, rank));
      expect_gradients(net->parameters(),
                       means_of(alone->parameters(), 2, [&](int r) { return loss_of(alone, r); }),
                       "after an error");
      // What is not averaged does not mind.
      const auto alone_scope = accelerator.no_sync(model);
      EXPECT_NE(message_of<std::runtime_error>(fail).find("in a hook"), std::string::npos);
      accelerator.backward(loss_of(net, rank));
      forget_gradients(net->parameters());
    }
  });
}

}  // namespace
}  // namespace accelerate
