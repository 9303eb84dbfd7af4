#include "accelerate/modeling.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/errors.h"
#include "comm/sharded.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;

struct EncoderImpl : torch::nn::Module {
  EncoderImpl() {
    l1 = register_module("l1", torch::nn::Linear(2, 3));
    l2 = register_module("l2", torch::nn::Linear(3, 2));
  }
  torch::nn::Linear l1{nullptr}, l2{nullptr};
};
TORCH_MODULE(Encoder);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    enc = register_module("enc", Encoder());
    head = register_module("head", torch::nn::BatchNorm1d(2));
  }
  Encoder enc{nullptr};
  torch::nn::BatchNorm1d head{nullptr};
};
TORCH_MODULE(Net);

struct Parallel : ModuleWrapper {
  explicit Parallel(std::shared_ptr<Module> inner)
      : ModuleWrapper(WrapperKind::kDataParallel, std::move(inner)) {}
};
struct Sharded : ModuleWrapper {
  explicit Sharded(std::shared_ptr<Module> inner)
      : ModuleWrapper(WrapperKind::kShardedDataParallel, std::move(inner)) {}
};
struct MixedPrecision : ModuleWrapper {
  explicit MixedPrecision(std::shared_ptr<Module> inner)
      : ModuleWrapper(WrapperKind::kMixedPrecision, std::move(inner)) {}
  // What a Sequential needs of its entries.
  torch::Tensor forward(const torch::Tensor& x) { return x; }
};
struct Compiled : ModuleWrapper {
  explicit Compiled(std::shared_ptr<Module> inner)
      : ModuleWrapper(WrapperKind::kCompiled, std::move(inner)) {}
};
struct CompiledRegions : ModuleWrapper {
  explicit CompiledRegions(std::shared_ptr<Module> inner)
      : ModuleWrapper(WrapperKind::kCompiledRegions, std::move(inner)) {}
};

using ModulePtr = std::shared_ptr<torch::nn::Module>;

TEST(ExtractModel, ReturnsAPlainModelAsItIs) {
  const Net net;
  EXPECT_EQ(extract_model_from_parallel(net), net.ptr());
}

TEST(ExtractModel, TakesOffEveryParallelWrapper) {
  const Net net;
  const auto wrapped = std::make_shared<Parallel>(std::make_shared<Sharded>(net.ptr()));
  EXPECT_EQ(extract_model_from_parallel(wrapped), net.ptr());
}

TEST(ExtractModel, KnowsTheClassOfTheModel) {
  const Net net;
  static_assert(std::same_as<decltype(extract_model_from_parallel(net)), std::shared_ptr<NetImpl>>);
  EXPECT_EQ(extract_model_from_parallel(net)->enc.ptr(), net->enc.ptr());
  EXPECT_EQ(extract_model_from_parallel(net.ptr())->enc.ptr(), net->enc.ptr());
  const auto wrapped = std::make_shared<Parallel>(net.ptr());
  EXPECT_EQ(extract_model_from_parallel<NetImpl>(wrapped)->enc.ptr(), net->enc.ptr());
  EXPECT_EQ(
      message_of<ArgumentError>([&] { (void)extract_model_from_parallel<EncoderImpl>(wrapped); }),
      "The model inside is a Net, not the class Encoder. Ask for the class that was wrapped.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)extract_model_from_parallel(Net(nullptr)); }),
            "There is no model to extract: the pointer is empty.");
}

TEST(ExtractModel, KeepsTheMixedPrecisionWrapperUnlessTold) {
  const Net net;
  const auto mixed = std::make_shared<MixedPrecision>(net.ptr());
  const auto wrapped = std::make_shared<Parallel>(mixed);
  EXPECT_EQ(extract_model_from_parallel(wrapped), mixed);
  EXPECT_EQ(extract_model_from_parallel(wrapped, {.keep_fp32_wrapper = false}), net.ptr());
}

TEST(ExtractModel, PutsTheExtractedModelBackIntoItsCompiledShell) {
  const Net net;
  const auto compiled = std::make_shared<Compiled>(std::make_shared<Parallel>(net.ptr()));
  EXPECT_EQ(extract_model_from_parallel(compiled), compiled);
  EXPECT_EQ(compiled->inner(), net.ptr());
  EXPECT_EQ(compiled->named_children()["_orig_mod"], net.ptr());
}

TEST(ExtractModel, LeavesTheCompiledShellBehindWhenTold) {
  const Net net;
  const auto parallel = std::make_shared<Parallel>(net.ptr());
  for (const ModulePtr& shell : std::vector<ModulePtr>{
           std::make_shared<Compiled>(parallel), std::make_shared<CompiledRegions>(parallel)}) {
    EXPECT_EQ(extract_model_from_parallel(shell, {.keep_torch_compile = false}), net.ptr());
  }
}

