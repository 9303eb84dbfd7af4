// The members of Accelerator that are about several processes.
#include "accelerate/accelerator.h"

#include <accelerate/accelerate.h>
#include <accelerate/local_sgd.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "modeling/outline.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::anew;
using test::averaging;
using test::copy_parameters;
using test::distance;
using test::expect_gradients;
using test::forget_gradients;
using test::gradients_same_everywhere;
using test::input_of;
using test::means_of;
using test::message_of;
using test::Mlp;
using test::same_everywhere;

torch::Tensor loss_of(Mlp& net, int rank, int step = 0) {
  return net(input_of(rank, step)).pow(2).mean();
}

template <class Model>
torch::Tensor loss_of(const PreparedModel<Model>& model, int rank, int step = 0) {
  return model(input_of(rank, step)).pow(2).mean();
}

std::vector<torch::Tensor> sum_of(std::vector<torch::Tensor> a,
                                  const std::vector<torch::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = a[i] + b[i];
  return a;
}

TEST(AcceleratorOnProcesses, RefusesModelsThatAreSpreadOverDevices) {
  on_processes(2, [] {
    Accelerator accelerator(anew());
    Mlp net;
    detail::modeling::set_device_map(net.ptr(), DeviceMap{{"first", 0}, {"second", "cpu"}});
    EXPECT_EQ(message_of<ArgumentError>([&] { (void)accelerator.prepare(net); }),
              "You can't train a model that has been loaded with `device_map='auto'` in any "
              "distributed mode. Please rerun your program with `--num_processes=1`.");
    ::setenv("ACCELERATE_BYPASS_DEVICE_MAP", "true", 1);
    (void)accelerator.prepare(net);
  });
}

// ---- when gradients are averaged ----------------------------------------------------------------

TEST(AcceleratorOnProcesses, LeavesGradientsWithTheProcessUnderNoSync) {
  on_processes(2, [](PartialState& state) {
    Accelerator accelerator(anew());
    const int rank = state.process_index();
    Mlp net;
    auto model = accelerator.prepare(net);
    const auto parameters = net->parameters();
    const auto mean = [&](int step) {
      return means_of(parameters, 2, [&](int r) { return loss_of(net, r, step); });
    };
    for (int round = 0; round < 3; ++round) {
      forget_gradients(parameters);
      {
        const auto alone = accelerator.no_sync(model);
        accelerator.backward(loss_of(model, rank, 0));
        EXPECT_FALSE(gradients_same_everywhere(parameters));
        {
          const auto triggered = Accelerator::trigger_sync_in_backward(model);
          const auto inner = accelerator.no_sync(model);
          accelerator.backward(loss_of(model, rank, 1));
          EXPECT_FALSE(gradients_same_everywhere(parameters)) << "the innermost scope counts";
        }
        accelerator.backward(loss_of(model, rank, 2));
        EXPECT_FALSE(gradients_same_everywhere(parameters)) << "it is restored";
      }
      accelerator.backward(loss_of(model, rank, 3));
      expect_gradients(parameters, sum_of(sum_of(mean(0), mean(1)), sum_of(mean(2), mean(3))));
    }
    // Nothing is sent: one process may do it alone.
    if (rank == 0) {
      const auto alone = accelerator.no_sync(model);
      accelerator.backward(loss_of(model, rank));
    }
    // A scope that an exception leaves is over as well.
    try {
      const auto alone = accelerator.no_sync(model);
      throw std::runtime_error("left");
    } catch (const std::runtime_error&) {
    }
    forget_gradients(parameters);
    accelerator.backward(loss_of(model, rank));
    expect_gradients(parameters, mean(0));
    accelerator.wait_for_everyone();
  });
}

