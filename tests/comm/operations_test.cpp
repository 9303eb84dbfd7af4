// Operations in one process: the local ones, and what the collectives do when nobody else is there.
#include "accelerate/operations.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "accelerate/tree/ivalue.h"
#include "comm/samples.h"
#include "core/captured_log.h"

namespace shop {

/// Moves itself, as batch encodings do.
struct Mover {
  torch::Device device = torch::kCPU;
  [[nodiscard]] Mover to(torch::Device target, bool /*non_blocking*/) const { return {target}; }
};
/// Moves by a function beside it.
struct Hooked {
  std::string moved_to = "nowhere";
};
Hooked send_to_device(Hooked, at::Device device, const accelerate::SendOptions&) {
  return {device.str()};
}

struct Batch {
  torch::Tensor x, keep;
};
constexpr auto tensor_tree_fields(std::type_identity<Batch>) {
  return std::tuple{accelerate::field("x", &Batch::x), accelerate::field("keep", &Batch::keep)};
}

}  // namespace shop

namespace accelerate {
namespace {

using torch::Tensor;
using Named = std::map<std::string, Tensor>;
using Nested = std::map<std::string, std::variant<Tensor, Named>>;

const torch::Device kMeta(torch::kMeta);  // a second device on every machine

TEST(SendToDevice, MovesTensorsAndLeavesTheRest) {
  const auto sent =
      send_to_device(std::tuple{torch::ones(2), 1, std::vector{torch::ones(3)}}, kMeta);
  EXPECT_EQ(std::get<0>(sent).device(), kMeta);
  EXPECT_EQ(std::get<1>(sent), 1);
  EXPECT_EQ(std::get<2>(sent)[0].device(), kMeta);
}

TEST(SendToDevice, ReturnsTensorsThatAreThereAsTheyAre) {
  const auto tensor = torch::ones(2);
  EXPECT_TRUE(send_to_device(tensor, torch::kCPU).is_same(tensor));
  EXPECT_TRUE(send_to_device(tensor, torch::Device("cpu:0")).is_same(tensor));
  EXPECT_FALSE(send_to_device(torch::Tensor(), torch::kCPU).defined());
}

TEST(SendToDevice, SkipsKeysAtEveryDepthWithAllThatIsBelow) {
  const auto a = torch::ones(1);
  const Nested data{{"x", a}, {"meta", Named{{"x", a}, {"keep", a}}}};
  const auto kept = send_to_device(data, kMeta, {.skip_keys = {"keep"}});
  EXPECT_EQ(std::get<Tensor>(kept.at("x")).device(), kMeta);
  EXPECT_EQ(std::get<Named>(kept.at("meta")).at("x").device(), kMeta);
  EXPECT_TRUE(std::get<Named>(kept.at("meta")).at("keep").is_cpu());

  const auto whole = send_to_device(data, kMeta, {.skip_keys = {"meta"}});
  EXPECT_TRUE(std::get<Named>(whole.at("meta")).at("x").is_cpu());
  EXPECT_EQ(std::get<Tensor>(whole.at("x")).device(), kMeta);

  const auto record = send_to_device(shop::Batch{a, a}, kMeta, {.skip_keys = {"keep"}});
  EXPECT_EQ(record.x.device(), kMeta);
  EXPECT_TRUE(record.keep.is_cpu());
}

TEST(SendToDevice, LetsObjectsMoveThemselves) {
  const auto sent =
      send_to_device(std::tuple{torch::ones(1), shop::Mover{}, shop::Hooked{}}, kMeta);
  EXPECT_EQ(std::get<1>(sent).device, kMeta);
  EXPECT_EQ(std::get<2>(sent).moved_to, "meta");
  EXPECT_EQ(send_to_device(shop::Mover{}, kMeta).device, kMeta);
}

/// LibTorch's modules cannot move to meta.
struct MovedImpl : torch::nn::Module {
  using Module::to;
  void to(torch::Device target, bool /*non_blocking*/) override { device = target; }
  torch::Device device = torch::kCPU;
};
TORCH_MODULE(Moved);

TEST(SendToDevice, MovesModulesWhereverTheyAre) {
  const Moved module;
  EXPECT_EQ(send_to_device(module, kMeta).ptr(), module.ptr());  // the module itself, as in Python
  EXPECT_EQ(module->device, kMeta);

  const auto pointer = std::make_shared<MovedImpl>();
  const std::tuple data{Moved(), torch::ones(1), std::shared_ptr<torch::nn::Module>(pointer)};
  (void)send_to_device(data, kMeta);
  EXPECT_EQ(std::get<0>(data)->device, kMeta);
  EXPECT_EQ(pointer->device, kMeta);

  const torch::nn::Linear linear(2, 2);
  EXPECT_EQ(send_to_device(linear, torch::kCPU).ptr(), linear.ptr());
  EXPECT_TRUE(send_to_device(torch::nn::Linear(nullptr), kMeta).is_empty());
}

TEST(RecursivelyApply, LeavesOtherTypesUnlessToldToRefuseThem) {
  const auto twice = [](const Tensor& tensor) { return tensor * 2; };
  const auto applied = recursively_apply(twice, std::pair{torch::ones(1), 1});
  EXPECT_EQ(applied.first.item<float>(), 2);
  EXPECT_EQ(applied.second, 1);

  const auto message = message_of<ArgumentError>([&] {
    (void)recursively_apply(twice, std::pair{torch::ones(1), 1}, {.error_on_other_type = true});
  });
  EXPECT_NE(
      message.find(" got a leaf at [1] of type int. Only leaves of type at::Tensor can be used"),
      std::string::npos)
      << message;
  EXPECT_NE(message.find("lambda"), std::string::npos) << message;  // names the function
}

TEST(RecursivelyApply, MayChangeTheTypeOfTheLeaves) {
  const auto count = [](const Tensor& tensor) { return tensor.numel(); };
  EXPECT_EQ(recursively_apply(count, std::vector{torch::ones(3), torch::ones({2, 2})}),
            (std::vector<std::int64_t>{3, 4}));
}

TEST(RecursivelyApply, ReachesNumbersAndTextsOfValues) {
  const Value data = Value::List{1, Value::tuple({2, nullptr})};
  const auto twice = [](std::int64_t x) { return 2 * x; };
  EXPECT_EQ(recursively_apply<std::int64_t>(twice, data, {.error_on_other_type = true}).repr(),
            "[2, (4, None)]");
  const auto size = [](const std::string& x) { return static_cast<std::int64_t>(x.size()); };
  EXPECT_EQ(recursively_apply<std::string>(size, Value(Value::List{"abc", 1.5})).repr(),
            "[3, 1.5]");
  EXPECT_EQ(recursively_apply<std::int64_t>(twice, torch::IValue(4)).repr(), "8");
  const auto message = message_of<ArgumentError>([&] {
    (void)recursively_apply<std::int64_t>(twice, Value(Value::List{1, 1.5}),
                                          {.error_on_other_type = true});
  });
  EXPECT_NE(message.find(" got a leaf at [1] of kind double: 1.5. Only leaves of type long can be"),
            std::string::npos)
      << message;
}

TEST(DataStructure, RoundTripsThroughInformationWithZeroDimensionalTensors) {
  const std::map<std::string, std::vector<Tensor>> data{
      {"a", {torch::zeros({2, 0, 3}, torch::kHalf), torch::tensor(true)}}};
  const auto structure = get_data_structure(data);
  EXPECT_EQ(structure.at("a")[0], (TensorInformation{{2, 0, 3}, torch::kHalf}));
  EXPECT_TRUE(is_tensor_information(structure.at("a")[0]));
  const auto made = initialize_tensors(structure);
  EXPECT_EQ(made.at("a")[0].sizes(), torch::IntArrayRef({2, 0, 3}));
  EXPECT_EQ(made.at("a")[0].dtype(), torch::kHalf);
  EXPECT_EQ(made.at("a")[1].dim(), 0);
  EXPECT_EQ(made.at("a")[1].dtype(), torch::kBool);
}

TEST(DataStructure, RoundTripsThroughValues) {
  const Value data = Value::Dict{{"a", Value(torch::zeros({2, 3}))}, {"b", Value::tuple({4})}};
  const Value structure = get_data_structure(data);
  EXPECT_TRUE(is_tensor_information(structure.at("a")));
  EXPECT_EQ(structure.repr(),
            "{'a': TensorInformation(shape=(2, 3), dtype=torch.float32), 'b': (4,)}");
  EXPECT_EQ(initialize_tensors(structure).at("a").as_tensor().sizes(), torch::IntArrayRef({2, 3}));
}

TEST(GetShape, PrintsLikePython) {
  const Named data{{"tensor", torch::zeros({4, 2})}};
  EXPECT_EQ(to_value(get_shape(data)).repr(), "{'tensor': [4, 2]}");
}

TEST(FindBatchSize, LooksAtTheFirstLeafOnly) {
  const std::tuple data{Named{{"ids", torch::zeros({3, 7})}}, torch::zeros(9)};
  EXPECT_EQ(find_batch_size(data), reference().at("find_batch_size").get<std::int64_t>());
  EXPECT_EQ(find_batch_size(Value(Value::List{Value(torch::zeros({5}))})), 5);
}

TEST(FindBatchSize, SaysWhyThereIsNone) {
  EXPECT_EQ(
      message_of<ArgumentError>([] {
        (void)find_batch_size(std::vector<Named>{Named{}});
      }).find("cannot find the batch size from an empty container: the std::map<std::string,"),
      0);
  EXPECT_EQ(message_of<ArgumentError>([] { (void)find_batch_size(std::tuple{3, torch::ones(2)}); }),
            "find_batch_size got a leaf at [0] of type int. Only leaves of type at::Tensor can be "
            "used here.");
  EXPECT_EQ(
      message_of<ArgumentError>([] { (void)find_batch_size(Named{{"a", torch::tensor(1)}}); }),
      "cannot find the batch size: the tensor at ['a'] has no dimension.");
  EXPECT_EQ(ignorant_find_batch_size(std::vector<Tensor>{}), std::nullopt);
  EXPECT_EQ(ignorant_find_batch_size(std::tuple{std::string("x")}), std::nullopt);
  EXPECT_EQ(ignorant_find_batch_size(torch::tensor(1)), std::nullopt);
  EXPECT_EQ(ignorant_find_batch_size(torch::zeros(4)), 4);
}

TEST(FindDevice, TakesTheFirstTensorAndPassesOverTheRest) {
  EXPECT_EQ(find_device(std::tuple{1, std::string("a"), std::vector{torch::ones(1, kMeta)}}),
            kMeta);
  EXPECT_EQ(find_device(std::tuple{1, std::string("a")}), std::nullopt);
  EXPECT_EQ(find_device(std::vector<Tensor>{}), std::nullopt);
}

TEST(Listify, GivesTheNumbersThatPythonGives) {
  EXPECT_EQ(listify(torch::tensor({0.2, -1.5}, torch::kBFloat16)).repr(), "[0.2001953125, -1.5]");
  EXPECT_EQ(numbers(reference().at("listify_bfloat16")), (std::vector<double>{0.2001953125, -1.5}));
  const std::tuple data{torch::arange(4).reshape({2, 2}).t(), torch::tensor(true), 3};
  EXPECT_EQ(listify(data).repr(), "([[0, 2], [1, 3]], True, 3)");
  EXPECT_EQ(listify(torch::tensor({1, 2}, torch::kInt16)).repr(), "[1, 2]");
  EXPECT_EQ(listify(torch::zeros({2, 0})).repr(), "[[], []]");
}

TEST(Listify, NamesTheLeafThatCannotBeListed) {
  const auto message = [](const Tensor& leaf) {
    return message_of<ArgumentError>([&] { (void)listify(Named{{"x", leaf}}); });
  };
  const auto bits = torch::tensor({7, -1}, torch::kLong).view(torch::kUInt64);
  EXPECT_EQ(message(bits),
            "listify: the tensor at ['x'] holds a number of 2^63 or more, which does not fit the "
            "64 bits of a Value. Convert it to double first.");
  EXPECT_EQ(listify(bits.slice(0, 0, 1)).repr(), "[7]");
  EXPECT_EQ(message(torch::eye(2).to_sparse()),
            "listify: the tensor at ['x'] is of layout Sparse. Pass tensor.to_dense().");
  EXPECT_EQ(message(torch::ones(1, kMeta)),
            "listify: the tensor at ['x'] is on meta and holds no numbers.");
  EXPECT_EQ(message(at::_nested_tensor_from_tensor_list({torch::ones(2), torch::ones(3)})),
            "listify: the tensor at ['x'] is nested. Pass its parts: tensor.unbind().");
}

TEST(SliceTensors, FollowsPythonForNegativeAndLargePositions) {
  const auto ten = torch::arange(10);
  EXPECT_EQ(numbers(slice_tensors(ten, {.start = -7, .stop = 100, .step = 3})),
            numbers(reference().at("slice")));
  EXPECT_EQ(slice_tensors(ten, {.start = 8, .stop = 2}).numel(), 0);
  EXPECT_EQ(numbers(slice_tensors(Named{{"a", ten}}, {.stop = 2}).at("a")),
            (std::vector<double>{0, 1}));
}

TEST(SliceTensors, NamesTheLeafThatCannotBeSliced) {
  EXPECT_EQ(
      message_of<ArgumentError>(
          [] { (void)slice_tensors(Named{{"loss", torch::tensor(1.0)}}, {.stop = 1}); }),
      "slice_tensors: the tensor at ['loss'] has no dimension and cannot be sliced. Reshape it "
      "to {1} first.");
}

TEST(Concatenate, JoinsEveryLeafAlongTheDimension) {
  const std::vector batches{std::pair{torch::ones({2, 1}), Named{{"k", torch::zeros(1)}}},
                            std::pair{torch::ones({3, 1}), Named{{"k", torch::ones(2)}}}};
  const auto joined = concatenate(batches);
  EXPECT_EQ(joined.first.sizes(), torch::IntArrayRef({5, 1}));
  EXPECT_EQ(numbers(joined.second.at("k")), (std::vector<double>{0, 1, 1}));
  EXPECT_EQ(numbers(concatenate(std::vector{torch::ones({2, 1}), torch::zeros({2, 2})}, 1)),
            numbers(reference().at("concatenate_dim_1")));
}

TEST(Concatenate, PassesALoneBatchWithoutTensorsThroughAndRefusesSeveral) {
  EXPECT_EQ(concatenate(std::vector<std::string>{"alone"}), "alone");
  EXPECT_EQ(
      message_of<ArgumentError>([] { (void)concatenate(std::vector<std::string>{"a", "b"}); }),
      "concatenate got a leaf of type std::string. Only leaves of type at::Tensor can be used "
      "here.");
}

TEST(Concatenate, RefusesBatchesOfDifferentStructure) {
  const Named a{{"x", torch::ones(1)}};
  const Named b{{"x", torch::ones(1)}, {"y", torch::ones(1)}};
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)concatenate(std::vector{a, b}); }),
            "concatenate: batch 1 has a tensor at ['y'], which batch 0 does not have.");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)concatenate(std::vector{b, a}); }),
            "concatenate: batch 1 has no tensor at ['y'], which batch 0 has.");
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)concatenate(std::vector{Named{{"x", torch::ones({1, 2})}},
                                            Named{{"x", torch::ones({1, 3})}}});
            }).find("concatenate: the tensors at ['x'] do not fit together: Sizes of tensors"),
            std::string::npos);
  EXPECT_EQ(message_of<ArgumentError>([] {
              (void)concatenate(std::vector{Value(torch::ones(1)), Value(Value::List{})});
            }),
            "concatenate: batch 1 has no tensor at its root, which batch 0 has.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)concatenate(std::vector<Tensor>{}); }),
            "concatenate got no batches. Pass at least one.");
}

