// Collectives between real processes.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "accelerate/tree/ivalue.h"
#include "comm/samples.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using torch::Tensor;
using Named = std::map<std::string, Tensor>;

/// All dtypes that a tensor of numbers can have; backends know about half of them.
const std::vector<torch::ScalarType> kDtypes = {
    torch::kBool,       torch::kByte,         torch::kChar,          torch::kShort,
    torch::kInt,        torch::kLong,         torch::kHalf,          torch::kBFloat16,
    torch::kFloat,      torch::kDouble,       torch::kUInt16,        torch::kUInt32,
    torch::kUInt64,     torch::kComplexFloat, torch::kComplexDouble, torch::kFloat8_e4m3fn,
    torch::kFloat8_e5m2};

/// The tensors of all ranks behind one another.
Tensor of_all_ranks(int world, torch::ScalarType dtype, std::int64_t size = 37) {
  std::vector<Tensor> parts;
  for (int rank = 0; rank < world; ++rank) parts.push_back(sample(rank, dtype, size));
  return torch::cat(parts);
}

/// As bits: also of dtypes that cannot be compared.
std::vector<std::uint8_t> bits(const Tensor& tensor) {
  const auto dense = tensor.detach().contiguous().reshape({-1});
  const auto* data = static_cast<const std::uint8_t*>(dense.const_data_ptr());
  return {data, data + dense.nbytes()};
}

TEST(Gather, ConcatenatesInRankOrderForEveryDtype) {
  on_processes(3, [](PartialState& state) {
    for (const auto dtype : kDtypes) {
      const auto all = gather(sample(state.process_index(), dtype));
      EXPECT_EQ(all.scalar_type(), dtype);
      EXPECT_EQ(bits(all), bits(of_all_ranks(3, dtype))) << dtype;
    }
    for (const auto& [name, expected] : reference().at("gather").items()) {
      const auto dtype = name == "float32"    ? torch::kFloat
                         : name == "float64"  ? torch::kDouble
                         : name == "float16"  ? torch::kHalf
                         : name == "bfloat16" ? torch::kBFloat16
                         : name == "int64"    ? torch::kLong
                         : name == "int32"    ? torch::kInt
                                              : torch::kByte;
      EXPECT_EQ(numbers(gather(sample(state.process_index(), dtype))), numbers(expected)) << name;
    }
  });
}

TEST(Gather, MovesATreeOfManyDtypesAndShapesAtOnce) {
  on_processes(3, [](PartialState& state) {
    const int rank = state.process_index();
    std::vector<Tensor> mine;
    for (const auto dtype : kDtypes) mine.push_back(sample(rank, dtype, 5));
    const auto all = gather(std::tuple{mine, Named{{"scalar", torch::tensor(rank)}},
                                       torch::zeros({0, 3}), torch::full({2, 3}, rank)});
    for (std::size_t i = 0; i < kDtypes.size(); ++i) {
      EXPECT_EQ(bits(std::get<0>(all)[i]), bits(of_all_ranks(3, kDtypes[i], 5))) << kDtypes[i];
    }
    EXPECT_EQ(numbers(std::get<1>(all).at("scalar")), (std::vector<double>{0, 1, 2}));
    EXPECT_EQ(std::get<2>(all).sizes(), torch::IntArrayRef({0, 3}));
    EXPECT_EQ(std::get<3>(all).sizes(), torch::IntArrayRef({6, 3}));
    EXPECT_EQ(std::get<3>(all)[4][0].item<int>(), 2);
  });
}

TEST(Gather, TreatsSpecialTensorsAsTheTableSays) {
  on_processes(3, [](PartialState& state) {
    const int rank = state.process_index();
    EXPECT_EQ(numbers(gather(torch::tensor(static_cast<float>(rank)))),
              numbers(reference().at("gather_zero_dim")));
    const auto transposed = gather(sample(rank, torch::kFloat, 12).reshape({3, 4}).t());
    EXPECT_EQ(transposed.sizes(), torch::IntArrayRef({12, 3}));
    EXPECT_EQ(numbers(transposed), numbers(reference().at("gather_transposed")));
    EXPECT_EQ(gather(torch::zeros({2, 0})).sizes(), torch::IntArrayRef({6, 0}));
    EXPECT_EQ(gather(torch::zeros({0})).sizes(), torch::IntArrayRef({0}));

    const auto leaf = torch::ones(2).requires_grad_();
    EXPECT_FALSE(gather(leaf).requires_grad());
    const auto conjugate =
        torch::complex(torch::zeros(1), torch::full({1}, double(rank + 1))).conj();
    EXPECT_EQ(gather(conjugate)[2].item().toComplexDouble().imag(), -3);
    EXPECT_EQ(gather(std::pair{conjugate, torch::ones(1)}).first[2].item().toComplexDouble().imag(),
              -3);
    EXPECT_TRUE(gather(std::vector<Tensor>{}).empty());
  });
}