TEST(AcceleratorOnProcesses, AveragesALossWhoseForwardRanUnderNoSync) {
  on_processes(2, [](PartialState& state) {
    Accelerator accelerator(anew());
    const int rank = state.process_index();
    Mlp net;
    auto model = accelerator.prepare(net);
    const auto parameters = net->parameters();
    std::vector<torch::Tensor> losses;
    const auto alone = accelerator.no_sync(model);
    for (int step = 0; step < 3; ++step) losses.push_back(loss_of(model, rank, step));
    accelerator.backward(losses[0]);
    accelerator.backward(losses[1]);
    EXPECT_FALSE(gradients_same_everywhere(parameters));
    {
      const auto triggered = Accelerator::trigger_sync_in_backward(model);
      accelerator.backward(losses[2]);
    }
    std::vector<torch::Tensor> wanted;
    for (int step = 0; step < 3; ++step) {
      auto mean = means_of(parameters, 2, [&](int r) { return loss_of(net, r, step); });
      wanted = step == 0 ? mean : sum_of(wanted, mean);
    }
    expect_gradients(parameters, wanted);
    accelerator.backward(loss_of(model, rank));
    EXPECT_FALSE(gradients_same_everywhere(parameters)) << "the outer scope is back";
  });
}

TEST(AcceleratorOnProcesses, AccumulatesSeveralModelsAndOnlyThose) {
  on_processes(2, [](PartialState& state) {
    for (const bool each_batch : {false, true}) {
      Accelerator accelerator(anew({.gradient_accumulation_plugin = GradientAccumulationPlugin{
                                        .num_steps = 2, .sync_each_batch = each_batch}}));
      const int rank = state.process_index();
      Mlp a, b, c;
      auto [first, second, third] = accelerator.prepare(a, b, c);
      for (int step = 0; step < 4; ++step) {
        const auto accumulating = accelerator.accumulate(first, second);
        accelerator.backward(loss_of(first, rank, step));
        accelerator.backward(loss_of(second, rank, step) + loss_of(third, rank, step));
        const bool averaged = step % 2 == 1;
        EXPECT_EQ(accelerator.sync_gradients(), averaged) << "once for all models";
        for (const auto& net : {a, b}) {
          EXPECT_EQ(gradients_same_everywhere(net->parameters()), averaged || each_batch) << step;
        }
        EXPECT_TRUE(gradients_same_everywhere(c->parameters())) << "it was not named";
        if (!averaged) continue;
        for (auto* net : {&a, &b}) {
          const auto parameters = (*net)->parameters();
          const auto mean = [&](int at) {
            return means_of(parameters, 2, [&](int r) { return loss_of(*net, r, at) / 2; });
          };
          expect_gradients(parameters, sum_of(mean(step - 1), mean(step)));
          forget_gradients(parameters);
        }
        forget_gradients(c->parameters());
      }
    }
  });
}

TEST(AcceleratorOnProcesses, NestedLoadersEndTheirOwnWindows) {
  on_processes(2, [](PartialState&) {
    Accelerator accelerator(anew({.gradient_accumulation_steps = 2}));
    const auto data = torch::arange(12, torch::kFloat);
    auto [outer, inner] = accelerator.prepare(make_data_loader(data, {.batch_size = 2}),
                                              make_data_loader(data.slice(0, 0, 4)));
    Mlp net;
    auto model = accelerator.prepare(net);
    std::string synced;
    for ([[maybe_unused]] auto& batch : outer) {
      {
        const auto accumulating = accelerator.accumulate(model);
        synced += accelerator.sync_gradients() ? '1' : '0';
      }
      if (accelerator.gradient_state().end_of_dataloader()) continue;
      for ([[maybe_unused]] auto& other : inner) {
        EXPECT_EQ(accelerator.gradient_state().active_dataloader(), inner._core());
      }
      EXPECT_EQ(accelerator.gradient_state().active_dataloader(), outer._core());
    }
    EXPECT_EQ(synced, "011");
    EXPECT_EQ(accelerator.gradient_state().active_dataloader(), nullptr);
  });
}

// ---- data and agreement -------------------------------------------------------------------------

