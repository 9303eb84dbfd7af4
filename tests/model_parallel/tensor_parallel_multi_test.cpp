// Models whose layers a plan cuts train as one process does, and their checkpoints fit any cut.
#include <accelerate/accelerate.h>
#include <accelerate/parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "examples/gpt_model.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using examples::Gpt;
using examples::GptConfig;
using test::anew;
using test::message_of;
using torch::Tensor;

constexpr std::int64_t kGlobalBatch = 4;
constexpr double kMaxNorm = 0.05;
const GptConfig kConfig{.vocab = 24, .block = 8, .layers = 2, .heads = 4, .width = 16};

TpPlan gpt_plan(bool tied) {
  TpPlan plan{{"tokens", TpStyle::kVocab},
              {"blocks.*.attend", TpStyle::kColwise, 3},
              {"blocks.*.attend_out", TpStyle::kRowwise},
              {"blocks.*.expand", TpStyle::kColwise},
              {"blocks.*.expand_out", TpStyle::kRowwise}};
  if (!tied) plan.push_back({"head", TpStyle::kColwiseRep});
  return plan;
}

std::pair<Tensor, Tensor> words() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  const auto all = torch::randint(24, {48, 9}, generator, torch::TensorOptions(torch::kLong));
  return {all.slice(1, 0, 8).clone(), all.slice(1, 1).clone()};
}

Tensor loss_of(const Tensor& scores, const Tensor& targets) {
  return torch::nn::functional::cross_entropy(scores.flatten(0, 1), targets.flatten());
}

Gpt make_gpt(bool tied) {
  torch::manual_seed(5);
  auto config = kConfig;
  config.tied = tied;
  Gpt net(config);
  net->to(torch::kDouble);
  return net;
}

struct Trained {
  std::vector<double> losses;
  std::vector<double> norms;
  StateDict state{"Tensor"};
};

/// One process, without an accelerator.
Trained serial(int steps, int accumulate, bool tied) {
  auto net = make_gpt(tied);
  AdamW optimizer(net->parameters(), {.lr = 1e-2});
  const auto [inputs, targets] = words();
  Trained result;
  std::int64_t first = 0;
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < accumulate; ++i, first += kGlobalBatch) {
      const auto loss = loss_of(net(inputs.narrow(0, first, kGlobalBatch)),
                                targets.narrow(0, first, kGlobalBatch));
      (loss / accumulate).backward();
      result.losses.push_back(loss.item<double>());
    }
    result.norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), kMaxNorm));
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const auto& entry : state_dict(*net)) {
    result.state.insert(entry.key(), entry.value().detach().clone());
  }
  return result;
}

struct Cut {
  std::int64_t tp = 1;
  std::int64_t shard = 1;
  bool tied = false;
  int accumulate = 1;
  std::int64_t replicate = 1;
};

struct CutRun {
  explicit CutRun(const Cut& cut)
      : accelerator(
            anew({.gradient_accumulation_steps = cut.accumulate,
                  .parallelism_config = ParallelismConfig{.dp_replicate_size = cut.replicate,
                                                          .dp_shard_size = cut.shard,
                                                          .tp_size = cut.tp}})),
        net(make_gpt(cut.tied)) {
    // Before and after the model is cut.
    AdamW adamw(net->parameters(), {.lr = 1e-2});
    apply_tp_plan(*net, gpt_plan(cut.tied), accelerator.torch_device_mesh());
    auto data =
        make_data_loader(words(), {.batch_size = kGlobalBatch / (cut.shard * cut.replicate)});
    auto prepared = accelerator.prepare(net, std::move(adamw), std::move(data));
    model = std::get<0>(prepared);
    optimizer = std::get<1>(prepared);
    loader.emplace(std::get<2>(prepared));
  }