TEST(Gather, PairsMappingsByKeyWhateverTheirOrder) {
  on_processes(2, [](PartialState& state) {
    const bool first = state.process_index() == 0;
    torch::OrderedDict<std::string, Tensor> dict;
    for (const auto* key : first ? std::array{"a", "b"} : std::array{"b", "a"}) {
      dict.insert(key, torch::tensor(std::string(key) == "a" ? 1 : 2));
    }
    const auto all = gather(dict);
    EXPECT_EQ(numbers(all["a"]), (std::vector<double>{1, 1}));
    EXPECT_EQ(numbers(all["b"]), (std::vector<double>{2, 2}));
    EXPECT_EQ(all.keys().front(), first ? "a" : "b");

    std::unordered_map<std::string, Tensor> many;
    many.reserve(first ? 16 : 1024);  // other buckets, another order
    for (int i = 0; i < 12; ++i) many["key" + std::to_string(i)] = torch::tensor(i);
    for (const auto& [key, tensor] : gather(many)) {
      const double expected = std::stod(key.substr(3));
      EXPECT_EQ(numbers(tensor), (std::vector<double>{expected, expected})) << key;
    }
  });
}

TEST(Gather, MovesStructsExamplesAndValues) {
  on_processes(2, [](PartialState& state) {
    const auto mine = torch::full({1}, state.process_index());
    const auto example = gather(torch::data::Example<>(mine, mine + 10));
    EXPECT_EQ(numbers(example.target), (std::vector<double>{10, 11}));
    const auto value = gather(Value(Value::Dict{{"x", Value(mine)}, {"none", nullptr}}));
    EXPECT_EQ(numbers(value.at("x").as_tensor()), (std::vector<double>{0, 1}));
    EXPECT_TRUE(value.at("none").is_none());
  });
}

TEST(Gather, TakesAnExplicitGroup) {
  on_processes(2, [](PartialState& state) {
    EXPECT_EQ(numbers(gather(torch::full({1}, state.process_index()), state.process_group())),
              (std::vector<double>{0, 1}));
    EXPECT_EQ(numbers(reduce(torch::ones(1), state.process_group(), Reduction::kSum)),
              std::vector<double>{2});
    EXPECT_EQ(all_gather_object(state.process_index(), state.process_group()), (std::vector{0, 1}));
    const c10::intrusive_ptr<c10d::ProcessGroup> nobody;
    EXPECT_EQ(numbers(gather(torch::ones(1), nobody)), std::vector<double>{1});
  });
}

TEST(Gather, RefusesTensorsTheGroupCannotCarryBeforeAnythingIsSent) {
  on_processes(2, [](PartialState& state) {
    EXPECT_EQ(
        message_of<ArgumentError>([] { (void)gather(Named{{"w", torch::ones(1, torch::kMeta)}}); }),
        "gather: the tensor at ['w'] is on meta, but the process group serves cpu, cuda. Move it "
        "there first: send_to_device(tree, cpu:0).");
    EXPECT_EQ(
        message_of<ArgumentError>([] { (void)gather(torch::eye(2).to_sparse()); }),
        "gather: the tensor is of layout Sparse, and only dense tensors can be sent. Convert it "
        "first.");
    EXPECT_EQ(gather(torch::ones(1)).numel(), state.num_processes());  // nobody is out of step
  });
}

TEST(Broadcast, WritesInPlaceForEveryDtype) {
  on_processes(3, [](PartialState& state) {
    for (const auto dtype : kDtypes) {
      auto tensor = sample(state.process_index(), dtype);
      const auto result = broadcast(tensor, 1);
      EXPECT_TRUE(result.is_same(tensor));
      EXPECT_EQ(bits(tensor), bits(sample(1, dtype))) << dtype;
    }
    EXPECT_EQ(numbers(broadcast(sample(state.process_index(), torch::kFloat, 5), 1)),
              numbers(reference().at("broadcast_from_1")));
  });
}