TEST(AcceleratorOnProcesses, GathersReducesAndPads) {
  on_processes(3, [](PartialState& state) {
    Accelerator accelerator(anew());
    const int rank = accelerator.process_index();
    EXPECT_EQ(rank, state.process_index());
    EXPECT_EQ(accelerator.num_processes(), 3);
    EXPECT_EQ(accelerator.distributed_type(), DistributedType::kMultiCpu);
    EXPECT_TRUE(accelerator.use_distributed());
    EXPECT_FALSE(accelerator.multi_device());
    EXPECT_EQ(accelerator.is_last_process(), rank == 2);
    EXPECT_EQ(accelerator.should_save_model(), rank == 0);

    const auto own = torch::full({2}, rank, torch::kFloat);
    EXPECT_TRUE(
        torch::equal(accelerator.gather(own), torch::tensor({0, 0, 1, 1, 2, 2}, torch::kFloat)));
    EXPECT_TRUE(
        torch::equal(accelerator.gather(torch::tensor(rank)), torch::arange(3, torch::kInt)));
    EXPECT_TRUE(torch::equal(accelerator.reduce(own), torch::full({2}, 3.0F))) << "sums by default";
    EXPECT_TRUE(torch::equal(accelerator.reduce(own, Reduction::kMean), torch::ones({2})));
    EXPECT_EQ(own[0].item<int>(), rank) << "the argument stays";
    const auto padded = accelerator.pad_across_processes(torch::ones({rank + 1}), {.pad_index = 9});
    EXPECT_EQ(padded.size(0), 3);
    EXPECT_EQ(padded.eq(9).sum().item<int>(), 2 - rank);

    // Only one wants to.
    EXPECT_FALSE(accelerator.agree_to_stop(false));
    for (int one = 0; one < 3; ++one) EXPECT_TRUE(accelerator.agree_to_stop(rank == one));
    EXPECT_FALSE(accelerator.agree_to_stop(false));
    EXPECT_FALSE(accelerator.check_trigger());
    for (int one = 0; one < 3; ++one) {
      if (rank == one) accelerator.set_trigger();
      EXPECT_TRUE(accelerator.check_trigger()) << one;
      EXPECT_FALSE(accelerator.check_trigger()) << one;
    }

    // All leave a loop with the first.
    int steps = 0;
    while (!accelerator.agree_to_stop(steps >= 5 - rank)) ++steps;
    EXPECT_EQ(steps, 3);

    EXPECT_EQ(accelerator.split_between_processes(std::vector<int>{0, 1, 2, 3, 4, 5}),
              (std::vector<int>{2 * rank, 2 * rank + 1}));
  });
}

TEST(AcceleratorOnProcesses, RunsPartsOnChosenProcesses) {
  on_processes(2, [](PartialState&) {
    Accelerator accelerator(anew());
    const int rank = accelerator.process_index();
    std::string seen;
    accelerator.on_main_process([&] { seen += 'm'; })();
    accelerator.on_local_main_process([&] { seen += 'l'; })();
    accelerator.on_last_process([&] { seen += 'e'; })();
    accelerator.on_process([&] { seen += '1'; }, 1)();
    accelerator.on_local_process([&] { seen += '0'; }, 0)();
    EXPECT_EQ(seen, rank == 0 ? "ml0" : "e1");
    EXPECT_EQ(accelerator.on_process(1)([] { return 7; })().has_value(), rank == 1);
    EXPECT_EQ(accelerator.on_local_process(0)([](int x) { return x; })(7).has_value(), rank == 0);

    // The others come when the main process is through.
    const auto now = [] {
      return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    };
    const auto expect_order = [&](const auto& first) {
      std::vector<std::int64_t> times;
      first([&] {
        times.push_back(now());
        if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
        times.push_back(now());
      });
      const auto all = all_gather_object(times);
      EXPECT_LE(all[0][1], all[1][0]);
    };
    expect_order([&](const auto& f) { accelerator.main_process_first(f); });
    expect_order([&](const auto& f) { accelerator.local_main_process_first(f); });

    testing::internal::CaptureStdout();
    accelerator.print("a line of process ", rank);
    const auto text = testing::internal::GetCapturedStdout();
    EXPECT_EQ(text.find("a line") != std::string::npos, rank == 0) << text;
  });
}

TEST(AcceleratorOnProcesses, EndTheProcessGroupWithTheTraining) {
  on_processes(2, [] {
    Accelerator accelerator(anew());
    EXPECT_EQ(accelerator.gather(torch::ones({1})).numel(), 2);
    accelerator.end_training();
    EXPECT_NE(message_of<StateError>([&] {
                (void)accelerator.gather(torch::ones({1}));
              }).find("it was destroyed"),
              std::string::npos);
    accelerator.end_training();  // a second one finds nothing to end
  });
}