  /// Trains `steps` steps, after the batches of `skipped` steps.
  Trained train(int steps, int accumulate, int skipped = 0) {
    Trained result;
    int batch = 0;
    for (auto& [x, y] : *loader) {
      if (batch++ < skipped * accumulate) continue;
      auto accumulating = accelerator.accumulate(model);
      const auto loss = loss_of(model(x), y);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) {
        result.norms.push_back(
            accelerator.clip_grad_norm_(model.parameters(), kMaxNorm).template item<double>());
      }
      optimizer.step();
      optimizer.zero_grad();
      result.losses.push_back(accelerator.reduce(loss.detach(), Reduction::kMean).item<double>());
      if (batch == (skipped + steps) * accumulate) break;
    }
    result.state = accelerator.get_state_dict(model);
    return result;
  }

  Accelerator accelerator;
  Gpt net;
  PreparedModel<Gpt> model;
  AcceleratedOptimizer optimizer;
  std::optional<DataLoader<std::pair<Tensor, Tensor>>> loader;
};

void expect_same(const Trained& given, const Trained& wanted, double tolerance,
                 double norm_tolerance) {
  ASSERT_EQ(given.losses.size(), wanted.losses.size());
  for (std::size_t i = 0; i < wanted.losses.size(); ++i) {
    EXPECT_NEAR(given.losses[i], wanted.losses[i], tolerance) << "loss " << i;
  }
  ASSERT_EQ(given.norms.size(), wanted.norms.size());
  for (std::size_t i = 0; i < wanted.norms.size(); ++i) {
    EXPECT_NEAR(given.norms[i], wanted.norms[i], norm_tolerance * wanted.norms[i]) << "norm " << i;
  }
  ASSERT_EQ(given.state.size(), wanted.state.size());
  for (const auto& entry : wanted.state) {
    ASSERT_TRUE(given.state.contains(entry.key())) << entry.key();
    const auto& tensor = given.state[entry.key()];
    ASSERT_EQ(tensor.sizes(), entry.value().sizes()) << entry.key();
    EXPECT_LT((tensor - entry.value()).abs().max().item<double>(), tolerance) << entry.key();
  }
}

TEST(TensorParallel, TrainsAGptAsOneProcessDoes) {
  for (const int size : {2, 4}) {
    on_processes(size, [size] {
      for (const bool tied : {false, true}) {
        CutRun run({.tp = size, .tied = tied});
        EXPECT_EQ(run.net->parameters()[0].size(0), kConfig.vocab / size);
        expect_same(run.train(4, 1), serial(4, 1, tied), 1e-10, 1e-12);
      }
    });
  }
}

TEST(TensorParallel, AccumulatesGradients) {
  on_processes(2, [] {
    CutRun run({.tp = 2, .accumulate = 3});
    expect_same(run.train(3, 3), serial(3, 3, false), 1e-10, 1e-12);
  });
}

TEST(TensorParallel, ShardsItsPartsOverProcessesWithOtherData) {
  on_processes(4, [] {
    for (const int accumulate : {1, 2}) {
      CutRun run({.tp = 2, .shard = 2, .accumulate = accumulate});
      // The norm of sharded gradients is computed in float32, and scales them.
      expect_same(run.train(3, accumulate), serial(3, accumulate, false), 1e-7, 1e-6);
      const auto state = run.optimizer.state_dict();
      if (!run.accelerator.is_local_main_process()) continue;
      EXPECT_EQ(state.at("state").as_dict().at(0).at("exp_avg").as_tensor().sizes(),
                (std::vector<std::int64_t>{kConfig.vocab, kConfig.width}));
    }
  });
}

/// Some layers are not trained, others not used.
struct PartlyTrainedImpl : torch::nn::Module {
  PartlyTrainedImpl() {
    torch::manual_seed(3);
    register_module("up", up = torch::nn::Linear(6, 8));
    register_module("down", down = torch::nn::Linear(8, 6));
    register_module("head", head = torch::nn::Linear(6, 4));
    register_module("unused", unused = torch::nn::Linear(6, 4));
    to(torch::kDouble);
    up->weight.set_requires_grad(false);
    head->bias.set_requires_grad(false);
  }
  Tensor forward(const Tensor& x) { return head(x + down(torch::gelu(up(x)))); }
  torch::nn::Linear up = nullptr, down = nullptr, head = nullptr, unused = nullptr;
};
TORCH_MODULE(PartlyTrained);