TEST(Broadcast, WritesIntoViewsParametersAndTreesInPlace) {
  on_processes(2, [](PartialState& state) {
    const double mine = state.process_index() + 1;
    auto whole = torch::full({2, 3}, mine);
    auto parameter = torch::full({2}, mine).requires_grad_();
    auto scalar = torch::tensor(mine);
    const std::tuple tree{whole.t(), parameter,
                          Named{{"s", scalar}, {"empty", torch::zeros({0, 2})}},
                          torch::arange(4).to(torch::kFloat).mul(mine).slice(0, 0, 4, 2)};
    const auto result = broadcast(tree);
    EXPECT_EQ(numbers(whole), (std::vector<double>(6, 1)));
    EXPECT_EQ(numbers(parameter), (std::vector<double>{1, 1}));
    EXPECT_TRUE(parameter.requires_grad() && parameter.is_leaf());
    EXPECT_EQ(scalar.item<double>(), 1);
    EXPECT_EQ(numbers(std::get<3>(tree)), (std::vector<double>{0, 2}));
    EXPECT_TRUE(std::get<1>(result).is_same(parameter));

    auto alone = torch::full({2}, mine).requires_grad_();
    const auto before = alone._version();
    broadcast(alone);
    EXPECT_EQ(alone[0].item<double>(), 1);
    EXPECT_EQ(alone._version() > before, state.process_index() == 1);
  });
}

TEST(Broadcast, SendsTheSameBytesWhateverTheStridesAreOnEachProcess) {
  on_processes(2, [](PartialState& state) {
    for (const int transposed : {0, 1}) {
      // 6 floats: no multiple of what tensors in one buffer are aligned to.
      const bool is_root = state.process_index() == 0;
      const auto content = torch::arange(6, torch::kFloat).reshape({2, 3}).t();
      auto tensor =
          state.process_index() == transposed ? torch::zeros({2, 3}).t() : torch::zeros({3, 2});
      if (is_root) tensor.copy_(content);
      broadcast(tensor);
      EXPECT_TRUE(tensor.equal(content)) << "transposed on rank " << transposed;
    }
    EXPECT_EQ(gather(torch::ones(1)).numel(), 2);  // nobody is out of step
  });
}

TEST(Broadcast, WritesIntoInferenceTensorsAlsoOutsideOfInferenceMode) {
  on_processes(2, [](PartialState& state) {
    const double mine = state.process_index() + 1;
    Tensor plain;
    Tensor transposed;
    {
      const c10::InferenceMode mode;
      plain = torch::full({3}, mine);
      transposed = torch::full({2, 3}, mine).t();
    }
    broadcast(plain);
    broadcast(transposed);
    broadcast(std::pair{plain, transposed}, 1);
    EXPECT_EQ(numbers(plain), std::vector<double>(3, 1));
    EXPECT_EQ(numbers(transposed), std::vector<double>(6, 1));
    EXPECT_TRUE(transposed.is_inference());
  });
}

TEST(Broadcast, RefusesExpandedTensorsOnEveryProcess) {
  on_processes(2, [](PartialState&) {
    EXPECT_EQ(message_of<ArgumentError>([] { broadcast(std::vector{torch::ones(1).expand({4})}); }),
              "broadcast: the tensor at [0] is expanded: several of its elements are one place in "
              "memory, so it cannot be written. Pass tensor.clone().");
    EXPECT_EQ(message_of<ArgumentError>([] { broadcast(torch::ones(1), 2); }),
              "broadcast: from_process is 2, but there are processes 0 to 1.");
  });
}

/// Relative; sums of three numbers may be rounded in another order by Python's backend.
double tolerance(const std::string& dtype) {
  if (dtype == "float16") return 2e-3;
  if (dtype == "bfloat16") return 1.6e-2;
  return dtype == "float32" ? 3e-7 : 1e-15;
}