TEST(ConvertToFp32, ChangesHalfAndBfloat16Only) {
  const auto half = convert_to_fp32(torch::tensor({0.1, 3.3}).to(torch::kHalf));
  EXPECT_EQ(half.dtype(), torch::kFloat);
  EXPECT_EQ(numbers(half), numbers(reference().at("convert_to_fp32_half")));
  for (const auto dtype :
       {torch::kFloat, torch::kDouble, torch::kLong, torch::kBool, torch::kFloat8_e4m3fn}) {
    const auto tensor = torch::zeros(2).to(dtype);
    EXPECT_TRUE(convert_to_fp32(tensor).is_same(tensor)) << dtype;
  }
}

TEST(ConvertOutputsToFp32, WrapsACallableAndGivesItBack) {
  const auto forward = [](const Tensor& x, int n) { return std::pair{x.to(torch::kHalf), n}; };
  const auto wrapped = convert_outputs_to_fp32(forward);
  const auto [output, n] = wrapped(torch::ones(1), 4);
  EXPECT_EQ(output.dtype(), torch::kFloat);
  EXPECT_EQ(n, 4);
  EXPECT_EQ(wrapped.wrapped()(torch::ones(1), 4).first.dtype(), torch::kHalf);
}

TEST(ConvertOutputsToFp32, WrapsModuleHoldersAndCallablesThatChange) {
  auto counted = convert_outputs_to_fp32(
      [calls = 0](const Tensor& x) mutable { return std::pair{x.to(torch::kHalf), ++calls}; });
  (void)counted(torch::ones(1));
  const auto [output, calls] = counted(torch::ones(1));
  EXPECT_EQ(output.dtype(), torch::kFloat);
  EXPECT_EQ(calls, 2);

  torch::nn::Linear linear(2, 2);
  linear->to(torch::kBFloat16);
  auto wrapped = convert_outputs_to_fp32(linear);
  EXPECT_EQ(wrapped(torch::ones({1, 2}, torch::kBFloat16)).dtype(), torch::kFloat);
  EXPECT_EQ(wrapped.wrapped().ptr(), linear.ptr());
}

