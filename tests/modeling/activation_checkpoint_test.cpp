// Activations that backward computes again: the same bits, less memory, and errors that name the
// function.
#include <accelerate/nn.h>
#include <accelerate/precision/autocast.h>
#include <accelerate/random.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;
using torch::Tensor;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width = 8, double dropout = 0.5) : drop(dropout) {
    register_module("norm", norm = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    register_module("up", up = torch::nn::Linear(width, 4 * width));
    register_module("down", down = torch::nn::Linear(4 * width, width));
    register_module("drop", drop);
  }
  Tensor forward(const Tensor& x) { return x + drop(down(torch::gelu(up(norm(x))))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::Dropout drop;
};
TORCH_MODULE(Block);

/// A stack of blocks that asks for marks.
struct StackImpl : torch::nn::Module {
  explicit StackImpl(int count, std::int64_t width = 8, double dropout = 0.5) {
    for (int i = 0; i < count; ++i) blocks->push_back(Block(width, dropout));
    register_module("blocks", blocks);
  }
  Tensor forward(Tensor x) {
    for (const auto& block : *blocks) {
      x = maybe_activation_checkpoint(std::dynamic_pointer_cast<BlockImpl>(block), x);
    }
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Stack);

bool is_block(const torch::nn::Module& module) {
  return dynamic_cast<const BlockImpl*>(&module) != nullptr;
}

Tensor input(bool trained = false) {
  return torch::linspace(-1, 1, 24).view({3, 8}).requires_grad_(trained);
}

/// The gradients of `f()` with respect to `leaves`; random numbers start from one seed.
std::vector<Tensor> gradients(const std::vector<Tensor>& leaves, const std::function<Tensor()>& f) {
  torch::manual_seed(5);
  for (const auto& leaf : leaves) leaf.mutable_grad() = Tensor();
  f().pow(2).sum().backward();
  std::vector<Tensor> result;
  for (const auto& leaf : leaves) result.push_back(leaf.grad());
  return result;
}

void expect_same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(a[i].defined() && b[i].defined()) << i;
    EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
  }
}

/// The parameters of the block, and the input.
template <class Holder>
std::vector<Tensor> leaves_of(const Holder& net, const Tensor& x) {
  auto leaves = net->parameters();
  if (x.requires_grad()) leaves.push_back(x);
  return leaves;
}

/// Counts the bytes of tensors on the CPU while it lives.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() { c10::SetCPUAllocator(this, kPriority); }
  ~CountingAllocator() override { c10::SetCPUAllocator(&before_, kPriority); }
  CountingAllocator(const CountingAllocator&) = delete;
  CountingAllocator& operator=(const CountingAllocator&) = delete;

  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
    *reinterpret_cast<std::size_t*>(memory) = bytes;  // before the data: memory may outlive this
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    return {memory + 64, memory + 64, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  [[nodiscard]] static std::size_t live() { return live_; }
  /// The most since the call before.
  static std::size_t take_peak() { return std::exchange(peak_, live_); }

 private:
  static constexpr std::uint8_t kPriority = 200;

  static void release(void* data) {
    auto* const memory = static_cast<std::byte*>(data) - 64;
    live_ -= *reinterpret_cast<std::size_t*>(memory);
    std::free(memory);
  }

  c10::Allocator& before_ = *c10::GetCPUAllocator();
  inline static std::size_t live_ = 0;
  inline static std::size_t peak_ = 0;
};

TEST(ActivationCheckpoint, GivesTheBitsOfThePlainCallWithDropout) {
  for (const bool trained_input : {false, true}) {
    Block block;
    const auto x = input(trained_input);
    const auto plain = gradients(leaves_of(block, x), [&] { return block(x); });
    const auto again =
        gradients(leaves_of(block, x), [&] { return activation_checkpoint(block, x); });
    expect_same_bits(again, plain);
  }
}

TEST(ActivationCheckpoint, LeavesTheRandomNumbersOfTheProgramAsTheyWere) {
  Block block;
  const auto after = [&](bool checkpointed) {
    torch::manual_seed(1);
    host_rng().seed(1);
    const auto x = input();
    const auto y = checkpointed ? activation_checkpoint(block, x) : block(x);
    const auto between = torch::rand({2});
    y.sum().backward();
    return std::tuple(torch::cat({between, torch::rand({2})}), host_rng()());
  };
  const auto [plain, plain_host] = after(false);
  const auto [again, again_host] = after(true);
  EXPECT_TRUE(torch::equal(plain, again));
  EXPECT_EQ(plain_host, again_host);
}

TEST(ActivationCheckpoint, DrawsTheSameNumbersFromTheEngineOfTheHost) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  const auto f = [weight](const Tensor& x) {
    return (weight * static_cast<double>(host_rng()() % 100 + 1) * x).sin();
  };
  const auto x = torch::ones({3});
  host_rng().seed(3);
  const auto plain = gradients({weight}, [&] { return f(x); });
  host_rng().seed(3);
  expect_same_bits(gradients({weight}, [&] { return activation_checkpoint(f, x); }), plain);
}