TEST(TensorParallel, LeavesFrozenAndUnusedLayersAsTheyAre) {
  on_processes(2, [] {
    Accelerator accelerator(anew({.parallelism_config = ParallelismConfig{.tp_size = 2}}));
    PartlyTrained plain, net;
    AdamW sgd(plain->parameters(), {.lr = 1e-2});
    AdamW own(net->parameters(), {.lr = 1e-2});
    apply_tp_plan(*net,
                  make_tp_plan({{"up", "colwise"},
                                {"down", "rowwise"},
                                {"head", "colwise_rep"},
                                {"unused", "colwise_rep"}}),
                  accelerator.torch_device_mesh());
    auto [model, optimizer] = accelerator.prepare(net, std::move(own));
    for (int step = 0; step < 3; ++step) {
      torch::manual_seed(20 + step);
      const auto x = torch::randn({5, 6}, torch::kDouble);
      plain(x).pow(2).sum().backward();
      const auto norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), kMaxNorm);
      accelerator.backward(model(x).pow(2).sum());
      EXPECT_NEAR(accelerator.clip_grad_norm_(model.parameters(), kMaxNorm).item<double>(), norm,
                  1e-10 * norm);
      sgd.step();
      sgd.zero_grad();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto state = accelerator.get_state_dict(model);
    for (const auto& entry : state_dict(*plain)) {
      EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value(), 0, 1e-12)) << entry.key();
    }
  });
}

TEST(TensorParallel, TrainsInBfloat16) {
  on_processes(2, [] {
    const auto losses = [](const AcceleratorOptions& options) {
      Accelerator accelerator(options);
      torch::manual_seed(5);
      Gpt net(kConfig);
      apply_tp_plan(*net, gpt_plan(false), accelerator.torch_device_mesh());
      auto [model, optimizer] = accelerator.prepare(net, AdamW(net->parameters(), {.lr = 1e-2}));
      const auto [inputs, targets] = words();
      std::vector<double> result;
      for (int step = 0; step < 4; ++step) {
        const auto loss = loss_of(model(inputs.narrow(0, 0, 4)), targets.narrow(0, 0, 4));
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        result.push_back(loss.item<double>());
      }
      return result;
    };
    const auto cut = losses(anew({.mixed_precision = PrecisionType::kBf16,
                                  .parallelism_config = ParallelismConfig{.tp_size = 2}}));
    // The same batches on both processes: as one process.
    const auto whole = losses(anew({.mixed_precision = PrecisionType::kBf16}));
    for (std::size_t i = 0; i < cut.size(); ++i) EXPECT_NEAR(cut[i], whole[i], 2e-2) << i;
    EXPECT_LT(cut.back(), cut.front());
  });
}

TEST(TensorParallel, HasCopiesOfShardedPartsOnEightProcesses) {
  const test::SharedFolder folder;
  const Cut cut{.tp = 2, .shard = 2, .replicate = 2};
  on_processes(8, folder.options(), [&] {
    const auto wanted = serial(3, 1, false);
    CutRun run(cut);
    const auto first = run.train(2, 1);
    EXPECT_NEAR(first.losses[1], wanted.losses[1], 1e-7);
    EXPECT_NEAR(first.norms[1], wanted.norms[1], 1e-6 * wanted.norms[1]);
    run.accelerator.save_state(folder.path() / "state");
    CutRun other(cut);
    other.accelerator.load_state(folder.path() / "state");
    const auto last = other.train(1, 1, /*skipped=*/2);
    EXPECT_NEAR(last.losses[0], wanted.losses[2], 1e-7);
    EXPECT_NEAR(last.norms[0], wanted.norms[2], 1e-6 * wanted.norms[2]);
  });
}