TEST(PadInputTensors, ReachesTheNextMultipleAlongTheDimension) {
  for (const auto& [batch, processes, expected] :
       {std::tuple{5, 2, 6}, {5, 4, 8}, {2, 5, 5}, {9, 3, 9}, {6, 3, 6}, {7, 3, 9}}) {
    const auto rows = torch::ones({batch, 3});
    const auto padded = pad_input_tensors(rows, batch, processes);
    EXPECT_EQ(padded.size(0), expected);
    EXPECT_EQ(padded.sum().item<float>(), 3.0F * static_cast<float>(batch)) << "padding is zeros";
    const auto columns = pad_input_tensors(torch::ones({3, batch}), batch, processes, 1);
    EXPECT_EQ(columns.size(1), expected);
    EXPECT_EQ(padded.is_same(rows), batch == expected);
    const auto key = std::to_string(batch) + "," + std::to_string(processes);
    if (reference().at("pad_input_tensors").contains(key)) {
      EXPECT_EQ(padded.size(0), reference().at("pad_input_tensors").at(key).at(0));
    }
  }
}

TEST(PadInputTensors, CanRepeatTheLastRow) {
  const auto padded = pad_input_tensors(torch::arange(3), 3, 2, 0, PadFill::kRepeatLast);
  EXPECT_EQ(numbers(padded), (std::vector<double>{0, 1, 2, 2}));
}