TEST(Reduce, GivesPythonsNumbers) {
  on_processes(3, [](PartialState& state) {
    const std::map<std::string, torch::ScalarType> dtypes{
        {"float32", torch::kFloat},     {"float64", torch::kDouble}, {"float16", torch::kHalf},
        {"bfloat16", torch::kBFloat16}, {"int64", torch::kLong},     {"int32", torch::kInt},
        {"uint8", torch::kByte}};
    for (const auto& [name, kinds] : reference().at("reduce").items()) {
      for (const auto& [kind, json] : kinds.items()) {
        const auto reduced =
            reduce(sample(state.process_index(), dtypes.at(name)), from_string<Reduction>(kind));
        EXPECT_EQ(reduced.scalar_type(), dtypes.at(name));
        const auto got = numbers(reduced);
        const auto expected = numbers(json);
        ASSERT_EQ(got.size(), expected.size());
        for (std::size_t i = 0; i < got.size(); ++i) {
          EXPECT_NEAR(got[i], expected[i], tolerance(name) * 8) << name << ' ' << kind << ' ' << i;
        }
      }
    }
  });
}

/// The same reduction by hand, in the dtype of the tensor and in rank order.
template <class F>
Tensor folded(int world, torch::ScalarType dtype, std::int64_t size, F&& f) {
  auto result = sample(0, dtype, size);
  for (int rank = 1; rank < world; ++rank) result = f(result, sample(rank, dtype, size));
  return result;
}

TEST(Reduce, SumsInRankOrderWithTheSameBitsOnAllProcesses) {
  on_processes(4, [](PartialState& state) {
    const auto add = [](const Tensor& a, const Tensor& b) { return a + b; };
    for (const auto dtype :
         {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble, torch::kLong,
          torch::kShort, torch::kChar, torch::kComplexFloat, torch::kComplexDouble}) {
      const auto sum = reduce(sample(state.process_index(), dtype), Reduction::kSum);
      EXPECT_EQ(bits(sum), bits(folded(4, dtype, 37, add))) << dtype;
    }
    const auto mean = reduce(sample(state.process_index(), torch::kHalf));
    EXPECT_EQ(bits(mean), bits(folded(4, torch::kHalf, 37, add) / 4));
  });
}

TEST(Reduce, MakesTheSameOfLargeTensors) {
  on_processes(2, [](PartialState& state) {
    constexpr std::int64_t kSize = 300000;  // beyond what is combined locally
    const auto add = [](const Tensor& a, const Tensor& b) { return a + b; };
    const int rank = state.process_index();
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16,
                             torch::kLong, torch::kShort, torch::kByte, torch::kComplexFloat}) {
      const auto mine = sample(rank, dtype, kSize);
      const auto sum = reduce(mine, Reduction::kSum);
      EXPECT_EQ(bits(sum), bits(folded(2, dtype, kSize, add))) << dtype;
      EXPECT_EQ(bits(mine), bits(sample(rank, dtype, kSize))) << "the input stays";
    }
    const auto flags = reduce(sample(rank, torch::kBool, kSize), Reduction::kSum);
    EXPECT_EQ(bits(flags), bits(sample(0, torch::kBool, kSize) | sample(1, torch::kBool, kSize)));
    const auto tree =
        reduce(std::tuple{sample(rank, torch::kFloat, kSize), torch::tensor(rank + 1.0F),
                          sample(rank, torch::kDouble, 5), torch::zeros({0, 2})});
    EXPECT_EQ(bits(std::get<0>(tree)), bits(folded(2, torch::kFloat, kSize, add) / 2));
    EXPECT_EQ(std::get<1>(tree).item<float>(), 1.5F);
    EXPECT_EQ(bits(std::get<2>(tree)), bits(folded(2, torch::kDouble, 5, add) / 2));
    EXPECT_EQ(std::get<3>(tree).sizes(), torch::IntArrayRef({0, 2}));
  });
}

TEST(Reduce, KeepsNanInAMaximumOfAnySize) {
  on_processes(3, [](PartialState& state) {
    for (const std::int64_t size : {4, 300000}) {
      for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
        for (int owner = 0; owner < 3; ++owner) {
          auto mine = torch::full({size}, state.process_index(), dtype);
          if (state.process_index() == owner) mine[1] = NAN;
          const auto all = reduce(mine, Reduction::kMax);
          EXPECT_TRUE(std::isnan(all[1].item<double>())) << dtype << ' ' << size << ' ' << owner;
          EXPECT_EQ(all.isnan().sum().item<int>(), 1);
          EXPECT_EQ(all[0].item<double>(), 2);
        }
      }
    }
  });
}