TEST(AcceleratorOnProcesses, TwoOfThemShareTheState) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator first(anew({.gradient_accumulation_steps = 2}));
    Accelerator second(AcceleratorOptions{.cpu = true});
    EXPECT_EQ(second.gradient_accumulation_steps(), 2);
    Mlp a, b;
    auto model = first.prepare(a);
    auto other = second.prepare(b);
    EXPECT_EQ(second.prepare(model)._core(), model._core()) << "prepared once";
    first.set_gradient_accumulation_steps(1);

    second.backward(loss_of(model, rank) + loss_of(other, rank));
    expect_gradients(a->parameters(),
                     means_of(a->parameters(), 2, [&](int r) { return loss_of(a, r); }));
    expect_gradients(b->parameters(),
                     means_of(b->parameters(), 2, [&](int r) { return loss_of(b, r); }));

    const auto accumulating = [&] {
      first.set_gradient_accumulation_steps(2);
      return first.accumulate(model);
    }();
    EXPECT_FALSE(second.sync_gradients());
  });
}

TEST(AcceleratorOnProcesses, IsMadeAfterOneThatFailedAndRefusesEnginesThatComeLate) {
  on_processes(2, [] {
    EXPECT_NE(message_of<ConfigError>([] {
                Accelerator wrong({.parallelism_config = {{.dp_replicate_size = 3}}});
              }).find("the run has 2 processes"),
              std::string::npos);
    EXPECT_FALSE(PartialState::initialized());
    Accelerator first;
    EXPECT_EQ(first.num_processes(), 2);
    EXPECT_NE(message_of<ConfigError>([] {
                Accelerator second({.fsdp_plugin = FullyShardedDataParallelPlugin{}});
              }).find("already set up without this fsdp_plugin"),
              std::string::npos);
    EXPECT_NE(message_of<ConfigError>([] {
                Accelerator second({.parallelism_config = {{.dp_replicate_size = 7}}});
              }).find("multiply to 7"),
              std::string::npos);
    EXPECT_EQ(first.distributed_type(), DistributedType::kMultiCpu);
    first.wait_for_everyone();
  });
}

// ---- LocalSGD -----------------------------------------------------------------------------------

TEST(AcceleratorOnProcesses, AveragesParametersNowAndThen) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    const auto options = torch::optim::SGDOptions(0.1);
    for (const int accumulation : {1, 2}) {
      Accelerator accelerator(anew({.gradient_accumulation_steps = accumulation}));
      Mlp net;
      std::vector<Mlp> alone{Mlp(), Mlp()};
      auto [model, optimizer] =
          accelerator.prepare(net, torch::optim::SGD(net->parameters(), options));
      for (auto& one : alone) copy_parameters(one, net);
      torch::optim::SGD plain(alone[0]->parameters(), options);
      plain.add_param_group(torch::optim::OptimizerParamGroup(alone[1]->parameters()));
      const auto average = [&] {
        const torch::NoGradGuard no_grad;
        auto a = alone[0]->parameters(), b = alone[1]->parameters();
        for (std::size_t i = 0; i < a.size(); ++i) {
          const auto mean = (a[i] + b[i]) / 2;
          a[i].copy_(mean);
          b[i].copy_(mean);
        }
      };
      run_local_sgd(accelerator, model, {.local_sgd_steps = 3},
                    [&, &model = model, &optimizer = optimizer](LocalSGD& local) {
                      for (int step = 1; step <= 7; ++step) {
                        const auto accumulating = accelerator.accumulate(model);
                        accelerator.backward(loss_of(model, rank, step));
                        optimizer.step();
                        optimizer.zero_grad();
                        local.step();
                        for (int r = 0; r < 2; ++r)
                          (loss_of(alone[r], r, step) / accumulation).backward();
                        if (step % accumulation == 0) {
                          plain.step();
                          plain.zero_grad();
                        }
                        if (step % 3 == 0) average();
                        EXPECT_LT(distance(net, alone[rank]), 1e-6) << step;
                        const bool stepped_since =
                            step % 3 != 0 && (accumulation == 1 || step % 3 == 2 || step == 4);
                        EXPECT_EQ(same_everywhere(net->parameters()), !stepped_since) << step;
                      }
                      EXPECT_EQ(local.num_steps(), 7);
                    });
      average();
      EXPECT_LT(distance(net, alone[0]), 1e-6);
      EXPECT_TRUE(same_everywhere(net->parameters()));

      // Gradients are averaged again.
      accelerator.set_gradient_accumulation_steps(1);
      forget_gradients(net->parameters());
      accelerator.backward(loss_of(model, rank));
      EXPECT_TRUE(gradients_same_everywhere(net->parameters()));
    }
  });
}