TEST(PadInputTensors, RefusesWhatCannotBePadded) {
  EXPECT_EQ(
      message_of<ArgumentError>([] { (void)pad_input_tensors(torch::ones(7), 5, 2); }),
      "pad_input_tensors: the tensor has 7 rows along dimension 0, more than the 6 to pad to. "
      "Is batch_size right?");
  EXPECT_EQ(message_of<ArgumentError>(
                [] { (void)pad_input_tensors(Named{{"a", torch::tensor(1)}}, 5, 2); }),
            "pad_input_tensors: the tensor at ['a'] has shape [] and no dimension 0.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)pad_input_tensors(torch::ones(5), 5, 0); }),
            "pad_input_tensors: batch_size is 5 and num_processes 0, but both must be at least 1.");
}

template <class T>
concept CanBePadded = requires(T tree) { pad_input_tensors(tree, 5, 2); };
static_assert(CanBePadded<Named> && CanBePadded<Value>);
static_assert(!CanBePadded<std::tuple<Tensor, int>> && !CanBePadded<std::vector<std::string>>);

TEST(PadInputTensors, RefusesLeavesThatAreNoTensors) {
  const Value data = Value::Dict{{"a", Value(torch::ones({5, 2}))}, {"b", 3}, {"c", nullptr}};
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)pad_input_tensors(data, 5, 2); }),
            "pad_input_tensors got a leaf at ['b'] of kind int: 3. Only leaves of kind tensor can "
            "be used here.");
}