TEST(ExtractModel, LooksBelowTheTopOnlyWhenRecursive) {
  const Net net;
  torch::nn::ModuleList list;
  list->push_back(ModulePtr(std::make_shared<Parallel>(net.ptr())));
  const auto outer = std::make_shared<Parallel>(list.ptr());

  auto extracted = extract_model_from_parallel(outer);
  EXPECT_EQ(extracted, list.ptr());
  EXPECT_NE(list->ptr(0), net.ptr());

  extracted = extract_model_from_parallel(outer, {.recursive = true});
  EXPECT_EQ(extracted, list.ptr());
  EXPECT_EQ(list->ptr(0), net.ptr());
  EXPECT_EQ(list->named_children()["0"], net.ptr());
}

TEST(ExtractModel, ReachesBelowAWrapperThatStays) {
  const Net net;
  const auto compiled = std::make_shared<Compiled>(std::make_shared<Parallel>(net.ptr()));
  torch::nn::ModuleList list;
  list->push_back(ModulePtr(compiled));
  (void)extract_model_from_parallel(list, {.recursive = true});
  EXPECT_EQ(list->ptr(0), compiled);
  EXPECT_EQ(compiled->inner(), net.ptr());
}

TEST(ExtractModel, SaysThatASequentialKeepsItsEntries) {
  const torch::nn::Sequential body(std::make_shared<MixedPrecision>(torch::nn::Linear(2, 2).ptr()));
  const torch::nn::ModuleList outer(body);
  EXPECT_EQ(
      message_of<UnsupportedError>([&] {
        (void)extract_model_from_parallel(outer, {.keep_fp32_wrapper = false, .recursive = true});
      }),
      "extract_model_from_parallel cannot take the wrapper off '0.0': Sequential keeps the modules "
      "it calls to itself. Wrap the whole container, or use a ModuleList.");
}

TEST(ExtractModel, RefusesAnEmptyPointer) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)extract_model_from_parallel(ModulePtr()); }),
            "There is no model to extract: the pointer is empty.");
}

TEST(ModuleWrapper, NamesItsInnerModuleAsPythonDoes) {
  const torch::nn::Linear linear(2, 2);
  EXPECT_EQ(Parallel(linear.ptr()).named_parameters().keys(),
            (std::vector<std::string>{"module.weight", "module.bias"}));
  EXPECT_EQ(Compiled(linear.ptr()).named_parameters().keys(),
            (std::vector<std::string>{"_orig_mod.weight", "_orig_mod.bias"}));
}

TEST(ModuleWrapper, RefusesToWrapNothing) {
  EXPECT_EQ(message_of<ArgumentError>([] { Parallel wrapper(nullptr); }),
            "A wrapper needs a module to wrap, and got none.");
}

TEST(CompiledModules, AreToldFromModulesThatContainThem) {
  const Net net;
  const Compiled compiled(net.ptr());
  torch::nn::ModuleList parts;
  parts->push_back(ModulePtr(std::make_shared<Compiled>(net.ptr())));
  EXPECT_TRUE(is_compiled_module(compiled));
  EXPECT_TRUE(has_compiled_regions(compiled));
  EXPECT_FALSE(is_compiled_module(*parts));
  EXPECT_TRUE(has_compiled_regions(*parts));
  EXPECT_FALSE(has_compiled_regions(*net));
}

TEST(RepeatedBlocks, AreListsOfOneClassAtAnyLevel) {
  const torch::nn::ModuleList blocks(Encoder{}, Encoder{});
  const torch::nn::ModuleList mixed(Encoder{}, torch::nn::Linear(1, 1));
  const torch::nn::ModuleList outer(torch::nn::Linear(1, 1), blocks);
  EXPECT_TRUE(is_repeated_blocks(*blocks));
  EXPECT_FALSE(is_repeated_blocks(*mixed));
  EXPECT_FALSE(is_repeated_blocks(*torch::nn::ModuleList()));
  EXPECT_FALSE(is_repeated_blocks(*outer));
  EXPECT_TRUE(has_repeated_blocks(*outer));
  EXPECT_FALSE(has_repeated_blocks(*mixed));
}