TEST(Reduce, CombinesSeveralLargeDtypesAtOnce) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    const auto all = reduce(std::tuple{torch::full({200000}, rank + 1.0F),
                                       torch::full({200000}, rank + 1.0, torch::kDouble),
                                       torch::full({200000}, rank + 1, torch::kLong)},
                            Reduction::kMax);
    EXPECT_TRUE(std::get<0>(all).eq(2).all().item<bool>());
    EXPECT_TRUE(std::get<1>(all).eq(2).all().item<bool>());
    EXPECT_TRUE(std::get<2>(all).eq(2).all().item<bool>());
  });
}

TEST(Reduce, CombinesMixedDtypesOfATree) {
  on_processes(3, [](PartialState& state) {
    const int rank = state.process_index();
    const std::map<std::string, std::vector<Tensor>> tree{
        {"f", {torch::tensor({1.0, 4.0}) * (rank + 1), torch::tensor(rank)}},
        {"b", {torch::tensor({rank == 1, false})}},
        {"u",
         {torch::tensor(40000 + rank).to(torch::kUInt16), torch::tensor(200).to(torch::kByte),
          torch::tensor(rank - 5).to(torch::kUInt64)}}};
    const auto sum = reduce(tree, Reduction::kSum);
    EXPECT_EQ(numbers(sum.at("f")[0]), (std::vector<double>{6, 24}));
    EXPECT_EQ(sum.at("f")[1].item<int>(), 3);
    EXPECT_EQ(sum.at("f")[1].dim(), 0);
    EXPECT_EQ(numbers(sum.at("b")[0]), (std::vector<double>{1, 0}));
    EXPECT_EQ(sum.at("b")[0].scalar_type(), torch::kBool);
    EXPECT_EQ(sum.at("u")[0].to(torch::kInt).item<int>(), (120003 % 65536));
    EXPECT_EQ(sum.at("u")[1].item<int>(), 600 % 256);
    EXPECT_EQ(sum.at("u")[2].to(torch::kLong).item<std::int64_t>(), -12);  // modulo 2^64

    const auto max = reduce(tree, Reduction::kMax);
    EXPECT_EQ(numbers(max.at("f")[0]), (std::vector<double>{3, 12}));
    EXPECT_EQ(numbers(max.at("b")[0]), (std::vector<double>{1, 0}));
    EXPECT_EQ(max.at("u")[0].to(torch::kInt).item<int>(), 40002);
    EXPECT_EQ(max.at("u")[2].to(torch::kLong).item<std::int64_t>(), -3);  // the largest unsigned
    const auto order = torch::tensor(rank == 0 ? -1 : rank).to(torch::kUInt64);
    EXPECT_EQ(reduce(order, Reduction::kMax).to(torch::kLong).item<std::int64_t>(), -1);
  });
}

TEST(Reduce, KeepsTheGraphOfTheLocalCopy) {
  on_processes(2, [](PartialState& state) {
    const auto leaf = torch::tensor({1.0, 2.0}).requires_grad_();
    const auto plain = torch::tensor({5.0});
    const auto result = reduce(std::pair{leaf * (state.process_index() + 1), plain});
    EXPECT_EQ(numbers(result.first), (std::vector<double>{1.5, 3}));
    EXPECT_EQ(numbers(result.second), std::vector<double>{5});
    EXPECT_FALSE(result.second.requires_grad());
    result.first.sum().backward();
    EXPECT_EQ(numbers(leaf.grad()), (std::vector<double>(2, (state.process_index() + 1) / 2.0)));
  });
}

// What travels does not depend on what a process does with it.
TEST(Reduce, FitsTogetherWhereOneProcessAloneKeepsAGraphOrOtherStrides) {
  on_processes(2, [](PartialState& state) {
    const bool first = state.process_index() == 0;
    auto tensor = torch::arange(6, torch::kFloat).view({2, 3});
    if (first) tensor = tensor.t().contiguous().t();
    tensor.requires_grad_(first);
    const auto mean = reduce(tensor, Reduction::kMean);
    EXPECT_TRUE(torch::equal(mean, torch::arange(6, torch::kFloat).view({2, 3})));
    EXPECT_EQ(mean.requires_grad(), first);
    EXPECT_FALSE(mean.is_alias_of(tensor));
    if (!first) return;
    mean.sum().backward();
    EXPECT_TRUE(torch::equal(tensor.grad(), torch::full({2, 3}, 0.5F)));
  });
}

