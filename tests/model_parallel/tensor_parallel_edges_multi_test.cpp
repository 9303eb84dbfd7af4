// Models that a plan has cut: where their weights are used in unusual ways, what is compared while
// they train, and what is around them.
#include <accelerate/accelerate.h>
#include <accelerate/parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate::tensor_parallel_edges_test {
namespace {

using test::anew;
using test::has;
using test::message_of;
using torch::Tensor;

AcceleratorOptions tensors(std::int64_t tp, std::int64_t shard = 1) {
  return anew({.parallelism_config = ParallelismConfig{.dp_shard_size = shard, .tp_size = tp}});
}

const TpPlan& pair_plan() {
  static const auto plan = make_tp_plan({{"up", "colwise"}, {"down", "rowwise"}});
  return plan;
}

/// A pair of layers with a norm before it.
struct PairImpl : torch::nn::Module {
  PairImpl() {
    torch::manual_seed(3);
    register_module("norm", norm = torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    register_module("up", up = torch::nn::Linear(6, 8));
    register_module("down", down = torch::nn::Linear(8, 6));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear up = nullptr, down = nullptr;
};
TORCH_MODULE(Pair);

Tensor input_of(int step) {
  torch::manual_seed(40 + step);
  return torch::randn({3, 4, 6}, torch::kDouble);
}

bool close(const Tensor& a, const Tensor& b, double tolerance = 1e-12) {
  return a.sizes() == b.sizes() && (a - b).abs().max().item<double>() < tolerance;
}

// ---- copies of weights --------------------------------------------------------------------------

/// Uses copies of its weights, as layers do that cast them.
struct CopyingImpl : PairImpl {
  Tensor forward(const Tensor& x) {
    const auto hidden = torch::gelu(torch::linear(x, up->weight.to(torch::kFloat), copied_bias()));
    return torch::linear(hidden, down->weight.clone().to(torch::kFloat));
  }
  Tensor copied_bias() { return up->bias.to(torch::kFloat); }
};
TORCH_MODULE(Copying);

TEST(TensorParallelWeights, AreUsedByPartsThoughTheyAreCopiedFirst) {
  on_processes(2, [] {
    const Accelerator accelerator(tensors(2));
    Copying plain, cut;
    apply_tp_plan(*cut, pair_plan(), accelerator.torch_device_mesh());
    const auto x = input_of(0).to(torch::kFloat);
    const auto wanted = plain(x);
    const auto given = cut(x);
    EXPECT_TRUE(close(given, wanted, 1e-5));
    wanted.pow(2).sum().backward();
    given.pow(2).sum().backward();
    const auto rank = accelerator.tensor_parallel_rank();
    EXPECT_TRUE(close(cut->up->weight.grad(), plain->up->weight.grad().chunk(2, 0)[rank], 1e-4));
    EXPECT_TRUE(
        close(cut->down->weight.grad(), plain->down->weight.grad().chunk(2, 1)[rank], 1e-4));
    // A copy in another order is no weight of a product any more.
    EXPECT_TRUE(has(message_of<UnsupportedError>([&] {
                      (void)torch::matmul(torch::randn({2, 4}, torch::kDouble),
                                          cut->down->weight.t().contiguous());
                    }),
                    "of which each process has a part only"));
    // Without gradients a copy is what each process has.
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(cut->down->weight.clone().pow(2).sum().item<double>(),
              cut->down->weight.detach().pow(2).sum().item<double>());
  });
}

/// A norm that casts its weights, as nn::LayerNorm does under autocast, and a copied bias.
struct CastNormImpl : PairImpl {
  Tensor forward(const Tensor& x) {
    const auto normed = torch::layer_norm(x.to(torch::kFloat), {6}, norm->weight.to(torch::kFloat),
                                          norm->bias.to(torch::kFloat));
    const auto hidden = torch::gelu(up(normed.to(torch::kDouble)));
    return x + torch::linear(hidden, down->weight, down->bias.clone());
  }
};
TORCH_MODULE(CastNorm);

TEST(TensorParallelWeights, OfNormsAreSummedThoughTheyAreCastFirst) {
  on_processes(2, [] {
    const Accelerator accelerator(tensors(2));
    const auto group = accelerator.torch_device_mesh()->get_group("tp");
    CastNorm plain, cut;
    apply_tp_plan(
        *cut, make_tp_plan({{"norm", "sequence_parallel"}, {"up", "colwise"}, {"down", "rowwise"}}),
        accelerator.torch_device_mesh(), {.sequence_parallel = true});
    const auto x = input_of(0);
    plain(x).pow(2).sum().backward();
    const auto y = cut(nn::scatter_to_region(x, 1, group));
    nn::gather_from_region(y, 1, group).pow(2).sum().backward();
    EXPECT_TRUE(close(cut->norm->weight.grad(), plain->norm->weight.grad(), 1e-4));
    EXPECT_TRUE(close(cut->norm->bias.grad(), plain->norm->bias.grad(), 1e-4));
    EXPECT_TRUE(close(cut->down->bias.grad(), plain->down->bias.grad(), 1e-4));
    // An activation in the type of a cut weight is no weight.
    const auto hidden = torch::ones({2, 6}, torch::kDouble).requires_grad_();
    EXPECT_EQ(torch::gelu(hidden.to(cut->up->weight)).sizes(), hidden.sizes());
  });
}

TEST(TensorParallelWeights, OfOurLinearTakeInputsThatAreNotContiguous) {
  on_processes(2, [] {
    const Accelerator accelerator(tensors(2));
    const auto mesh = accelerator.torch_device_mesh();
    const auto group = mesh->get_group("tp");
    for (const bool sequence : {false, true}) {
      torch::manual_seed(3);
      torch::nn::Sequential plain(nn::Linear(6, 8));
      torch::manual_seed(3);
      torch::nn::Sequential cut(nn::Linear(6, 8));
      apply_tp_plan(*cut, make_tp_plan({{"0", "colwise_rep"}}), mesh,
                    {.sequence_parallel = sequence});
      const auto x = torch::randn({5, 4, 6}).transpose(0, 1);  // [4, 5, 6] or [4, 2 * 2, 6]
      const auto whole = x.slice(1, 0, 4);
      const auto given = cut->forward(
          sequence
              ? nn::scatter_to_region(whole, 1, group).transpose(0, 1).contiguous().transpose(0, 1)
              : whole);
      EXPECT_TRUE(close(given, plain->forward(whole), 1e-5)) << sequence;
    }
  });
}

/// Queries, keys and values in one layer, with fewer heads of keys.
struct GroupedImpl : torch::nn::Module {
  GroupedImpl() {
    torch::manual_seed(3);
    register_module("qkv", qkv = torch::nn::Linear(8, 16));
    register_module("out", out = torch::nn::Linear(8, 8));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) {
    const auto all = qkv(x);
    const auto part = all.size(-1) / 4;
    const auto heads = [&](std::int64_t first, std::int64_t count) {
      return all.narrow(-1, first * part, count * part).unflatten(-1, {-1, 2}).transpose(1, 2);
    };
    const auto y = at::scaled_dot_product_attention(heads(0, 2), heads(2, 1), heads(3, 1), {}, 0.0,
                                                    true, {}, true);
    return out(y.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear qkv = nullptr, out = nullptr;
};
TORCH_MODULE(Grouped);

TEST(TensorParallelPlan, CutsBlocksOfUnequalSizes) {
  on_processes(2, [] {
    const Accelerator accelerator(tensors(2));
    const auto mesh = accelerator.torch_device_mesh();
    Grouped plain, cut;
    apply_tp_plan(*cut,
                  {{.layers = "qkv", .style = TpStyle::kColwise, .block_sizes = {8, 4, 4}},
                   {.layers = "out", .style = TpStyle::kRowwise}},
                  mesh);
    torch::manual_seed(4);
    const auto x = torch::randn({2, 5, 8}, torch::kDouble);
    EXPECT_TRUE(close(cut(x), plain(x)));
    const auto refused = [&](const TpRule& rule) {
      Grouped net;
      return message_of<ArgumentError>([&] { apply_tp_plan(*net, {rule}, mesh); });
    };
    EXPECT_TRUE(has(refused({.layers = "qkv", .style = TpStyle::kColwise, .block_sizes = {8, 4}}),
                    "the block_sizes of the rule 'qkv' add up to 12, but 'qkv' has 16 outputs"));
    EXPECT_TRUE(
        has(refused({.layers = "qkv", .style = TpStyle::kColwise, .block_sizes = {9, 4, 3}}),
            "has size 16 in blocks of 9, 4, 3, which cannot be divided among 2 processes"));
    EXPECT_TRUE(has(refused({.layers = "qkv", .style = TpStyle::kColwise, .blocks = 3}),
                    "Give block_sizes if blocks differ"));
    EXPECT_TRUE(has(refused({.layers = "out", .style = TpStyle::kRowwise, .block_sizes = {4, 4}}),
                    "Only layers of 'colwise'"));
  });
}

// ---- dropout ------------------------------------------------------------------------------------

/// Dropout of whole activations and, by the function for it, of cut ones.
struct DroppingImpl : PairImpl {
  Tensor forward(const Tensor& x) {
    const auto hidden = nn::parallel_dropout(torch::gelu(up(norm(x))), 0.4, true, -1, group);
    return x + torch::dropout(down(hidden), 0.3, true);
  }
  c10::intrusive_ptr<c10d::ProcessGroup> group = nullptr;
};
TORCH_MODULE(Dropping);

TEST(TensorParallelDropout, OfOneSeedDropsWhatOneProcessDrops) {
  on_processes(2, [] {
    const Accelerator accelerator(tensors(2));
    Dropping plain, cut;
    apply_tp_plan(*cut, pair_plan(), accelerator.torch_device_mesh());
    cut->group = accelerator.torch_device_mesh()->get_group("tp");
    const auto x = input_of(0);
    set_seed(9);
    const auto wanted = plain(x);
    set_seed(9);
    const auto given = cut(x);
    EXPECT_TRUE(close(given, wanted));
    wanted.pow(2).sum().backward();
    given.pow(2).sum().backward();
    EXPECT_TRUE(close(cut->norm->weight.grad(), plain->norm->weight.grad(), 1e-10));
  });
}

// ---- drift --------------------------------------------------------------------------------------

/// Trains, changes a parameter on one rank before step 3, and returns what is thrown.
std::string drift(Accelerator& accelerator, const std::string& name, int rank) {
  Pair net;
  apply_tp_plan(*net, pair_plan(), accelerator.torch_device_mesh());
  auto [model, optimizer] = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.01}));
  return message_of<CommError>([&, &model = model, &optimizer = optimizer] {
    for (int step = 0; step < 12; ++step) {
      if (step == 3 && accelerator.process_index() == rank) {
        const torch::NoGradGuard no_grad;
        net->named_parameters()[name].add_(0.5);
      }
      accelerator.backward(model(input_of(step)).pow(2).mean());
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

TEST(TensorParallelDrift, OfAParameterThatAllHaveIsNoticed) {
  on_processes(2, [] {
    auto options = tensors(2);
    options.drift_check = 1;
    Accelerator accelerator(options);
    EXPECT_TRUE(has(drift(accelerator, "norm.weight", 1), "norm.weight"));
  });
}

TEST(TensorParallelDrift, OfAPartIsNoticedAmongItsCopies) {
  on_processes(4, {.environment = {{"ACCELERATE_ALLOW_CP_STANDALONE", "true"}}}, [] {
    auto options = anew({.parallelism_config = ParallelismConfig{.tp_size = 2, .cp_size = 2}});
    options.drift_check = 1;
    Accelerator accelerator(options);
    // Ranks 0 and 2 have the first part. The others wait for them, and learn of it, too.
    const auto message = drift(accelerator, "up.weight", 2);
    if (accelerator.tensor_parallel_rank() == 0) {
      EXPECT_TRUE(has(message, "up.weight"));
    }
  });
}

// ---- what is around -----------------------------------------------------------------------------

TEST(TensorParallelMetrics, CountASampleOnceForEachProcessOfAGroup) {
  on_processes(4, [] {
    Accelerator accelerator(tensors(2, 2));
    auto loader =
        accelerator.prepare(make_data_loader(torch::arange(7, torch::kDouble), {.batch_size = 2}));
    std::vector<Tensor> rows, listed;
    for (auto& x : loader) {
      rows.push_back(accelerator.gather_for_metrics(x));
      listed.push_back(accelerator.gather_for_metrics(x, {.use_gather_object = true}));
    }
    for (const auto& seen : {torch::cat(rows), torch::cat(listed)}) {
      EXPECT_EQ(seen.numel(), 14);
      EXPECT_EQ(seen.mean().item<double>(), 3.0);
    }
    EXPECT_TRUE(rows.back().equal(torch::tensor({4, 5, 4, 5, 6, 6}).to(torch::kDouble)));
  });
}

TEST(TensorParallelPlugins, AnFsdpPluginHasNothingToShardBeside) {
  on_processes(2, [] {
    auto options = tensors(2);
    options.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2};
    Accelerator accelerator(options);
    Pair plain, net;
    apply_tp_plan(*net, pair_plan(), accelerator.torch_device_mesh());
    auto [model, optimizer] = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.1}));
    const auto x = input_of(0);
    accelerator.backward(model(x).pow(2).mean());
    plain(x).pow(2).mean().backward();
    optimizer.step();
    torch::optim::SGD(plain->parameters(), 0.1).step();
    EXPECT_TRUE(close(model(x), plain(x)));
  });
}

}  // namespace
}  // namespace accelerate::tensor_parallel_edges_test
