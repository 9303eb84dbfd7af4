// One model cut over two ranks of one GPU, with Gloo: each mode trains as one process does.
#include <accelerate/accelerate.h>
#include <accelerate/parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "cuda/on_gpu.h"
#include "examples/gpt_model.h"
#include "support/on_processes.h"

namespace accelerate::cuda_model_parallel_test {
namespace {

using examples::Gpt;
using torch::Tensor;
using Batch = std::map<std::string, Tensor>;
using Losses = std::vector<double>;

constexpr std::int64_t kLength = 16;
constexpr int kSteps = 4;

class CudaModelParallel : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
  }
};

Gpt make_gpt() {
  torch::manual_seed(3);
  return Gpt(
      examples::GptConfig{.vocab = 32, .block = kLength, .layers = 2, .heads = 4, .width = 16});
}

SGD make_sgd(Gpt& net) { return SGD(net->parameters(), {.lr = 0.3, .momentum = 0.9}); }

/// All steps in one dataset, on the host.
Batch dataset() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto words =
      torch::randint(32, {4 * kSteps, kLength}, generator, torch::TensorOptions(torch::kLong));
  return {{"input_ids", words},
          {"position_ids", torch::arange(kLength).expand_as(words).contiguous()},
          {"labels", words.clone()}};
}

auto make_loader() { return make_data_loader(dataset(), {.batch_size = 4}); }

/// What predicts the next word, and nothing in the last place.
Tensor shifted(const Tensor& labels) {
  auto result = torch::full_like(labels, -100);
  result.slice(1, 0, kLength - 1).copy_(labels.slice(1, 1));
  return result;
}

Tensor loss_of(const Tensor& scores, const Tensor& labels) {
  return torch::nn::functional::cross_entropy(scores.flatten(0, 1), labels.flatten());
}

AcceleratorOptions sizes(const ParallelismConfig& config) {
  auto options = test::anew({.parallelism_config = config});
  options.cpu = false;
  return options;
}

/// One process, without an accelerator.
Losses plain() {
  const auto device = PartialState().device();
  auto net = make_gpt();
  net->to(device);
  auto sgd = make_sgd(net);
  const auto all = dataset();
  Losses losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto rows = [&](const char* name) {
      return all.at(name).narrow(0, 4 * step, 4).to(device);
    };
    const auto loss = loss_of(net(rows("input_ids")), shifted(rows("labels")));
    loss.backward();
    sgd.step();
    sgd.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

void expect_close(const Losses& seen, const Losses& wanted) {
  ASSERT_EQ(seen.size(), wanted.size());
  for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_NEAR(seen[i], wanted[i], 1e-4) << i;
  EXPECT_LT(seen.back(), seen.front());
}

TEST_F(CudaModelParallel, CutLayersTrainAsOneProcess) {
  on_processes(2, test::on_gpu(), [] {
    const auto wanted = plain();
    Accelerator accelerator(sizes({.tp_size = 2}));
    auto net = make_gpt();
    apply_tp_plan(*net,
                  {{"tokens", TpStyle::kVocab},
                   {"blocks.*.attend", TpStyle::kColwise, 3},
                   {"blocks.*.attend_out", TpStyle::kRowwise},
                   {"blocks.*.expand", TpStyle::kColwise},
                   {"blocks.*.expand_out", TpStyle::kRowwise},
                   {"head", TpStyle::kColwiseRep}},
                  accelerator.torch_device_mesh());
    auto [model, optimizer, loader] = accelerator.prepare(net, make_sgd(net), make_loader());
    EXPECT_TRUE(net->parameters()[0].is_cuda());
    Losses seen;
    for (auto& batch : loader) {
      const auto loss = loss_of(model(batch.at("input_ids")), shifted(batch.at("labels")));
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      seen.push_back(loss.item<double>());
    }
    expect_close(seen, wanted);
  });
}

TEST_F(CudaModelParallel, StagesTrainAsOneProcess) {
  on_processes(2, test::on_gpu(), [] {
    const auto wanted = plain();
    for (const auto recompute : {PipelineRecompute::kNone, PipelineRecompute::kUniform}) {
      Accelerator accelerator(sizes({.pp_size = 2}));
      auto net = make_gpt();
      auto sgd = make_sgd(net);
      auto [model, optimizer, loader] = accelerator.prepare(
          Pipeline(net, loss_of, {.num_micro_batches = 2, .recompute = recompute}), std::move(sgd),
          make_loader());
      Losses seen;
      for (auto& batch : loader) {
        seen.push_back(
            model(batch.at("input_ids"), shifted(batch.at("labels"))).template item<double>());
      }
      expect_close(seen, wanted);
    }
  });
}

TEST_F(CudaModelParallel, ContextsTrainAsOneProcess) {
  auto options = test::on_gpu();
  options.environment.emplace_back("ACCELERATE_ALLOW_CP_STANDALONE", "true");
  on_processes(2, options, [] {
    const auto wanted = plain();
    for (const std::string strategy : {"allgather", "alltoall"}) {
      Accelerator accelerator(sizes(
          {.cp_size = 2, .cp_handler = TorchContextParallelConfig{.cp_comm_strategy = strategy}}));
      const auto group = accelerator.torch_device_mesh()->get_group("cp");
      auto net = make_gpt();
      auto [model, optimizer, loader] = accelerator.prepare(net, make_sgd(net), make_loader());
      Losses seen;
      for (auto& batch : loader) {
        const auto& ids = batch.at("input_ids");
        const auto& places = batch.at("position_ids");
        auto labels = shifted(batch.at("labels"));
        const auto split = accelerator.maybe_context_parallel(
            {.buffers = {ids, places, labels}, .buffer_seq_dims = {1, 1, 1}});
        const auto loss = sp_weighted_loss(loss_of(model(ids, places), labels), labels, group);
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        seen.push_back(loss.item<double>());
      }
      expect_close(seen, wanted);
    }
  });
}

TEST_F(CudaModelParallel, SequencesTrainAsOneProcess) {
  on_processes(2, test::on_gpu(), [] {
    const auto wanted = plain();
    Accelerator accelerator(sizes({.sp_size = 2}));
    auto net = make_gpt();
    auto [model, optimizer, loader] = accelerator.prepare(net, make_sgd(net), make_loader());
    auto parts = accelerator.deepspeed_ulysses_dl_adapter(loader, model);
    Losses seen;
    for (auto& batch : parts) {
      const auto& labels = batch.at("shift_labels");
      const auto scores = model(batch.at("input_ids"), batch.at("position_ids"));
      const auto loss = sp_weighted_loss(loss_of(scores, labels), labels);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      seen.push_back(loss.item<double>());
    }
    expect_close(seen, wanted);
  });
}

}  // namespace
}  // namespace accelerate::cuda_model_parallel_test