TEST(Reduce, RefusesWhatIsNotDefinedBeforeAnythingIsSent) {
  on_processes(2, [](PartialState& state) {
    EXPECT_EQ(
        message_of<ArgumentError>([] { (void)reduce(Named{{"n", torch::ones(1, torch::kLong)}}); }),
        "reduce: the mean of torch.int64 is not defined (the tensor at ['n']). Convert it to float "
        "first, or take the sum.");
    EXPECT_EQ(
        message_of<ArgumentError>([] { (void)reduce(torch::ones(1, torch::kBool)); }),
        "reduce: the mean of torch.bool is not defined. Convert it to float first, or take the "
        "sum.");
    EXPECT_THROW((void)reduce(torch::ones(1).to(torch::kFloat8_e5m2), Reduction::kSum),
                 ArgumentError);
    EXPECT_THROW((void)reduce(torch::ones(1, torch::kComplexFloat), Reduction::kMax),
                 ArgumentError);
    EXPECT_EQ(gather(torch::ones(1)).numel(), state.num_processes());  // nobody is out of step
  });
}

TEST(Reduce, NoneCopiesWithoutTalking) {
  on_processes(2, [](PartialState& state) {
    if (state.process_index() == 0) {
      const auto tensor = torch::ones(2, torch::kLong);
      const auto copy = reduce(tensor, Reduction::kNone);
      EXPECT_TRUE(copy.equal(tensor) && !copy.is_same(tensor));
    }
    const auto transposed = sample(state.process_index(), torch::kFloat, 6).reshape({2, 3}).t();
    const auto sum = reduce(transposed, Reduction::kSum);
    EXPECT_EQ(
        numbers(sum),
        numbers((sample(0, torch::kFloat, 6) + sample(1, torch::kFloat, 6)).reshape({2, 3}).t()));
    EXPECT_EQ(reduce(torch::zeros({2, 0})).sizes(), torch::IntArrayRef({2, 0}));
  });
}

TEST(PadAcrossProcesses, PadsToTheLongestAsPythonDoes) {
  on_processes(3, [](PartialState& state) {
    const int rank = state.process_index();
    const auto rows = torch::full({rank + 1, 2}, rank + 1.0);
    const auto padded = pad_across_processes(rows, {.pad_index = 7});
    EXPECT_EQ(padded.is_same(rows), rank == 2);
    EXPECT_EQ(numbers(gather(padded)), numbers(reference().at("pad")));
    EXPECT_EQ(numbers(gather(pad_across_processes(rows, {.pad_index = 7, .pad_first = true}))),
              numbers(reference().at("pad_first")));
    EXPECT_EQ(
        numbers(gather(pad_across_processes(torch::full({2, rank + 1}, rank + 1), {.dim = -1}))),
        numbers(reference().at("pad_dim_minus_1")));
  });
}

TEST(PadAcrossProcesses, KeepsDtypesAndLeavesWhatNeedsNoPadding) {
  on_processes(2, [](PartialState& state) {
    const auto size = state.process_index() + 1;
    const auto scalar = torch::tensor(1);
    const auto same = torch::ones(3);
    const auto padded = pad_across_processes(
        std::tuple{torch::ones(size, torch::kBool), scalar, same,
                   torch::ones({size}).to(torch::kFloat8_e4m3fn),
                   torch::ones({size}).to(torch::kUInt16), torch::ones({size}, torch::kBFloat16)},
        {.pad_index = 1});
    EXPECT_EQ(std::get<0>(padded).scalar_type(), torch::kBool);
    EXPECT_EQ(numbers(std::get<0>(padded)), (std::vector<double>{1, 1}));
    EXPECT_TRUE(std::get<1>(padded).is_same(scalar));
    EXPECT_TRUE(std::get<2>(padded).is_same(same));
    EXPECT_EQ(numbers(std::get<3>(padded).to(torch::kFloat)), (std::vector<double>{1, 1}));
    EXPECT_EQ(numbers(std::get<4>(padded).to(torch::kInt)), (std::vector<double>{1, 1}));
    EXPECT_EQ(std::get<5>(padded).scalar_type(), torch::kBFloat16);
  });
}

