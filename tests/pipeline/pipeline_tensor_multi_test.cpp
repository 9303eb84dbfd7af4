// Stages whose layers are cut as well: pipeline and tensor parallelism together.
#include <gtest/gtest.h>

#include "../examples/gpt_model.h"
#include "accelerate/errors.h"
#include "pipeline/nets.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using namespace test;

struct Sizes {
  std::int64_t pp = 1;
  std::int64_t dp = 1;
  std::int64_t tp = 1;
};

AcceleratorOptions cut(const Sizes& sizes) {
  AcceleratorState::_reset_state();
  return {.cpu = true,
          .parallelism_config = ParallelismConfig{
              .dp_replicate_size = sizes.dp, .tp_size = sizes.tp, .pp_size = sizes.pp}};
}

AcceleratorOptions megatron(MegatronLMPlugin plugin) {
  AcceleratorState::_reset_state();
  return {.cpu = true, .megatron_lm_plugin = std::move(plugin)};
}

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& next) {
  return torch::cross_entropy_loss(scores.flatten(0, 1), next.flatten());
}

Batch text(int step) {
  torch::manual_seed(300 + step);
  const auto words = torch::randint(0, 24, {4, 9}, torch::kLong);
  return {words.narrow(1, 0, 8), words.narrow(1, 1, 8)};
}

examples::Gpt make_gpt(bool tied) {
  torch::manual_seed(5);
  examples::Gpt net(examples::GptConfig{
      .vocab = 24, .block = 8, .layers = 2, .heads = 4, .width = 16, .tied = tied});
  net->to(torch::kDouble);
  return net;
}

void apply_plan(examples::Gpt& net, const Accelerator& accelerator, bool tied) {
  TpPlan plan{{"tokens", TpStyle::kVocab},
              {"blocks.*.attend", TpStyle::kColwise, 3},
              {"blocks.*.attend_out", TpStyle::kRowwise},
              {"blocks.*.expand", TpStyle::kColwise},
              {"blocks.*.expand_out", TpStyle::kRowwise}};
  if (!tied) plan.push_back({"head", TpStyle::kColwiseRep});
  apply_tp_plan(*net, plan, accelerator.torch_device_mesh());
}

Trained plain(bool tied, int steps, double max_norm = 1.0) {
  return plain_training(make_gpt(tied), loss_of, text, steps, max_norm);
}

struct CutRun {
  CutRun(const AcceleratorOptions& options, bool tied, double max_norm = 1.0)
      : accelerator(options), net(make_gpt(tied)) {
    AdamW adamw(net->parameters(), {.lr = 1e-2});
    apply_plan(net, accelerator, tied);
    const PipelineOptions pipeline{.num_micro_batches = 2, .max_grad_norm = max_norm};
    std::tie(model, optimizer) =
        accelerator.prepare(Pipeline(net, loss_of, pipeline), std::move(adamw));
  }

  Trained train(int first, int last) {
    Trained result;
    const auto mesh = accelerator.torch_device_mesh();
    const auto copies = mesh && mesh->has("dp_replicate") ? mesh->size("dp_replicate") : 1;
    const auto copy = copies > 1 ? accelerator.data_parallel_rank() : 0;
    for (int step = first; step < last; ++step) {
      const auto [x, y] = text(step);
      const auto rows = x.size(0) / copies;
      result.losses.push_back(
          model(x.narrow(0, copy * rows, rows), y.narrow(0, copy * rows, rows)).item<double>());
      result.norms.push_back(model->grad_norm().item<double>());
    }
    result.weights = accelerator.get_state_dict(model);
    return result;
  }

  Accelerator accelerator;
  examples::Gpt net;
  PreparedModel<Pipeline> model;
  AcceleratedOptimizer optimizer;
};

TEST(PipelineOfCutLayers, TrainsAsOneProcessDoes) {
  on_processes(4, [] {
    for (const bool tied : {false, true}) {
      CutRun run(cut({.pp = 2, .tp = 2}), tied);
      expect_equal(plain(tied, 3), run.train(0, 3), 1e-10);
    }
  });
}

TEST(PipelineOfCutLayers, HasCopiesOnEightProcesses) {
  on_processes(8, [] {
    CutRun run(cut({.pp = 2, .dp = 2, .tp = 2}), /*tied=*/true);
    expect_equal(plain(true, 3), run.train(0, 3), 1e-10);
  });
}

TEST(PipelineOfCutLayers, OfOneStageIsTensorParallelism) {
  on_processes(2, [] {
    CutRun run(cut({.tp = 2}), /*tied=*/false);
    expect_equal(plain(false, 2), run.train(0, 2), 1e-10);
  });
}

TEST(PipelineOfCutLayers, IsSavedWhole) {
  const SharedFolder shared;
  const auto goes_on = [&](const AcceleratorOptions& options, const char* name) {
    auto wanted = plain(false, 4);
    wanted.losses.erase(wanted.losses.begin(), wanted.losses.begin() + 2);
    wanted.norms.erase(wanted.norms.begin(), wanted.norms.begin() + 2);
    CutRun run(options, false);
    run.accelerator.load_state(shared.path() / name);
    expect_equal(wanted, run.train(2, 4), 1e-10);
  };
  const auto begins = [&](const AcceleratorOptions& options, const char* name) {
    CutRun run(options, false);
    (void)run.train(0, 2);
    run.accelerator.save_state(shared.path() / name);
  };
  on_processes(4, shared.options(), [&] {
    begins(cut({.pp = 2, .tp = 2}), "cut");
    goes_on(cut({.pp = 4}), "cut");
  });
  on_processes(1, shared.options(), [&] {
    goes_on({.cpu = true}, "cut");
    AcceleratorState::_reset_state();
    begins({.cpu = true}, "one");
  });
  on_processes(4, shared.options(), [&] { goes_on(cut({.pp = 2, .tp = 2}), "one"); });
}

TEST(PipelineOfCutLayers, IsWhatMegatronsDegreesAskFor) {
  on_processes(4, [] {
    CutRun run(
        megatron({.tp_degree = 2, .num_micro_batches = 2, .use_distributed_optimizer = true}),
        false);
    EXPECT_EQ(run.accelerator.torch_device_mesh()->size("tp"), 2);
    EXPECT_EQ(run.accelerator.torch_device_mesh()->size("dp_replicate"), 2);
    // The norm of divided gradients has the precision of float32.
    expect_equal(plain(false, 2), run.train(0, 2), 1e-6);
    const auto state = run.optimizer.state_dict();
    if (!run.accelerator.is_local_main_process()) return;
    EXPECT_EQ(state.at("state").as_dict().at(0).at("exp_avg").as_tensor().sizes(),
              (std::vector<std::int64_t>{24, 16}));
  });
}

TEST(PipelineOfCutLayers, NeedsAPlan) {
  on_processes(2, [] {
    Accelerator accelerator(cut({.tp = 2}));
    EXPECT_TRUE(has(message_of<ArgumentError>(
                        [&] { (void)accelerator.prepare(Pipeline(make_gpt(false), loss_of)); }),
                    "no layer of the model is cut"));
  });
}

}  // namespace
}  // namespace accelerate