TEST(ActivationCheckpoint, WithoutRandomStatesDrawsOtherNumbers) {
  Block block;
  const auto x = input();
  const auto plain = gradients(block->parameters(), [&] { return block(x); });
  const auto again = gradients(block->parameters(), [&] {
    return activation_checkpoint(ActivationCheckpointOptions{.preserve_rng_state = false}, block,
                                 x);
  });
  EXPECT_FALSE(torch::equal(plain[2], again[2]));
}

TEST(ActivationCheckpoint, ComputesAgainUnderTheAutocastOfTheForward) {
  Block block;
  const auto x = input(true);
  std::vector<at::ScalarType> types;
  auto f = [block, &types](const Tensor& in) mutable {
    const auto out = block->up(block->norm(in));
    types.push_back(out.scalar_type());
    return block->down(torch::gelu(out)).to(torch::kFloat);
  };
  const auto run = [&](bool checkpointed) {
    return gradients(leaves_of(block, x), [&] {
      const AutocastScope scope(at::kCPU, at::kBFloat16);
      return checkpointed ? activation_checkpoint(f, x) : f(x);
    });
  };
  const auto plain = run(false);
  types.clear();
  const auto again = run(true);
  expect_same_bits(again, plain);
  EXPECT_EQ(types, (std::vector{at::kBFloat16, at::kBFloat16}));
}

// -- what goes in and out -------------------------------------------------------------------------

struct Hidden {
  Tensor state;
  std::string kind;
};
constexpr auto tensor_tree_fields(std::type_identity<Hidden>) {
  return std::tuple{field("state", &Hidden::state)};
}

TEST(ActivationCheckpoint, TakesAndReturnsTrees) {
  const auto weight = torch::full({3}, 0.5, torch::requires_grad());
  using Many = std::map<std::string, std::vector<Tensor>>;
  const auto f = [weight](const Hidden& hidden, const Many& many, std::optional<Tensor> mask,
                          double scale, const char* what) {
    auto y = (hidden.state * weight).sin() * many.at("b")[0] + many.at("a")[0].exp() * scale;
    if (mask) y = y * *mask;
    return std::pair(Hidden{y, hidden.kind + what}, y.argmax());
  };
  const auto state = torch::tensor({1.0F, 2.0F, 3.0F}).requires_grad_(true);
  const auto a = torch::tensor({0.1F, 0.2F, 0.3F}).requires_grad_(true);
  const Many many{{"b", {a * 3}}, {"a", {a, Tensor()}}};
  const auto call = [&](const auto& through) {
    return gradients({weight, state, a}, [&] {
      const auto [out, index] =
          through(f, Hidden{state, "kind"}, many, std::optional<Tensor>(), 2.0, " of");
      EXPECT_EQ(out.kind, "kind of");
      EXPECT_FALSE(index.requires_grad());
      return out.state;
    });
  };
  const auto plain = call([](const auto& g, const auto&... inputs) { return g(inputs...); });
  const auto again = call(
      [](const auto& g, const auto&... inputs) { return activation_checkpoint(g, inputs...); });
  expect_same_bits(again, plain);
}