TEST(PadAcrossProcesses, RefusesAPadIndexThatIsNoValueOfTheDtype) {
  on_processes(2, [](PartialState& state) {
    EXPECT_EQ(
        message_of<ArgumentError>([] {
          (void)pad_across_processes(Named{{"mask", torch::ones(2, torch::kBool)}},
                                     {.pad_index = 2});
        }),
        "pad_across_processes: pad_index is 2, which is no value of torch.bool, the dtype of the "
        "tensor at ['mask'].");
    EXPECT_THROW((void)pad_across_processes(torch::ones(2, torch::kLong), {.pad_index = 0.5}),
                 ArgumentError);
    EXPECT_THROW((void)pad_across_processes(torch::ones(2, torch::kByte), {.pad_index = -1}),
                 ArgumentError);
    EXPECT_THROW((void)pad_across_processes(torch::ones(2, torch::kHalf), {.pad_index = 1e6}),
                 ArgumentError);
    EXPECT_NO_THROW(
        (void)pad_across_processes(torch::ones(2, torch::kHalf), {.pad_index = -INFINITY}));
    EXPECT_NO_THROW((void)pad_across_processes(torch::ones(2, torch::kLong), {.pad_index = -100}));
    EXPECT_EQ(gather(torch::ones(1)).numel(), state.num_processes());  // nobody is out of step
  });
}

TEST(PadAcrossProcesses, ChecksPadIndexAlsoWhereTheDimensionIsMissing) {
  on_processes(2, [](PartialState& state) {
    const auto mine = state.process_index() == 0 ? torch::ones({2}, torch::kLong)
                                                 : torch::ones({2, 2}, torch::kLong);
    EXPECT_EQ(message_of<ArgumentError>(
                  [&] { (void)pad_across_processes(mine, {.dim = 1, .pad_index = 0.5}); }),
              "pad_across_processes: pad_index is 0.5, which is no value of torch.int64, the dtype "
              "of the tensor.");
  });
}

TEST(PadAcrossProcesses, ThrowsEverywhereWhenDimensionsDiffer) {
  on_processes(2, [](PartialState& state) {
    const auto mine = state.process_index() == 0 ? torch::ones({2}) : torch::ones({2, 3});
    const auto message =
        message_of<CommError>([&] { (void)pad_across_processes(Named{{"x", mine}}, {.dim = 1}); });
    EXPECT_NE(message.find("pass different numbers of dimensions"), std::string::npos) << message;
    EXPECT_NE(message.find("collectives_multi_test.cpp:"), std::string::npos) << message;
    EXPECT_NE(message.find("Leaves: ['x']. Shapes:\n  - Process 0: [[2]]\n  - Process 1: [[2, 3]]"),
              std::string::npos)
        << message;
    EXPECT_NE(
        message_of<CommError>([&] { (void)pad_across_processes(mine); }).find("size. Shapes:\n"),
        std::string::npos);
  });
}

TEST(CopyTensorToDevices, GivesAllTheTensorOfTheOwner) {
  on_processes(3, [](PartialState& state) {
    for (const auto& tensor :
         {sample(7, torch::kBFloat16, 6).reshape({2, 3}).t(), torch::tensor(2.5),
          torch::zeros({2, 0, 3}), sample(7, torch::kShort)}) {
      std::optional<Tensor> mine;
      if (state.process_index() == 2) mine = tensor;
      const auto copy = copy_tensor_to_devices(mine);
      EXPECT_EQ(copy.sizes(), tensor.sizes());
      EXPECT_EQ(copy.scalar_type(), tensor.scalar_type());
      EXPECT_EQ(bits(copy), bits(tensor));
    }
  });
}

TEST(CopyTensorToDevices, ThrowsEverywhereUnlessOneProcessOwnsATensor) {
  on_processes(3, [](PartialState& state) {
    std::optional<Tensor> mine;
    if (state.process_index() > 0) mine = torch::ones(1);
    EXPECT_EQ(
        message_of<ArgumentError>([&] { (void)copy_tensor_to_devices(mine); }),
        "copy_tensor_to_devices: exactly one process must pass a tensor, but processes 1, 2 did.");
    EXPECT_EQ(message_of<ArgumentError>([] { (void)copy_tensor_to_devices(); }),
              "copy_tensor_to_devices: exactly one process must pass a tensor, but none did.");
  });
}