TEST(AcceleratorOnProcesses, LeavesLocalStepsWithoutWaitingAfterAnError) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    // The processes go on with parameters that differ.
    Accelerator accelerator(anew({.drift_check = 0}));
    Mlp net;
    auto model = accelerator.prepare(net);
    const auto train = [&](LocalSGD& local) {
      accelerator.backward(loss_of(model, rank));
      {
        const torch::NoGradGuard no_grad;
        net->first->bias.add_(rank);
      }
      local.step();
      throw std::runtime_error("no more data");
    };
    // On one process alone: nothing is sent on the way out.
    if (rank == 1) {
      EXPECT_EQ(message_of<std::runtime_error>(
                    [&] { run_local_sgd(accelerator, model, {.local_sgd_steps = 5}, train); }),
                "no more data");
    }
    EXPECT_FALSE(same_everywhere(net->first->bias)) << "nothing was averaged";
    accelerator.backward(loss_of(model, rank));
    EXPECT_TRUE(model._core()->synchronizes) << "no_sync is over";

    EXPECT_NE(message_of<ArgumentError>([&] {
                run_local_sgd(accelerator, model, {.local_sgd_steps = 0}, [](LocalSGD&) {});
              }).find("local_sgd_steps is 0"),
              std::string::npos);
    forget_gradients(net->parameters());
    run_local_sgd(accelerator, model, {.local_sgd_steps = 1, .enabled = false},
                  [&](LocalSGD& local) {
                    EXPECT_FALSE(local.enabled());
                    accelerator.backward(loss_of(model, rank));
                    EXPECT_TRUE(gradients_same_everywhere(net->second->parameters()));
                    local.step();
                    EXPECT_EQ(local.num_steps(), 1);
                  });
    EXPECT_FALSE(same_everywhere(net->first->bias)) << "switched off it averages nothing";
  });
}

// ---- how gradients are averaged -----------------------------------------------------------------

TEST(AcceleratorOnProcesses, TakesTheKwargsOfDistributedDataParallel) {
  on_processes(2, [](PartialState& state) {
    using Hook = DDPCommunicationHookType;
    const int rank = state.process_index();
    const auto run = [&](const DistributedDataParallelKwargs& kwargs, double tolerance,
                         const char* what) {
      Accelerator accelerator(averaging(kwargs));
      Mlp net;
      auto [model, optimizer] = accelerator.prepare(
          net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.05)));
      for (int step = 0; step < 4; ++step) {
        const auto wanted =
            means_of(net->parameters(), 2, [&](int r) { return loss_of(net, r, step); });
        accelerator.backward(loss_of(model, rank, step));
        expect_gradients(net->parameters(), wanted, what, tolerance);
        EXPECT_TRUE(gradients_same_everywhere(net->parameters())) << what;
        optimizer.step();
        optimizer.zero_grad();
      }
    };
    run({}, 1e-6, "plain");
    run({.bucket_cap_mb = 15}, 1e-6, "bucket_cap_mb");
    run({.find_unused_parameters = true}, 1e-6, "find_unused_parameters");
    run({.gradient_as_bucket_view = true}, 1e-6, "gradient_as_bucket_view");
    run({.static_graph = true}, 1e-6, "static_graph");
    for (const auto wrapper : {Hook::kNo, Hook::kFp16, Hook::kBf16}) {
      run({.comm_hook = Hook::kFp16, .comm_wrapper = wrapper}, 2e-2, "fp16");
      run({.comm_hook = Hook::kBf16, .comm_wrapper = wrapper}, 2e-2, "bf16");
      run({.comm_hook = Hook::kPowerSgd, .comm_wrapper = wrapper}, 2e-2, "power_sgd");
      run({.comm_hook = Hook::kBatchedPowerSgd, .comm_wrapper = wrapper}, 2e-2, "batched");
    }
    // It is the hook that rounds.
    Accelerator accelerator(averaging(DistributedDataParallelKwargs{.comm_hook = Hook::kFp16}));
    torch::nn::Linear one(torch::nn::LinearOptions(1, 1).bias(false));
    auto model = accelerator.prepare(one);
    accelerator.backward(model(torch::full({1, 1}, 0.3)).sum());
    EXPECT_EQ(one->weight.grad().item<double>(), 0.300048828125);
  });
}