TEST(ActivationCheckpoint, TakesHoldersPointersFunctionsAndNoInputs) {
  torch::nn::Sequential layers(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
  const auto x = input();
  const auto leaves = layers->parameters();
  const auto plain = gradients(leaves, [&] { return layers->forward(x); });
  expect_same_bits(gradients(leaves, [&] { return activation_checkpoint(layers, x); }), plain);
  expect_same_bits(gradients(leaves, [&] { return activation_checkpoint(layers.ptr(), x); }),
                   plain);
  expect_same_bits(
      gradients(
          leaves,
          [&] { return activation_checkpoint([layers, x] { return layers.ptr()->forward(x); }); }),
      plain);
}

TEST(ActivationCheckpoint, IsThePlainCallWithoutGradients) {
  const auto kept = std::make_shared<int>(0);
  const torch::NoGradGuard no_grad;
  const auto weight = torch::ones({3}, torch::requires_grad());
  const auto y = activation_checkpoint([kept, weight](const Tensor& x) { return x * weight; },
                                       torch::ones({3}));
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(kept.use_count(), 1);
}

TEST(ActivationCheckpoint, FreesTheFunctionWithTheGraph) {
  const auto kept = std::make_shared<int>(0);
  const auto weight = torch::ones({3}, torch::requires_grad());
  const auto f = [kept, weight](const Tensor& x) { return (x * weight).sin(); };
  {
    const auto y = activation_checkpoint(f, torch::ones({3}));
    EXPECT_EQ(kept.use_count(), 3);
    y.sum().backward();
    EXPECT_EQ(kept.use_count(), 2);  // backward is done with it, though the graph is still there
  }
  EXPECT_EQ(kept.use_count(), 2);
}

// -- memory ---------------------------------------------------------------------------------------

TEST(ActivationCheckpoint, KeepsOnlyInputsAndOneBlockAtATime) {
  constexpr int kBlocks = 12;
  Stack net(kBlocks, 64);
  const auto x = torch::randn({128, 64});  // 32 KiB
  net(x).sum().backward();                 // gradients are there from now on
  const CountingAllocator memory;
  struct Measured {
    std::size_t kept, peak;
  };
  const auto measure = [&] {
    const auto before = memory.live();
    const auto loss = net(x).sum();
    const auto kept = memory.live() - before;
    (void)memory.take_peak();
    loss.backward();
    return Measured{.kept = kept, .peak = memory.take_peak() - before};
  };
  const auto plain = measure();
  (void)apply_activation_checkpointing(*net, is_block);
  const auto again = measure();

  const auto of_a_block = plain.kept / kBlocks;
  EXPECT_GT(of_a_block, 9 * x.nbytes());  // two tensors that are four times as wide, and more
  // An input for each block, and the state of a generator.
  EXPECT_LT(again.kept, kBlocks * (x.nbytes() + 5'500) + x.nbytes());
  EXPECT_LT(again.peak, again.kept + 2 * of_a_block);
  EXPECT_LT(3 * again.peak, plain.peak);
  RecordProperty("plain_peak_bytes", static_cast<int>(plain.peak));
  RecordProperty("checkpointed_peak_bytes", static_cast<int>(again.peak));
}

// -- graphs ---------------------------------------------------------------------------------------

TEST(ActivationCheckpoint, Nests) {
  Block first, second, third;
  const auto x = input(true);
  auto leaves = first->parameters();
  for (const auto& block : {second, third}) {
    for (const auto& one : block->parameters()) leaves.push_back(one);
  }
  leaves.push_back(x);
  const auto all = [&](const auto& through) {
    const auto inner = [second, third, through](const Tensor& t) mutable {
      return through([third](const Tensor& u) mutable { return third(u).tanh(); }, second(t)) * 2;
    };
    const auto outer = [first, inner, through](const Tensor& t) mutable {
      return through(inner, first(t).sin()).exp();
    };
    return gradients(leaves, [&] { return through(outer, x); });
  };
  const auto plain = all([](auto f, const Tensor& t) { return f(t); });
  const auto again = all([](auto f, const Tensor& t) { return activation_checkpoint(f, t); });
  expect_same_bits(again, plain);
}

TEST(ActivationCheckpoint, GraphsThatAreKeptRunTwice) {
  Block block;
  const auto x = input(true);
  const auto twice = [&](bool checkpointed) {
    return gradients(leaves_of(block, x), [&] {
      const auto y = checkpointed ? activation_checkpoint(block, x) : block(x);
      y.sum().backward({}, /*keep_graph=*/true);
      return y;
    });
  };
  expect_same_bits(twice(true), twice(false));
}

TEST(ActivationCheckpoint, HasSecondDerivatives) {
  const auto weight = torch::full({3}, 0.5, torch::requires_grad());
  const auto x = torch::tensor({1.0F, 2.0F, 3.0F}).requires_grad_(true);
  const auto f = [weight](const Tensor& t) { return (t * weight).sin() * t.exp(); };
  const auto penalty = [&](const Tensor& y) {
    const auto slope =
        torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return slope.pow(2);
  };
  const auto plain = gradients({weight, x}, [&] { return penalty(f(x)); });
  const auto again = gradients({weight, x}, [&] { return penalty(activation_checkpoint(f, x)); });
  expect_same_bits(again, plain);
}

TEST(ActivationCheckpoint, FunctionsMayRunABackwardOfTheirOwn) {
  const auto weight = torch::full({3}, 0.5, torch::requires_grad());
  const auto f = [weight](const Tensor& t) {
    const auto y = (t * weight).sin();
    const auto slope = torch::autograd::grad({y.sum()}, {weight}, {}, true, true)[0];
    return y * slope;
  };
  const auto x = torch::tensor({1.0F, 2.0F, 3.0F});
  const auto plain = gradients({weight}, [&] { return f(x); });
  expect_same_bits(gradients({weight}, [&] { return activation_checkpoint(f, x); }), plain);
}

TEST(ActivationCheckpoint, EndsTheSecondCallWhenAllTensorsAreThere) {
  const auto weight = torch::full({3}, 0.5, torch::requires_grad());
  const auto ends = std::make_shared<int>(0);
  const auto f = [weight, ends](const Tensor& x) {
    auto y = (x * weight).sin();
    ++*ends;
    return y;
  };
  const auto x = torch::ones({3});
  (void)gradients({weight}, [&] { return activation_checkpoint(f, x); });
  EXPECT_EQ(*ends, 1);
  (void)gradients({weight}, [&] {
    return activation_checkpoint(ActivationCheckpointOptions{.early_stop = false}, f, x);
  });
  EXPECT_EQ(*ends, 3);
}

// -- faults ---------------------------------------------------------------------------------------

/// The text of what backward throws, for a function that differs in its second call.
template <class E = ArgumentError, class F>
std::string fault(const F& f) {
  const auto weight = torch::full({3}, 0.5, torch::requires_grad());
  const auto calls = std::make_shared<int>(0);
  const auto counted = [f, weight, calls](const Tensor& x) { return f(x * weight, ++*calls); };
  return message_of<E>([&] { activation_checkpoint(counted, torch::ones({3})).sum().backward(); });
}

TEST(ActivationCheckpoint, NamesTensorsThatDifferInTheSecondCall) {
  auto text = fault([](const Tensor& x, int call) { return call == 1 ? x.sin().cos() : x.neg(); });
  EXPECT_NE(text.find("activation_checkpoint: accelerate::"), std::string::npos) << text;
  EXPECT_NE(text.find("saved 3 tensors for backward in forward and 1 when"), std::string::npos)
      << text;
  text = fault([](const Tensor& x, int call) { return x.slice(0, 0, 4 - call).sin(); });
  EXPECT_NE(
      text.find(
          "tensor 2 of the 2 that it saves was float32[3] on cpu in forward and is float32[2] "
          "on cpu now"),
      std::string::npos)
      << text;
  text = fault([](const Tensor& x, int call) {
    return x.to(call == 1 ? torch::kFloat : torch::kDouble).sin();
  });
  EXPECT_NE(text.find("is float64[3] on cpu now"), std::string::npos) << text;
}

TEST(ActivationCheckpoint, NamesMoreTensorsIfTheSecondCallRunsToItsEnd) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  const auto calls = std::make_shared<int>(0);
  const auto f = [weight, calls](const Tensor& x) {
    const auto y = (x * weight).sin();
    return ++*calls == 1 ? y : y.cos();
  };
  const auto text = message_of<ArgumentError>([&] {
    activation_checkpoint(ActivationCheckpointOptions{.early_stop = false}, f, torch::ones({3}))
        .sum()
        .backward();
  });
  EXPECT_NE(text.find("saved 2 tensors for backward in forward and 3 when"), std::string::npos)
      << text;
}

TEST(ActivationCheckpoint, NamesInputsThatWereChangedInPlace) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  const auto x = torch::ones({3});
  const auto y = activation_checkpoint([weight](const Tensor& t) { return (t * weight).sin(); }, x);
  x.add_(1);
  const auto text = message_of<ArgumentError>([&] { y.sum().backward(); });
  EXPECT_NE(text.find("tensor 1 of its 1 inputs cannot be used again in backward"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("modified by an inplace operation"), std::string::npos) << text;
}

TEST(ActivationCheckpoint, NamesTensorsThatTheFunctionChangesInPlace) {
  const auto text = fault([](const Tensor& x, int) {
    const auto y = x.sin();  // saves x
    const torch::NoGradGuard no_grad;
    x.add_(1);
    return y;
  });
  // The second call ended before the change: the gradient is right.
  EXPECT_EQ(text, "nothing was thrown");
  const auto later = fault([](const Tensor& x, int) {
    auto y = x.exp();  // saves its result
    {
      const torch::NoGradGuard no_grad;
      y.add_(1);
    }
    return y.sin();
  });
  EXPECT_NE(later.find("changes a tensor in place that it needs in backward: number 2 of the 3"),
            std::string::npos)
      << later;
}

TEST(ActivationCheckpoint, PassesOnWhatTheFunctionThrows) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  EXPECT_THROW(
      activation_checkpoint([](const Tensor&) -> Tensor { throw std::out_of_range("x"); }, weight),
      std::out_of_range);
  // No hooks are left behind.
  const auto y = (weight * weight).sin();
  y.sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), 2 * torch::cos(torch::ones({3}))));

  auto text = fault<std::out_of_range>([](const Tensor& x, int call) {
    if (call == 2) throw std::out_of_range("in the second call");
    return x.sin();
  });
  EXPECT_EQ(text, "in the second call");
  text = fault<Error>([](const Tensor& x, int call) {
    if (call == 2) throw 42;
    return x.sin();
  });
  EXPECT_NE(text.find("threw something that is no std::exception"), std::string::npos) << text;
}

