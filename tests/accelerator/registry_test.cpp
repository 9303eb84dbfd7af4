// The order of `prepare`, and the registry of what was prepared: what saves or inspects a run sees.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <concepts>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::anew;
using test::Mlp;

class PrepareOrderTest : public test::Stateless {};
class RegistryTest : public test::Stateless {};

/// An object of the program.
struct Curriculum {
  [[nodiscard]] Value state_dict() const { return Value::dict({{"level", Value(level)}}); }
  void load_state_dict(const Value& state) { level = state.at("level").as_int(); }
  std::int64_t level = 0;
};
static_assert(HasStateDict<Curriculum> && HasStateDict<GradScaler> && !HasStateDict<int>);
static_assert(HasStateDict<LRScheduler> && HasStateDict<AcceleratedOptimizer>);

/// A copy that later steps do not change.
Value copy_of(const Value& value) {
  if (value.is_tensor()) return Value(value.as_tensor().detach().clone());
  if (value.is_dict()) {
    Value::Dict copy;
    for (const auto& [key, entry] : value.as_dict()) copy.set(key, copy_of(entry));
    return Value(std::move(copy));
  }
  if (!value.is_list() && !value.is_tuple()) return value;
  Value::List items;
  for (const auto& item : value.items()) items.push_back(copy_of(item));
  return value.is_list() ? Value::list(std::move(items)) : Value::tuple(std::move(items));
}

auto data() {
  return make_data_loader(torch::arange(24, torch::kFloat).view({8, 3}), {.batch_size = 2});
}

template <class Model, class Optimizer, class Scheduler, class Loader>
void train(Accelerator& accelerator, Model& model, Optimizer& optimizer, Scheduler& scheduler,
           Loader& loader) {
  for (auto& x : loader) {
    accelerator.backward(model(x).pow(2).mean());
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
  }
}

TEST_F(PrepareOrderTest, ObjectsComeBackInTheOrderOfTheCaller) {
  std::vector<torch::Tensor> ends;
  for (const bool reversed : {false, true}) {
    Accelerator accelerator(anew());
    torch::manual_seed(1);
    Mlp net;
    auto adamw = AdamW(net->parameters(), {.lr = 0.1});
    auto schedule = StepLR(adamw, {.step_size = 2});
    if (reversed) {
      auto [loader, scheduler, five, optimizer, model] =
          accelerator.prepare(data(), std::move(schedule), 5, std::move(adamw), net);
      static_assert(std::same_as<decltype(five), int>);
      static_assert(std::same_as<decltype(scheduler), AcceleratedScheduler>);
      static_assert(std::same_as<decltype(model), PreparedModel<Mlp>>);
      EXPECT_EQ(five, 5);
      train(accelerator, model, optimizer, scheduler, loader);
    } else {
      auto [model, optimizer, scheduler, loader] =
          accelerator.prepare(net, std::move(adamw), std::move(schedule), data());
      train(accelerator, model, optimizer, scheduler, loader);
    }
    ends.push_back(net->parameters()[0].detach().clone());
  }
  EXPECT_TRUE(ends[0].equal(ends[1])) << "the scheduler follows the moved optimizer either way";
}

TEST_F(PrepareOrderTest, FlagsOfPlacementBelongToTheirArguments) {
  Accelerator accelerator(anew());
  Mlp net;
  auto sgd = torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1));
  auto [optimizer, model] = accelerator.prepare(DevicePlacement{true, false}, sgd, net);
  EXPECT_EQ(&optimizer.optimizer(), &sgd);
  EXPECT_EQ(model.holder().get(), net.get());
}

TEST_F(RegistryTest, ListsAllObjectsInTheOrderOfACheckpointWithPythonsNames) {
  Accelerator accelerator(anew());
  Mlp first, second;
  auto sgd = SGD(first->parameters(), {.lr = 0.1});
  auto schedule = StepLR(sgd, {.step_size = 1});
  Curriculum curriculum;
  const auto shared = std::make_shared<Curriculum>();
  accelerator.register_for_checkpointing(curriculum, shared, second);
  auto prepared = accelerator.prepare(data(), schedule, first, sgd, second);
  std::vector<std::pair<StateKind, std::string>> found;
  for (const auto& entry : accelerator._state_entries()) found.emplace_back(entry.kind, entry.name);
  EXPECT_EQ(found, (decltype(found){{StateKind::kModel, "model"},
                                    {StateKind::kModel, "model_1"},
                                    {StateKind::kOptimizer, "optimizer"},
                                    {StateKind::kScheduler, "scheduler"},
                                    {StateKind::kDataLoader, "dl_state_dict"},
                                    {StateKind::kRandomStates, "random_states"},
                                    {StateKind::kCustom, "custom_checkpoint_0"},
                                    {StateKind::kCustom, "custom_checkpoint_1"},
                                    {StateKind::kCustom, "custom_checkpoint_2"}}));
  accelerator.free_memory();
  EXPECT_EQ(accelerator._state_entries().size(), 4) << "random states and objects of the program";
}

TEST_F(RegistryTest, StatesGoOutAndIn) {
  Accelerator accelerator(anew({.gradient_accumulation_steps = 3}));
  torch::manual_seed(2);
  Mlp net;
  auto adamw = AdamW(net->parameters(), {.lr = 0.1});
  auto schedule = StepLR(adamw, {.step_size = 2});
  Curriculum curriculum{.level = 3};
  accelerator.register_for_checkpointing(curriculum);
  auto [model, optimizer, scheduler, loader] =
      accelerator.prepare(net, std::move(adamw), std::move(schedule), data());
  const auto run = [&, &model = model, &optimizer = optimizer, &scheduler = scheduler](auto& x) {
    const auto accumulating = accelerator.accumulate(model);
    accelerator.backward((model(x) + torch::rand({1})).pow(2).mean());
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
    curriculum.level += static_cast<std::int64_t>(host_rng()() % 1000);
  };
  std::vector<Value> saved;
  int batches = 0;
  for (auto& x : loader) {
    run(x);
    if (++batches < 3) continue;
    for (const auto& entry : accelerator._state_entries()) {
      saved.push_back(copy_of(entry.object->state_dict()));
    }
    break;
  }
  EXPECT_EQ(saved[4].at("step"), Value(3));
  for (auto& x : loader) run(x);

  const auto entries = accelerator._state_entries();
  ASSERT_EQ(entries.size(), saved.size());
  for (std::size_t i = 0; i < saved.size(); ++i) {
    EXPECT_FALSE(copy_of(entries[i].object->state_dict()) == saved[i]) << entries[i].name;
    entries[i].object->load_state_dict(saved[i]);
  }
  for (std::size_t i = 0; i < saved.size(); ++i) {
    EXPECT_EQ(entries[i].object->state_dict(), saved[i]) << entries[i].name;
  }
  int left = 0;
  for (auto& x : loader) left += static_cast<int>(x.size(0) > 0);
  EXPECT_EQ(left, 1) << "the pass goes on behind its third batch of four";
}

}  // namespace
}  // namespace accelerate