TEST(TensorParallel, CheckpointsFitAnyOtherCut) {
  const test::SharedFolder folder;
  const auto options = folder.options();
  const auto state = folder.path() / "state";
  const auto goes_on = [&state](const Cut& cut) {
    const auto wanted = serial(4, 1, false);
    CutRun run(cut);
    (void)run.train(1, 1, /*skipped=*/5);
    run.accelerator.load_state(state);
    auto given = run.train(2, 1, /*skipped=*/2);
    given.losses.insert(given.losses.begin(), wanted.losses.begin(), wanted.losses.begin() + 2);
    given.norms.insert(given.norms.begin(), wanted.norms.begin(), wanted.norms.begin() + 2);
    expect_same(given, wanted, 1e-7, 1e-6);
  };
  on_processes(2, options, [&] {
    CutRun run({.tp = 2});
    (void)run.train(2, 1);
    run.accelerator.save_state(state);
    EXPECT_TRUE(std::filesystem::exists(state / "pytorch_model_fsdp_0" / ".metadata"));
    run.accelerator.save_model(run.model, folder.path() / "model");
    goes_on({.tp = 2});
  });
  on_processes(4, options, [&] {
    goes_on({.tp = 4});
    goes_on({.tp = 2, .shard = 2});
  });
  on_processes(1, options, [&] {
    goes_on({});
    auto net = make_gpt(false);
    load_checkpoint_in_model(*net, folder.path() / "model", {.strict = true});
    const auto wanted = serial(2, 1, false);
    for (const auto& entry : state_dict(*net)) {
      EXPECT_LT((entry.value() - wanted.state[entry.key()]).abs().max().item<double>(), 1e-10);
    }
  });
}

TEST(TensorParallel, GradientsOfAnUnfinishedStepFitAnyOtherCut) {
  const test::SharedFolder folder;
  const auto options = folder.options();
  const auto state = folder.path() / "state";
  // One batch of the second step; the other comes after the checkpoint.
  const auto goes_on = [&](const Cut& cut) {
    CutRun run(cut);
    run.accelerator.load_state(state);
    const auto wanted = serial(2, 2, false);
    auto accumulating = run.accelerator.accumulate(run.model);
    const auto [inputs, targets] = words();
    const auto rows = kGlobalBatch / cut.shard;
    const auto first =
        3 * kGlobalBatch + (cut.shard > 1 ? run.accelerator.process_index() * rows : 0);
    run.accelerator.backward(
        loss_of(run.model(inputs.narrow(0, first, rows)), targets.narrow(0, first, rows)));
    ASSERT_TRUE(run.accelerator.sync_gradients());
    const auto norm = run.accelerator.clip_grad_norm_(run.model.parameters(), kMaxNorm);
    EXPECT_NEAR(norm.item<double>(), wanted.norms[1], 1e-6 * wanted.norms[1]);
  };
  on_processes(2, options, [&] {
    CutRun run({.tp = 2, .accumulate = 2});
    (void)run.train(1, 2);
    const auto [inputs, targets] = words();
    auto accumulating = run.accelerator.accumulate(run.model);
    ASSERT_FALSE(run.accelerator.sync_gradients());
    run.accelerator.backward(loss_of(run.model(inputs.narrow(0, 2 * kGlobalBatch, kGlobalBatch)),
                                     targets.narrow(0, 2 * kGlobalBatch, kGlobalBatch)));
    run.accelerator.save_state(state);
  });
  on_processes(2, options, [&] {
    goes_on({.tp = 2, .accumulate = 2});
    goes_on({.shard = 2, .accumulate = 2});
  });
  on_processes(1, options, [&] { goes_on({.accumulate = 2}); });
}