TEST(ActivationCheckpoint, CanBeTriedAgainAfterAnError) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  const auto calls = std::make_shared<int>(0);
  const auto f = [weight, calls](const Tensor& x) {
    if (++*calls == 2) throw std::runtime_error("once");
    return (x * weight).sin();
  };
  const auto y = activation_checkpoint(f, torch::ones({3}));
  EXPECT_THROW(y.sum().backward({}, /*keep_graph=*/true), std::runtime_error);
  y.sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::cos(torch::ones({3}))));
}

// -- marks ----------------------------------------------------------------------------------------

TEST(CheckpointMarks, ChooseWhichBlocksAreComputedAgain) {
  Stack net(3);
  const auto x = input();
  const auto plain = gradients(net->parameters(), [&] { return net(x); });
  EXPECT_FALSE(should_checkpoint(*net->blocks[1]));
  EXPECT_EQ(apply_activation_checkpointing(*net, is_block),
            (std::vector<std::string>{"blocks.0", "blocks.1", "blocks.2"}));
  EXPECT_TRUE(should_checkpoint(*net->blocks[1]));
  EXPECT_FALSE(should_checkpoint(*net));
  EXPECT_FALSE(should_checkpoint(*net->blocks[1]->children()[0]));
  expect_same_bits(gradients(net->parameters(), [&] { return net(x); }), plain);
}

