// States that Python saved with torch.save go on here; interop/states.py tests the other direction.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/accelerator.h"
#include "accelerate/grad_scaler.h"
#include "accelerate/random.h"
#include "accelerate/torch_archive.h"
#include "checkpoint/state_cases.h"
#include "support/command.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

const Value& reference(const std::string& name) {
  static std::map<std::string, Value> files;
  if (!files.contains(name)) files[name] = torch_load(test::reference_path("states/" + name));
  return files.at(name);
}

void expect_near(const Value& ours, const Value& python) {
  ASSERT_EQ(ours.as_list().size(), python.as_list().size());
  for (std::size_t i = 0; i < ours.as_list().size(); ++i) {
    EXPECT_TRUE(torch::allclose(ours.as_list()[i].as_tensor(), python.as_list()[i].as_tensor(),
                                /*rtol=*/1e-10, /*atol=*/1e-12))
        << "parameter " << i;
  }
}

std::vector<std::string> keys_of(const Value& dict) {
  std::vector<std::string> names;
  for (const auto& [key, value] : dict.as_dict()) names.push_back(key.to_string());
  return names;
}

TEST(StatesOfPython, LetOurOptimizersGoOn) {
  const auto& file = reference("optimizers.pt");
  EXPECT_EQ(file.as_dict().size(), test::optimizer_cases().size());
  for (const auto& [name, build] : test::optimizer_cases()) {
    SCOPED_TRACE(name);
    const auto& saved = file.at(name);
    expect_near(test::continued_optimizer(build, saved), saved.at("next"));
  }
}

TEST(StatesOfPython, HaveTheLayoutOfOurs) {
  const auto& file = reference("optimizers.pt");
  for (const auto& [name, build] : test::optimizer_cases()) {
    SCOPED_TRACE(name);
    const Value ours = test::optimizer_case(build);
    const auto& python = file.at(name).at("state");
    EXPECT_EQ(ours.at("state").at("param_groups"), python.at("param_groups"));  // 0 equals 0.0
    EXPECT_EQ(keys_of(ours.at("state").at("param_groups").as_list()[0]),
              keys_of(python.at("param_groups").as_list()[0]));
    for (const auto& [index, state] : python.at("state").as_dict()) {
      for (const auto& [key, value] : state.as_dict()) {
        if (!value.is_tensor()) continue;
        const auto& mine = ours.at("state").at("state").at(index).at(key).as_tensor();
        EXPECT_EQ(mine.scalar_type(), value.as_tensor().scalar_type()) << key.repr();
        EXPECT_EQ(mine.sizes(), value.as_tensor().sizes()) << key.repr();
      }
    }
  }
}

TEST(StatesOfPython, LetOurSchedulersGoOn) {
  const auto& file = reference("schedulers.pt");
  for (const auto& name : test::scheduler_names()) {
    SCOPED_TRACE(name);
    const auto& saved = file.at(name);
    const Value lrs = test::continued_scheduler(name, saved);
    ASSERT_EQ(lrs.as_list().size(), saved.at("lr").as_list().size());
    for (std::size_t i = 0; i < lrs.as_list().size(); ++i) {
      for (std::size_t group = 0; group < 2; ++group) {
        EXPECT_NEAR(lrs.as_list()[i].as_list()[group].as_double(),
                    saved.at("lr").as_list()[i].as_list()[group].as_double(), 1e-14)
            << i;
      }
    }
  }
}

TEST(StatesOfPython, AreReadByTheGradScaler) {
  GradScaler scaler({.enabled = true});
  scaler.load_state_dict(reference("scaler.pt"));
  EXPECT_EQ(scaler.state_dict(), reference("scaler.pt"));
}

/// The random states of an accelerator.
Stateful& random_states(Accelerator& accelerator) {
  for (const auto& entry : accelerator._state_entries()) {
    if (entry.kind == StateKind::kRandomStates) return *entry.object;
  }
  throw std::runtime_error("no random states");
}

std::tuple<std::uint32_t, std::uint32_t, float> draws() {
  const auto host = host_rng()();
  return {host, numpy_rng()(), torch::rand({1}).item<float>()};
}

TEST(StatesOfPython, SetAllRandomGenerators) {
  Accelerator accelerator({.cpu = true});
  set_seed(1);
  random_states(accelerator)
      .load_state_dict(torch_load(test::reference_path("torch_archive/random_states_0.pkl")));
  const auto after_python = draws();
  set_seed(7);
  EXPECT_EQ(after_python, draws());
}

TEST(RandomStates, SurviveAFile) {
  Accelerator accelerator({.cpu = true});
  auto& states = random_states(accelerator);
  set_seed(3);
  (void)draws();
  const test::Folder folder;
  torch_save(states.state_dict(), folder / "random_states_0.pkl");
  const auto expected = draws();
  states.load_state_dict(torch_load(folder / "random_states_0.pkl"));
  EXPECT_EQ(draws(), expected);
}

}  // namespace
}  // namespace accelerate