TEST(AcceleratorOnProcesses, GivesAllProcessesTheStatisticsOfTheFirst) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const bool broadcasts : {true, false}) {
      Accelerator accelerator(
          averaging(DistributedDataParallelKwargs{.broadcast_buffers = broadcasts}));
      torch::nn::BatchNorm1d alone(3), net(3);
      {
        const torch::NoGradGuard no_grad;
        net->running_mean.fill_(rank);
        net->weight.fill_(1 + rank);
      }
      auto model = accelerator.prepare(net);
      EXPECT_TRUE(same_everywhere(model.buffers())) << "at the start always";
      EXPECT_EQ(net->weight[0].item<float>(), 1);
      for (int step = 0; step < 3; ++step) {
        accelerator.backward(model(input_of(rank, step)).pow(3).sum());
        (void)alone(input_of(0, step));
      }
      EXPECT_EQ(same_everywhere(net->running_mean), broadcasts);
      const bool as_first = broadcasts || rank == 0;
      EXPECT_EQ(torch::allclose(net->running_mean, alone->running_mean), as_first);
      EXPECT_EQ(net->num_batches_tracked.item<int>(), 3);
    }
  });
}

TEST(AcceleratorOnProcesses, NamesWhatIsAnotherModelElsewhere) {
  on_processes(2, [](PartialState& state) {
    Accelerator accelerator(anew());
    const int rank = state.process_index();
    const auto message =
        message_of<CommError>([&] { (void)accelerator.prepare(Mlp(3, rank == 0 ? 2 : 5)); });
    EXPECT_NE(message.find("second.weight float32[2, 4] on rank 0 and second.weight float32[5, 4] "
                           "on rank 1"),
              std::string::npos)
        << message;
    // The run can go on.
    Mlp net;
    auto model = accelerator.prepare(net);
    accelerator.backward(loss_of(model, rank));
    EXPECT_TRUE(gradients_same_everywhere(net->parameters()));
  });
}

TEST(AcceleratorOnProcesses, NamesPrepareWithoutALineOfThisLibraryWhenARankStrays) {
  on_processes(2, [](PartialState& state) {
    Accelerator accelerator(anew());
    const auto message = message_of<CommError>([&] {
      if (state.process_index() == 0) {
        (void)accelerator.prepare(Mlp());
      } else {
        accelerator.wait_for_everyone();
      }
    });
    EXPECT_NE(message.find("gather_object named 'prepare'\n"), std::string::npos) << message;
    EXPECT_NE(message.find("barrier at accelerator_multi_test.cpp:"), std::string::npos) << message;
  });
}

TEST(AcceleratorOnProcesses, TakesTheObjectsInAnyOrder) {
  on_processes(2, [](PartialState& state) {
    Accelerator accelerator(anew());
    torch::manual_seed(state.process_index());  // process 0 decides
    Mlp net;
    auto adamw = AdamW(net->parameters(), {.lr = 0.1});
    auto data = make_data_loader(torch::arange(24, torch::kFloat).view({8, 3}), {.batch_size = 2});
    auto schedule = StepLR(adamw, {.step_size = 1});
    auto [loader, scheduler, optimizer, model] =
        accelerator.prepare(data, std::move(schedule), std::move(adamw), net);
    int batches = 0;
    for (auto& x : loader) {
      accelerator.backward(model(x).pow(2).mean());
      EXPECT_TRUE(gradients_same_everywhere(net->parameters()));
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      ++batches;
    }
    EXPECT_EQ(batches, 2);
    EXPECT_TRUE(same_everywhere(net->parameters()));
    EXPECT_NEAR(scheduler.get_last_lr()[0], 1e-5, 1e-12) << "two steps for each of two calls";
  });
}