/// Its backward runs another one, `depth` times.
struct Nested : torch::autograd::Function<Nested> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, int depth) {
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto depth = context->saved_data["depth"].toInt();
    if (depth > 0) {
      const at::AutoGradMode on(true);
      const auto x = torch::ones({1}, torch::requires_grad());
      apply(x, static_cast<int>(depth) - 1).sum().backward();
    }
    return {gradients[0], Tensor()};
  }
};

// In a process of its own, whose first backward is one without checkpoints. From a depth of 60 on,
// nested ones need threads of the engine.
TEST(ActivationCheckpoint, DeeplyNestedBackwardsWorkAfterPlainOnes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto train = [] {
    const auto x = torch::ones({1}, torch::requires_grad());
    x.sum().backward();
    activation_checkpoint([](const Tensor& y) { return Nested::apply(y, 70); }, x).sum().backward();
    std::_Exit(x.grad().item<float>() == 2 ? 0 : 1);
  };
  EXPECT_EXIT(train(), testing::ExitedWithCode(0), "");
}

TEST(CheckpointMarks, EndWithTheirModules) {
  const torch::nn::Module* before = nullptr;
  {
    Stack net(1);
    (void)apply_activation_checkpointing(*net, [&](const torch::nn::Module& module) {
      before = &module;
      return true;
    });
    EXPECT_TRUE(should_checkpoint(*before));
  }
  for (int i = 0; i < 20; ++i) {
    const Stack other(1);
    for (const auto& module : other->modules()) EXPECT_FALSE(should_checkpoint(*module));
  }
}

TEST(CheckpointMarks, NeedAModule) {
  Stack net(1);
  EXPECT_EQ(
      message_of<ArgumentError>([&] {
        (void)apply_activation_checkpointing(*net, [](const torch::nn::Module&) { return false; });
      }),
      "apply_activation_checkpointing: none of the modules below Stack was chosen. Choose the "
      "blocks that are repeated in the model.");
}

}  // namespace
}  // namespace accelerate