TEST(HonorType, BuildsTuplesArraysAndStructsMemberByMember) {
  const std::vector<int> two{1, 2};
  EXPECT_EQ(honor_type(std::tuple<int, double>{}, two), (std::tuple<int, double>{1, 2.0}));
  EXPECT_EQ(honor_type(std::pair<long, int>{}, two), (std::pair<long, int>{1, 2}));
  EXPECT_EQ(honor_type(std::array<int, 2>{}, std::list<int>{1, 2}), (std::array{1, 2}));
  const std::vector<Tensor> tensors{torch::ones(1), torch::zeros(1)};
  const auto batch = honor_type(shop::Batch{}, tensors);
  EXPECT_TRUE(batch.x.is_same(tensors[0]) && batch.keep.is_same(tensors[1]));
  EXPECT_EQ(
      message_of<ArgumentError>([&] { (void)honor_type(std::array<int, 3>{}, two); }),
      "honor_type got 2 items for a std::array<int, 3ul>, which has 3 members. Pass one item per "
      "member.");
}

TEST(HonorType, BuildsTheContainerOfTheModel) {
  EXPECT_EQ(honor_type(std::vector<int>{}, std::list<int>{1, 2}), (std::vector<int>{1, 2}));
  EXPECT_TRUE(is_namedtuple(shop::Batch{}));
  EXPECT_FALSE(is_namedtuple(std::tuple<Tensor>{}));
  EXPECT_TRUE(is_torch_tensor(torch::ones(1)));
  EXPECT_TRUE(is_torch_tensor(Value(torch::ones(1))));
  EXPECT_FALSE(is_torch_tensor(Value(1)));
}