TEST(ChildrenBottomUp, ComeBeforeTheirParentsInOrderOfRegistration) {
  Net net;
  std::vector<std::string> names;
  for (const auto& [name, module] : get_named_module_children_bottom_up(*net))
    names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"enc.l1", "enc.l2", "enc", "head", ""}));
  EXPECT_EQ(get_module_children_bottom_up(*net),
            (std::vector<torch::nn::Module*>{net->enc->l1.get(), net->enc->l2.get(), net->enc.get(),
                                             net->head.get(), net.get()}));
}

TEST(ChildrenBottomUp, CountAChildOnceThatIsRegisteredTwice) {
  torch::nn::Module module;
  const auto shared = module.register_module("a", torch::nn::Linear(1, 1));
  module.register_module("b", shared);
  EXPECT_EQ(get_module_children_bottom_up(module).size(), 2U);
}

TEST(ModuleClassName, DropsNamespacesAndImpl) {
  EXPECT_EQ(module_class_name(*torch::nn::Linear(1, 1)), "Linear");
  EXPECT_EQ(module_class_name(*Net()), "Net");
  EXPECT_EQ(module_class_name(torch::nn::Module("Named")), "Named");
}

TEST(ModuleClassName, UnderstandsTemplatesAndAnonymousNamespaces) {
  EXPECT_EQ(detail::modeling::short_class_name("a::Box<b::Inner, std::less<b::Inner>>"), "Box");
  EXPECT_EQ(detail::modeling::short_class_name("a::Box<b::Inner>::PartImpl"), "Part");
  EXPECT_EQ(detail::modeling::short_class_name("x::(anonymous namespace)::Net"), "Net");
  EXPECT_EQ(
      detail::modeling::short_class_name("main::{lambda(int)#1}::operator()(int) const::Local"),
      "Local");
  EXPECT_EQ(detail::modeling::short_class_name("Impl"), "Impl");
}

TEST(GetModuleClassFromName, FindsTheFirstModuleOfThatClass) {
  const Net net;
  EXPECT_EQ(get_module_class_from_name(*net, "Linear"),
            std::type_index(typeid(torch::nn::LinearImpl)));
  EXPECT_EQ(get_module_class_from_name(*net, "Net"), std::type_index(typeid(NetImpl)));
  EXPECT_EQ(get_module_class_from_name(*net, "Conv2d"), std::nullopt);
}

TEST(GetSubmodule, FollowsDottedNames) {
  Net net;
  EXPECT_EQ(&get_submodule(*net, "enc.l2"), net->enc->l2.get());
  EXPECT_EQ(&get_submodule(*net, ""), net.get());
  EXPECT_TRUE(get_parameter(*net, "enc.l1.weight").is_same(net->enc->l1->weight));
  EXPECT_TRUE(get_buffer(*net, "head.running_mean").is_same(net->head->running_mean));
}

TEST(GetSubmodule, SaysWhereTheNameEndedAndWhatThereIs) {
  Net net;
  EXPECT_EQ(
      message_of<ArgumentError>([&] { (void)get_submodule(*net, "enc.l3.x"); }),
      "'enc.l3.x' leads nowhere: there is no 'l3' in Encoder, which has the children l1, l2. Did "
      "you mean 'l1'?");
  EXPECT_EQ(
      message_of<ArgumentError>([&] { (void)get_parameter(*net, "enc.l1.weigth"); }),
      "'enc.l1.weigth' leads nowhere: there is no 'weigth' in Linear, which has the parameters "
      "weight, bias. Did you mean 'weight'?");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)get_buffer(*net, "enc.mean"); }),
            "'enc.mean' leads nowhere: there is no 'mean' in Encoder, which has no buffers.");
}

TEST(GetPrettyName, ShowsTheClassOfAnything) {
  EXPECT_EQ(get_pretty_name(Net()), "Net");
  EXPECT_EQ(get_pretty_name(*torch::nn::Linear(1, 1)), "Linear");
  EXPECT_EQ(get_pretty_name(std::vector<int>()), "vector");
  const torch::optim::SGD sgd(Net()->parameters(), torch::optim::SGDOptions(0.1));
  EXPECT_EQ(get_pretty_name(static_cast<const torch::optim::Optimizer&>(sgd)), "SGD");
}

TEST(ModelHasDtensor, AsksWhoeverShardsParameters) {
  const Net net;
  EXPECT_FALSE(model_has_dtensor(*net));
  const auto before = detail::comm::set_shard_test(
      [](const at::Tensor& parameter) { return parameter.dim() == 2; });
  EXPECT_TRUE(model_has_dtensor(*net));
  EXPECT_FALSE(model_has_dtensor(*net->head));
  detail::comm::set_shard_test(before);
  EXPECT_FALSE(model_has_dtensor(*net));
}

}  // namespace
}  // namespace accelerate
