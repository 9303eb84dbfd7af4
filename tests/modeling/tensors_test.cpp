#include "accelerate/modeling/tensors.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "accelerate/state_dict.h"
#include "support/message_of.h"

namespace accelerate::tensors_test {
namespace {

using test::message_of;
using Names = std::vector<std::string>;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    second = register_module("second", torch::nn::Linear(3, 4));
    mask = register_buffer("mask", torch::ones(2));
    mark_non_persistent(*this, "mask");
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor mask;
};
TORCH_MODULE(Net);

/// A class of a user, with a member that nobody else can reach.
struct HeadImpl : torch::nn::Module {
  HeadImpl() { weight = register_parameter("weight", torch::zeros({4, 3})); }
  torch::Tensor weight;
};

Names names_of(const std::vector<std::pair<std::string, torch::Tensor>>& tensors) {
  Names names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  return names;
}

void move_to_meta(torch::nn::Module& module, const std::string& name) {
  set_module_tensor_to_device(module, name, torch::kMeta);
}

TEST(NamedModuleTensors, ListsParametersThenBuffersEachOnce) {
  Net net;
  EXPECT_EQ(names_of(named_module_tensors(*net)), Names{"mask"});
  EXPECT_EQ(names_of(named_module_tensors(*net->norm)),
            (Names{"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}));
  EXPECT_EQ(names_of(named_module_tensors(*net->norm, {.include_buffers = false})),
            (Names{"weight", "bias"}));
  tie_parameters(*net, {"first.weight", "second.weight"});
  EXPECT_EQ(named_module_tensors(*net, {.recurse = true}).size(), 9U);
  EXPECT_EQ(named_module_tensors(*net, {.recurse = true, .remove_non_persistent = true}).size(),
            8U);
}

TEST(NonPersistentBuffers, StayOutOfStateDicts) {
  Net net;
  EXPECT_FALSE(state_dict(*net).contains("mask"));
  EXPECT_TRUE(state_dict(*net).contains("norm.running_mean"));
  auto parent = std::make_shared<torch::nn::ModuleListImpl>();
  parent->push_back(net.ptr());
  EXPECT_EQ(get_non_persistent_buffers(*parent), std::set<std::string>{});
  EXPECT_EQ(get_non_persistent_buffers(*parent, true), std::set<std::string>{"mask"});
  EXPECT_EQ(get_non_persistent_buffers(*parent, true, true), std::set<std::string>{"0.mask"});
  EXPECT_THROW(mark_non_persistent(*net, "maks"), ArgumentError);
}

TEST(NonPersistentBuffers, AreForgottenWithTheirTensor) {
  // A new buffer may lie where an old one was.
  for (int i = 0; i < 100; ++i) {
    torch::nn::BatchNorm1d norm(2);
    EXPECT_EQ(state_dict(*norm).size(), 5U);
    mark_non_persistent(*norm, "running_mean");
    EXPECT_EQ(state_dict(*norm).size(), 4U);
  }
}

TEST(SetModuleTensorToDevice, KeepsTheTensorObject) {
  Net net;
  const auto weight = net->first->weight;
  const auto value = torch::full({4, 3}, 2.5, torch::kDouble);
  set_module_tensor_to_device(*net, "first.weight", torch::kCPU, {.value = value});
  EXPECT_EQ(weight.scalar_type(), torch::kFloat);  // as the model has it
  EXPECT_EQ(weight.sum().item<float>(), 30);
  EXPECT_TRUE(weight.requires_grad());
  set_module_tensor_to_device(*net, "first.weight", torch::kCPU,
                              {.value = value, .dtype = torch::kHalf});
  EXPECT_EQ(weight.scalar_type(), torch::kHalf);
  EXPECT_TRUE(weight.is_same(net->first->weight));
  set_module_tensor_to_device(*net, "norm.num_batches_tracked", torch::kCPU,
                              {.value = torch::tensor(7), .dtype = torch::kHalf});
  EXPECT_EQ(net->norm->num_batches_tracked.scalar_type(), torch::kLong);  // integers stay
  EXPECT_EQ(net->norm->num_batches_tracked.item<int>(), 7);
}

TEST(SetModuleTensorToDevice, LeavesAndEntersTheMetaDevice) {
  Net net;
  const auto weight = net->first->weight;
  const auto values = weight.detach().clone();
  set_module_tensor_to_device(*net, "first.weight", torch::kMeta, {.dtype = torch::kHalf});
  EXPECT_TRUE(weight.is_meta());
  EXPECT_EQ(weight.scalar_type(), torch::kHalf);
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_EQ(message_of<ArgumentError>([&] {
              set_module_tensor_to_device(*net, "first.weight", torch::kCPU);
            }).substr(0, 75),
            "first.weight is on the meta device, we need a `value` to put in on cpu. Loa");
  set_module_tensor_to_device(*net, "first.weight", torch::kCPU,
                              {.value = values, .dtype = torch::kFloat});
  EXPECT_TRUE(torch::equal(net->first->weight, values));
  net->first(torch::ones({1, 3})).sum().backward();  // and it trains
  EXPECT_TRUE(torch::equal(weight.grad(), torch::ones({4, 3})));
}

TEST(SetModuleTensorToDevice, RefusesAMetaTensorThatAGraphWasRecordedOn) {
  Net net;
  move_to_meta(*net, "first.weight");
  move_to_meta(*net, "first.bias");
  const auto out = net->first(torch::ones({1, 3}, torch::kMeta));
  EXPECT_THROW(set_module_tensor_to_device(*net, "first.weight", torch::kCPU,
                                           {.value = torch::ones({4, 3})}),
               StateError);
}

TEST(SetModuleTensorToDevice, NamesWhatIsWrong) {
  Net net;
  EXPECT_EQ(message_of<ArgumentError>([&] {
              set_module_tensor_to_device(*net, "first.weight", torch::kCPU,
                                          {.value = torch::ones({2, 2})});
            }),
            "Trying to set a tensor of shape [2, 2] in \"weight\" (which has shape [4, 3]), this "
            "looks incorrect. The whole name is 'first.weight'.");
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { set_module_tensor_to_device(*net, "first.wieght", torch::kCPU); }),
            "Linear does not have a parameter or a buffer named wieght. The whole name is "
            "'first.wieght'.");
  EXPECT_THROW(set_module_tensor_to_device(*net, "frist.weight", torch::kCPU), ArgumentError);
}

TEST(TieParameters, MakesLibTorchsLayersShareOneTensor) {
  Net net;
  EXPECT_EQ(tie_parameters(*net, {"first.weight", "second.weight"}), TieKind::kIdentity);
  EXPECT_TRUE(net->second->weight.is_same(net->first->weight));
  EXPECT_EQ(find_tied_parameters(*net), (std::vector<Names>{{"first.weight", "second.weight"}}));
  (net->first(torch::ones({1, 3})) + net->second(torch::ones({1, 3}))).sum().backward();
  EXPECT_TRUE(torch::equal(net->first->weight.grad(), torch::full({4, 3}, 2.0)));
  EXPECT_THROW(tie_parameters(*net, {"first.weight", "first.bias"}), ArgumentError);
}

TEST(TieParameters, SharesTheMemoryOfMembersThatCannotBeReached) {
  Net net;
  const auto head = std::make_shared<HeadImpl>();
  net->register_module("head", std::static_pointer_cast<torch::nn::Module>(head));
  EXPECT_EQ(tie_parameters(*net, {"first.weight", "head.weight"}), TieKind::kStorage);
  EXPECT_FALSE(head->weight.is_same(net->first->weight));
  EXPECT_EQ(head->weight.data_ptr(), net->first->weight.data_ptr());
  EXPECT_EQ(find_tied_parameters(*net), (std::vector<Names>{{"first.weight", "head.weight"}}));
}

TEST(TieParameters, FindsTiesOfMetaTensorsAndOfSharedModules) {
  Net net;
  tie_parameters(*net, {"first.weight", "second.weight"});
  move_to_meta(*net, "first.weight");
  move_to_meta(*net, "first.bias");
  move_to_meta(*net, "second.bias");
  EXPECT_EQ(find_tied_parameters(*net), (std::vector<Names>{{"first.weight", "second.weight"}}));
  auto twice = std::make_shared<torch::nn::ModuleListImpl>();
  twice->push_back(net->norm.ptr());
  twice->push_back(net->norm.ptr());
  EXPECT_EQ(find_tied_parameters(*twice),
            (std::vector<Names>{{"0.weight", "1.weight"}, {"0.bias", "1.bias"}}));
}

TEST(TieParameters, FindsTiesOfParametersWhoseDataIsAway) {
  Net net;
  tie_parameters(*net, {"first.weight", "second.weight"});
  net->first->weight.storage()
      .unsafeGetStorageImpl()
      ->release_data_and_set_meta_custom_data_ptr_error_msg_("offloaded");
  EXPECT_EQ(find_tied_parameters(*net), (std::vector<Names>{{"first.weight", "second.weight"}}));
}

TEST(RetieParameters, TakesTheFirstThatIsNotOnTheMetaDevice) {
  Net net;
  move_to_meta(*net, "first.weight");
  const std::vector<Names> tied{{"first.weight", "second.weight"}};
  const auto real = net->second->weight;
  retie_parameters(*net, tied);
  EXPECT_TRUE(net->first->weight.is_same(real));
  move_to_meta(*net, "first.weight");
  EXPECT_TRUE(net->second->weight.is_meta());
  retie_parameters(*net, tied);  // all are: nothing to do
  EXPECT_TRUE(net->first->weight.is_meta());
}

}  // namespace
}  // namespace accelerate::tensors_test