TEST(CollectivesAlone, GiveTheInputBackAsItIs) {
  const auto zero_dim = torch::tensor(3.0);
  const Named tree{{"loss", zero_dim}};
  EXPECT_TRUE(gather(tree).at("loss").is_same(zero_dim));
  EXPECT_TRUE(broadcast(tree).at("loss").is_same(zero_dim));
  EXPECT_TRUE(pad_across_processes(tree).at("loss").is_same(zero_dim));
  const auto copy = copy_tensor_to_devices(zero_dim);
  EXPECT_TRUE(copy.cpu().equal(zero_dim) && !copy.is_alias_of(zero_dim));  // on our device
  EXPECT_EQ(gather_object(std::vector{1, 2}), (std::vector{1, 2}));
  EXPECT_EQ(all_gather_object(std::string("a")), std::vector<std::string>{"a"});
  std::vector<int> list{4};
  EXPECT_EQ(&broadcast_object_list(list), &list);
}

TEST(CollectivesAlone, ReduceCopiesAndDoesNothingElse) {
  const auto tensor = torch::tensor({2.0, 4.0});
  for (const auto reduction :
       {Reduction::kMean, Reduction::kSum, Reduction::kMax, Reduction::kNone}) {
    const auto reduced = reduce(tensor, reduction);
    EXPECT_TRUE(reduced.equal(tensor));
    EXPECT_FALSE(reduced.is_same(tensor));
  }
}

TEST(CollectivesAlone, ReduceWarnsOnceThatScaleIsIgnored) {
  const test::CapturedLog log;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(reduce(torch::ones(1), Reduction::kSum, 0.25).item<double>(), 1);
  }
  EXPECT_EQ(log.messages(),
            std::vector<std::string>{
                "[RANK 0] reduce: scale is 0.25, but it only acts on TPUs, which this "
                "library does not run on. It is ignored."});
}