TEST(TensorParallel, CheckpointsOfOneProcessAndOfShardedPartsFitToo) {
  const test::SharedFolder folder;
  const auto options = folder.options();
  const auto train_and_save = [&](const Cut& cut, const char* name) {
    CutRun run(cut);
    (void)run.train(2, 1);
    run.accelerator.save_state(folder.path() / name);
  };
  const auto expect_loads = [&](const Cut& cut, const char* name) {
    CutRun run(cut);
    run.accelerator.load_state(folder.path() / name);
    const auto given = run.train(1, 1, /*skipped=*/2);
    const auto wanted = serial(3, 1, false);
    EXPECT_NEAR(given.losses[0], wanted.losses[2], 1e-7) << name;
    EXPECT_NEAR(given.norms[0], wanted.norms[2], 1e-6 * wanted.norms[2]) << name;
    EXPECT_LT((given.state["head.weight"] - wanted.state["head.weight"]).abs().max().item<double>(),
              1e-7)
        << name;
  };
  on_processes(1, options, [&] { train_and_save({}, "one"); });
  on_processes(4, options, [&] { train_and_save({.tp = 2, .shard = 2}, "sharded"); });
  on_processes(2, options, [&] {
    expect_loads({.tp = 2}, "one");
    expect_loads({.tp = 2}, "sharded");
  });
  on_processes(1, options, [&] { expect_loads({}, "sharded"); });
}

TEST(TensorParallel, OptimizersThatHaveStateAreCut) {
  on_processes(2, [] {
    auto plain = make_gpt(false);
    AdamW other(plain->parameters(), {.lr = 1e-2});
    const auto [inputs, targets] = words();
    const auto step = [&, inputs = inputs, targets = targets](auto& net, auto& optimizer) {
      optimizer.zero_grad();
      loss_of(net(inputs.narrow(0, 0, 4)), targets.narrow(0, 0, 4)).backward();
      optimizer.step();
    };
    auto net = make_gpt(false);
    AdamW adamw(net->parameters(), {.lr = 1e-2});
    for (int i = 0; i < 2; ++i) {
      step(plain, other);
      step(net, adamw);
    }
    Accelerator accelerator(anew({.parallelism_config = ParallelismConfig{.tp_size = 2}}));
    apply_tp_plan(*net, gpt_plan(false), accelerator.torch_device_mesh());
    auto [model, optimizer] = accelerator.prepare(net, std::move(adamw));
    step(plain, other);
    optimizer.zero_grad();
    accelerator.backward(loss_of(model(inputs.narrow(0, 0, 4)), targets.narrow(0, 0, 4)));
    optimizer.step();
    const auto given = accelerator.get_state_dict(model);
    for (const auto& entry : state_dict(*plain)) {
      EXPECT_LT((given[entry.key()] - entry.value()).abs().max().item<double>(), 1e-12)
          << entry.key();
    }
    // The state of the optimizer is that of whole parameters.
    const auto whole = optimizer.state_dict();
    for (const auto& [number, moments] : whole.at("state").as_dict()) {
      if (number.as_int() == 0) {
        EXPECT_EQ(moments.at("exp_avg").as_tensor().size(0), kConfig.vocab);
      }
    }
    optimizer.load_state_dict(whole);
  });
}

TEST(TensorParallel, SequenceParallelismGivesTheSameNumbers) {
  on_processes(2, [] {
    struct BlocksImpl : torch::nn::Module {
      BlocksImpl() {
        register_module("norm", norm);
        register_module("up", up);
        register_module("down", down);
        to(torch::kDouble);
      }
      Tensor forward(const Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
      torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({6})};
      torch::nn::Linear up{6, 8}, down{8, 6};
    };
    TORCH_MODULE(Blocks);
    const Accelerator accelerator(anew({.parallelism_config = ParallelismConfig{.tp_size = 2}}));
    const auto mesh = accelerator.torch_device_mesh();
    const auto group = mesh->get_group("tp");
    torch::manual_seed(3);
    Blocks plain, cut;
    test::copy_parameters(cut, plain);
    apply_tp_plan(
        *cut, make_tp_plan({{"norm", "sequence_parallel"}, {"up", "colwise"}, {"down", "rowwise"}}),
        mesh, {.sequence_parallel = true});
    const auto x = torch::randn({3, 4, 6}, torch::kDouble);
    const auto weights = torch::arange(72, torch::kDouble).view({3, 4, 6});
    const auto wanted = plain(x);
    (wanted * weights).sum().backward();
    const auto y = cut(nn::scatter_to_region(x, 1, group));
    EXPECT_EQ(y.size(1), 2);
    const auto whole = nn::gather_from_region(y, 1, group);
    EXPECT_LT((whole - wanted).abs().max().item<double>(), 1e-13);
    (whole * weights).sum().backward();
    const auto rank = accelerator.tensor_parallel_rank();
    const auto close = [](const Tensor& a, const Tensor& b) {
      return a.sizes() == b.sizes() && (a - b).abs().max().item<double>() < 1e-11;
    };
    EXPECT_TRUE(close(cut->norm->weight.grad(), plain->norm->weight.grad()));
    EXPECT_TRUE(close(cut->norm->bias.grad(), plain->norm->bias.grad()));
    EXPECT_TRUE(close(cut->down->bias.grad(), plain->down->bias.grad()));
    EXPECT_TRUE(close(cut->up->weight.grad(), plain->up->weight.grad().chunk(2, 0)[rank]));
    EXPECT_TRUE(close(cut->down->weight.grad(), plain->down->weight.grad().chunk(2, 1)[rank]));
  });
}