TEST(AcceleratorOnProcesses, SendsNothingForAModelThatIsOnlyEvaluated) {
  on_processes(2, [](PartialState& state) {
    Accelerator accelerator(anew());
    if (state.process_index() == 0) {  // one process alone: nobody would answer
      Mlp net;
      auto model = accelerator.prepare_model(net, {.evaluation_mode = true});
      EXPECT_EQ(model._core()->engine, nullptr);
      accelerator.backward(loss_of(model, 0));
      expect_gradients(net->parameters(),
                       means_of(net->parameters(), 1, [&](int) { return loss_of(net, 0); }));

      Mlp frozen;
      for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
      auto constant = accelerator.prepare(frozen);
      EXPECT_FALSE(constant(input_of(0)).requires_grad());
      auto input = input_of(0).requires_grad_(true);
      accelerator.backward(constant(input).sum());
      EXPECT_TRUE(input.grad().defined());
    }
    accelerator.wait_for_everyone();
  });
}

// ---- parameters that grow -----------------------------------------------------------------------

struct PointsImpl : torch::nn::Module {
  PointsImpl() {
    torch::manual_seed(1);
    means = register_parameter("means", torch::rand({4, 2}));
    colors = register_parameter("colors", torch::rand({4, 3}));
  }
  torch::Tensor forward(const torch::Tensor& view) {
    return (torch::sigmoid(means.matmul(view)).unsqueeze(1) * colors).sum(0);
  }
  torch::Tensor means, colors;
};
TORCH_MODULE(Points);

TEST(AcceleratorOnProcesses, TrainsOnWithPointsThatWereAdded) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const bool is_static : {false, true}) {
      Accelerator accelerator(averaging(DistributedDataParallelKwargs{.static_graph = is_static}));
      const AdamWOptions options{.lr = 0.01};
      Points net;
      auto [model, optimizer] = accelerator.prepare(net, AdamW(net->parameters(), options));
      Points alone;
      auto plain = std::make_unique<AdamW>(alone->parameters(), options);
      const auto view = [](int r, int step) { return torch::tensor({1.0F + r, 2.0F - step}); };
      const auto target = torch::tensor({1.0F, 2.0F, 3.0F});
      int step = 0;
      const auto train = [&, &model = model, &optimizer = optimizer](int steps) {
        for (const int end = step + steps; step < end; ++step) {
          accelerator.backward((model(view(rank, step)) - target).pow(2).sum());
          optimizer.step();
          optimizer.zero_grad();
          for (int r = 0; r < 2; ++r) {
            ((alone(view(r, step)) - target).pow(2).sum() / 2).backward();
          }
          plain->step();
          plain->zero_grad();
          EXPECT_LT(distance(net, alone), 1e-5) << step;
        }
      };
      train(3);
      // Point 1 is split in two, point 3 goes; means and colors with what the optimizer knows.
      const auto kept = torch::tensor({0, 1, 1, 2, 1});
      const auto rows = [&](const std::string&, const torch::Tensor& old) {
        return old.index_select(0, kept);
      };
      for (const std::string name : {"means", "colors"}) {
        const auto& own = name == "means" ? net->means : net->colors;
        // What process 1 brings along is not what counts.
        model.replace_parameter(name, own.detach().index_select(0, kept) + rank, {.state = rows});
      }
      EXPECT_EQ(net->means.size(0), 5);
      EXPECT_TRUE(same_everywhere(net->parameters()));

      // The reference is built anew, with the states put in.
      std::vector<NamedTensors> states;
      for (auto* parameter : {&alone->means, &alone->colors}) {
        states.push_back(plain->state_of(*parameter));
        const torch::NoGradGuard no_grad;
        parameter->set_data(parameter->detach().index_select(0, kept));
        parameter->mutable_grad() = torch::Tensor();
        for (auto& [name, tensor] : states.back()) {
          if (tensor.dim() > 0) tensor = tensor.index_select(0, kept);
        }
      }
      Points fresh;
      fresh->means.set_data(alone->means.detach().clone());
      fresh->colors.set_data(alone->colors.detach().clone());
      alone = fresh;
      plain = std::make_unique<AdamW>(alone->parameters(), options);
      plain->set_state_of(alone->means, states[0]);
      plain->set_state_of(alone->colors, states[1]);
      train(4);

      // Processes that do not agree are told.
      const auto message = message_of<CommError>(
          [&, &model = model] { model.replace_parameter("means", torch::zeros({5 + rank, 2})); });
      EXPECT_NE(message.find("means float32[5, 2] on rank 0 and means float32[6, 2] on rank 1"),
                std::string::npos)
          << message;
    }
  });
}

}  // namespace
}  // namespace accelerate