TEST(CollectivesAlone, PadReturnsTensorsOfAnyRangeAsTheyAre) {
  const auto tensor = torch::ones({2, 3});
  EXPECT_TRUE(pad_across_processes(tensor, {.dim = -1}).is_same(tensor));
  EXPECT_TRUE(pad_across_processes(tensor, {.dim = 5}).is_same(tensor));
  const auto nested = at::_nested_tensor_from_tensor_list({torch::ones(2), torch::ones(3)});
  const test::CapturedLog log;
  EXPECT_TRUE(pad_across_processes(Named{{"n", nested}}).at("n").is_same(nested));
  EXPECT_EQ(log.messages(),
            std::vector<std::string>{
                "[RANK 0] CannotPadNestedTensorWarning: the tensor at ['n'] is nested. How "
                "to pad it is not known, so it is left as it is."});
}

TEST(CollectivesAlone, RefuseOtherLeavesOfValuesWithTheirPath) {
  const Value data = Value::Dict{{"a", Value(torch::ones(1))}, {"b", Value::List{nullptr, "text"}}};
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)gather(data); }),
            "gather got a leaf at ['b'][1] of kind string: 'text'. Only leaves of kind tensor can "
            "be used here.");
}

TEST(CollectivesAlone, RefuseAProcessThatDoesNotExist) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)broadcast(torch::ones(1), 3); }),
            "broadcast: from_process is 3, but there are processes 0 to 0.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)copy_tensor_to_devices(); }),
            "copy_tensor_to_devices: exactly one process must pass a tensor, but none did.");
}

TEST(IValues, HaveShapesAndABatchSize) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("x", torch::ones({4, 2}));
  dict.insert("pair", c10::ivalue::Tuple::create(torch::ones({4}), 7, "text", torch::IValue()));
  const torch::IValue value(dict);
  EXPECT_EQ(get_shape(value),
            Value(Value::Dict{{"x", Value::List{4, 2}},
                              {"pair", Value::tuple({Value::List{4}, 7, "text", nullptr})}}));
  EXPECT_EQ(find_batch_size(value), 4);
  EXPECT_EQ(
      message_of<ArgumentError>([] { (void)find_batch_size(torch::IValue(2.5)); }),
      "find_batch_size got a leaf of kind double: 2.5. Only leaves of kind tensor can be used "
      "here.");
}

TEST(IValues, AreOpenedUnderKeysOfEveryKindThatAPathCanShow) {
  c10::Dict<std::int64_t, Tensor> by_number;
  by_number.insert(7, torch::ones({3, 1}));
  EXPECT_EQ(
      send_to_device(torch::IValue(by_number), kMeta).toGenericDict().at(7).toTensor().device(),
      kMeta);
  EXPECT_EQ(find_batch_size(torch::IValue(by_number)), 3);
  EXPECT_EQ(get_shape(torch::IValue(by_number)).repr(), "{7: [3, 1]}");

  c10::impl::GenericDict mixed(c10::AnyType::get(), c10::AnyType::get());
  mixed.insert("z", torch::ones(1));
  mixed.insert(true, torch::ones(2));
  mixed.insert(4, torch::ones(3));
  const auto sent = send_to_device(torch::IValue(mixed), kMeta).toGenericDict();
  for (const auto& entry : sent) EXPECT_EQ(entry.value().toTensor().device(), kMeta);
  EXPECT_EQ(sent.at(true).toTensor().numel(), 2);
  EXPECT_EQ(get_shape(torch::IValue(mixed)).repr(), "{'z': [1], True: [2], 4: [3]}");
  EXPECT_EQ(tree::flatten(torch::IValue(mixed)).paths,
            (std::vector<std::string>{"['z']", "[1]", "[4]"}));
}

TEST(IValues, AreRefusedWithTensorsUnderOtherKeys) {
  c10::Dict<double, Tensor> tensors;
  tensors.insert(0.5, torch::ones(1));
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)send_to_device(torch::IValue(tensors), kMeta); }),
            "A dictionary of TorchScript has tensors under keys of kind Double. Only those under "
            "strings, ints and bools can be reached: use one of these as keys.");
  c10::Dict<double, std::int64_t> numbers;
  numbers.insert(0.5, 3);
  EXPECT_EQ(send_to_device(torch::IValue(numbers), kMeta).toGenericDict().at(0.5).toInt(), 3);
}

}  // namespace
}  // namespace accelerate