TEST(TensorParallel, APlanLeavesWhatIsCutAlready) {
  on_processes(2, [] {
    const Accelerator accelerator(anew({.parallelism_config = ParallelismConfig{.tp_size = 2}}));
    const auto mesh = accelerator.torch_device_mesh();
    torch::manual_seed(3);
    torch::nn::Sequential plain(torch::nn::Linear(6, 8), torch::nn::Linear(8, 6));
    torch::manual_seed(3);
    torch::nn::Sequential by_plans(torch::nn::Linear(6, 8), torch::nn::Linear(8, 6));
    apply_tp_plan(*by_plans, make_tp_plan({{"0", "colwise_gather"}}), mesh);
    apply_tp_plan(*by_plans, make_tp_plan({{"1", "rowwise_rep"}}), mesh);
    torch::manual_seed(3);
    torch::nn::Sequential by_layer(nn::ColumnParallelLinear(6, 8, mesh->get_group("tp")),
                                   torch::nn::Linear(8, 6));
    apply_tp_plan(*by_layer, make_tp_plan({{"1", "rowwise_rep"}}), mesh);
    const auto x = torch::randn({3, 6});
    EXPECT_TRUE(torch::allclose(by_plans->forward(x), plain->forward(x), 0, 1e-6));
    EXPECT_TRUE(torch::allclose(by_layer->forward(x), plain->forward(x), 0, 1e-6));
  });
}

TEST(TensorParallel, SavesAllOfACutModelThatIsNotTrained) {
  const test::SharedFolder folder;
  on_processes(4, folder.options(), [&] {
    Accelerator accelerator(
        anew({.parallelism_config = ParallelismConfig{.dp_shard_size = 2, .tp_size = 2}}));
    auto whole = make_gpt(false);
    auto net = make_gpt(false);
    for (auto& one : net->parameters()) one.set_requires_grad(false);
    apply_tp_plan(*net, gpt_plan(false), accelerator.torch_device_mesh());
    auto model = accelerator.prepare(net);
    const auto state = accelerator.get_state_dict(model);
    accelerator.save_model(model, folder.path() / "model");
    accelerator.wait_for_everyone();
    auto loaded = make_gpt(false);
    load_checkpoint_in_model(*loaded, folder.path() / "model", {.strict = true});
    for (const auto& entry : state_dict(*whole)) {
      EXPECT_TRUE(torch::equal(state[entry.key()], entry.value())) << entry.key();
      EXPECT_TRUE(torch::equal(state_dict(*loaded)[entry.key()], entry.value())) << entry.key();
    }
    const auto ids = words().first.narrow(0, 0, 2);
    EXPECT_TRUE(torch::allclose(model(ids), whole->forward(ids), 0, 1e-12));
  });
}