TEST(CopyTensorToDevices, ThrowsEverywhereWhenTheTensorIsNotDense) {
  on_processes(2, [](PartialState& state) {
    const std::vector<std::pair<Tensor, std::string>> cases{
        {torch::eye(2).to_sparse(), "of layout Sparse"},
        {torch::ones(2, torch::kMeta), "on meta and has no data"},
        {at::_nested_tensor_from_tensor_list({torch::ones(2), torch::ones(3)}), "nested"}};
    for (const auto& [tensor, what] : cases) {
      std::optional<Tensor> mine;
      if (state.process_index() == 1) mine = tensor;
      EXPECT_EQ(message_of<ArgumentError>([&] { (void)copy_tensor_to_devices(mine); }),
                "copy_tensor_to_devices: the tensor of process 1 is " + what +
                    ", and only dense tensors can be sent. Convert it first.");
    }
  });
}

TEST(Collectives, MoveIValuesOfTorchScript) {
  on_processes(2, [](PartialState& state) {
    const auto mine = torch::full({1}, state.process_index());
    const torch::IValue value(c10::ivalue::Tuple::create(mine, torch::IValue()));
    const auto all = gather(value).toTuple();
    EXPECT_EQ(numbers(all->elements()[0].toTensor()), (std::vector<double>{0, 1}));
    EXPECT_TRUE(all->elements()[1].isNone());
    EXPECT_EQ(message_of<ArgumentError>(
                  [&] { (void)gather(torch::IValue(c10::ivalue::Tuple::create(mine, 7))); }),
              "gather got a leaf at [1] of kind int: 7. Only leaves of kind tensor can be used "
              "here.");
  });
}

/// Ranks 1 and 2 as a group of their own; null on rank 0.
c10::intrusive_ptr<c10d::ProcessGroup> last_two(PartialState& state) {
  if (state.process_index() == 0) return {};
  return state.process_group()->splitGroup({1, 2}, std::nullopt, std::nullopt, std::nullopt,
                                           std::nullopt);
}

void use_sub_group(PartialState& state) {
  const auto group = last_two(state);
  if (state.process_index() == 0) {
    EXPECT_FALSE(group);
  } else {
    const double rank = state.process_index();
    EXPECT_EQ(numbers(gather(torch::tensor({rank}), group)), (std::vector<double>{1, 2}));
    EXPECT_EQ(numbers(reduce(torch::tensor({rank}), group)), std::vector<double>{1.5});
    EXPECT_EQ(numbers(broadcast(torch::tensor({rank}), group, 1)), std::vector<double>{2});
    EXPECT_EQ(pad_across_processes(torch::ones(state.process_index()), group).numel(), 2);
    EXPECT_EQ(gather_object(std::vector{rank}, group), (std::vector<double>{1, 2}));
    std::vector<double> list{rank};
    EXPECT_EQ(broadcast_object_list(list, group, 1), std::vector<double>{2});
  }
  EXPECT_EQ(gather(torch::ones(1)).numel(), 3);  // the group of all is untouched
}

TEST(Collectives, WorkInAGroupOfSomeProcesses) { on_processes(3, use_sub_group); }

TEST(Collectives, WorkInAGroupOfSomeProcessesInDebugMode) {
  on_processes(3, {.environment = {{"ACCELERATE_DEBUG_MODE", "1"}}}, use_sub_group);
}

TEST(Collectives, ReportAPeerThatIsGoneWithTheCallSite) {
  const auto outcomes = run_processes(2, {}, [](PartialState& state) {
    if (state.process_index() == 1) ::_exit(0);
    const auto message = message_of<CommError>([] { (void)gather(torch::ones(1)); });
    EXPECT_NE(message.find("rank 1 ("), std::string::npos) << message;
    EXPECT_NE(message.find("died before its first collective"), std::string::npos) << message;
    EXPECT_NE(message.find("gather float32[1] at collectives_multi_test.cpp:"), std::string::npos)
        << message;
    EXPECT_EQ(message.find("Exception raised from"), std::string::npos) << message;  // no C++ stack
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1
                                          : 0);  // the broken group would wait in its destructor
  });
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
}

}  // namespace
}  // namespace accelerate