TEST(TensorParallel, PlansTakeTheShortWordsToo) {
  EXPECT_EQ(
      make_tp_plan({{"a", "colwise_gather"}, {"b", "vocab"}, {"c", "sequence"}}),
      (TpPlan{
          {"a", TpStyle::kColwiseRep}, {"b", TpStyle::kVocab}, {"c", TpStyle::kSequenceParallel}}));
}

TEST(TensorParallel, ProcessesOfAGroupGetTheSameBatches) {
  on_processes(4, [] {
    Accelerator accelerator(
        anew({.parallelism_config = ParallelismConfig{.dp_shard_size = 2, .tp_size = 2}}));
    auto loader = accelerator.prepare(
        make_data_loader(std::pair{torch::arange(8), torch::arange(8)}, {.batch_size = 2}));
    std::vector<std::int64_t> seen;
    for (auto& [x, y] : loader) seen.push_back(x[0].template item<std::int64_t>());
    const std::int64_t data = accelerator.process_index() / 2;
    EXPECT_EQ(seen, (std::vector<std::int64_t>{2 * data, 4 + 2 * data}));
  });
}

TEST(TensorParallel, TheDeprecatedPluginMeansTheSame) {
  on_processes(2, [] {
    const Accelerator accelerator(
        anew({.torch_tp_plugin = TorchTensorParallelPlugin{.tp_size = 2}}));
    EXPECT_EQ(accelerator.torch_device_mesh()->size("tp"), 2);
    EXPECT_EQ(accelerator.parallelism_config()->tp_size, 2);
  });
}

TEST(TensorParallel, SaysWhatIsWrong) {
  on_processes(2, [] {
    Accelerator accelerator(anew({.parallelism_config = ParallelismConfig{.tp_size = 2}}));
    const auto mesh = accelerator.torch_device_mesh();
    const auto refused = [&](const TpPlan& plan) {
      auto net = make_gpt(false);
      return message_of<ArgumentError>([&] { apply_tp_plan(*net, plan, mesh); });
    };
    const auto expect_in = [](const std::string& text, const char* words) {
      EXPECT_NE(text.find(words), std::string::npos) << text;
    };
    expect_in(refused({{"blocks.*.atend", TpStyle::kColwise}}),
              "no layer is left for the rule 'blocks.*.atend'");
    expect_in(refused({{"blocks.*.ln1", TpStyle::kColwise}}),
              "which the rule 'blocks.*.ln1' is for");
    expect_in(refused({{"head", TpStyle::kColwise, 5}}), "cannot be divided among 2 processes");
    expect_in(message_of<ArgumentError>([] { (void)make_tp_plan({{"a", "columns"}}); }),
              "Choose one of: colwise, ");
    expect_in(message_of<ArgumentError>([&] { (void)accelerator.prepare(make_gpt(false)); }),
              "Model should undergo tensor parallel before passing it to accelerate");
    auto net = make_gpt(false);
    apply_tp_plan(*net, {{"blocks.*.attend_out", TpStyle::kRowwise}}, mesh);
    expect_in(message_of<ArgumentError>([&] { (void)net(words().first.narrow(0, 0, 1)); }),
              "It is whole: the layer before is not cut");
    expect_in(message_of<UnsupportedError>([&] {
                (void)net->named_parameters()["blocks.0.attend_out.weight"].pow(2).sum();
              }),
              "of which each process has a part only");
  });
}

TEST(TensorParallel, AnErrorOnOneProcessEndsAll) {
  const auto outcomes = run_processes(2, {}, [] {
    CutRun run({.tp = 2});
    (void)run.train(1, 1);
    if (run.accelerator.process_index() == 1) throw ArgumentError("rank 1 has had enough");
    (void)run.train(1, 1);
  });
  EXPECT_FALSE(outcomes[0].ok());
  EXPECT_FALSE(outcomes[0].timed_out);
  EXPECT_TRUE(outcomes[1].output_contains("rank 1 has had enough"));
  EXPECT_TRUE(outcomes[0].output_contains("rank 1")) << outcomes[0].output;
}

}  // namespace
}  // namespace accelerate
