#include "accelerate/safetensors.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "accelerate/errors.h"
#include "support/command.h"
#include "support/message_of.h"

namespace accelerate::safetensors {
namespace {

using test::Folder;
using test::message_of;

StateDict example() {
  StateDict tensors;
  tensors.insert("w", at::arange(24, at::kFloat).reshape({2, 3, 4}));
  tensors.insert("n", at::scalar_tensor(3, at::kLong));
  tensors.insert("empty", at::empty({0, 4}, at::kHalf));
  return tensors;
}

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(Safetensors, AFileHasTheTensorsThatWereSaved) {
  const Folder folder;
  save_file(example(), folder / "a", {{"format", "pt"}, {"author", "me"}});
  const auto file = File::open(folder / "a");
  EXPECT_EQ(file.keys(), (std::vector<std::string>{"empty", "n", "w"}));
  EXPECT_EQ(file.offset_keys(), (std::vector<std::string>{"n", "w", "empty"}));
  EXPECT_EQ(file.metadata(), (Metadata{{"author", "me"}, {"format", "pt"}}));
  EXPECT_EQ(file.path(), folder / "a");
  EXPECT_EQ(file.info("w"), (TensorInfo{"F32", {2, 3, 4}, 96}));
  EXPECT_TRUE(file.contains("n"));
  EXPECT_FALSE(file.contains("m"));
  EXPECT_TRUE(file.get("w").equal(example()["w"]));
  EXPECT_EQ(file.get("n").item<std::int64_t>(), 3);
  EXPECT_EQ(file.get("n").dim(), 0);
  EXPECT_EQ(file.get("empty").sizes(), (std::vector<std::int64_t>{0, 4}));
  EXPECT_EQ(file.get("empty").scalar_type(), at::kHalf);
}

TEST(Safetensors, SaveFileWritesWhatSerializeReturns) {
  const Folder folder;
  save_file(example(), folder / "a");
  EXPECT_EQ(bytes_of(folder / "a"), serialize(example()));
}

TEST(Safetensors, LoadFileHasTheOrderOfTheBytes) {
  const Folder folder;
  save_file(example(), folder / "a");
  const auto tensors = load_file(folder / "a");
  EXPECT_EQ(tensors.keys(), (std::vector<std::string>{"n", "w", "empty"}));
  EXPECT_TRUE(tensors["w"].equal(example()["w"]));
}

TEST(Safetensors, MappedTensorsOutliveTheFileAndItsName) {
  const Folder folder;
  save_file(example(), folder / "a");
  const auto w = File::open(folder / "a").get("w");
  std::filesystem::remove(folder / "a");
  EXPECT_TRUE(w.equal(example()["w"]));
}

TEST(Safetensors, WritingIntoAMappedTensorDoesNotChangeTheFile) {
  const Folder folder;
  save_file(example(), folder / "a");
  const auto before = bytes_of(folder / "a");
  const auto file = File::open(folder / "a");
  file.get("w").zero_();
  EXPECT_EQ(bytes_of(folder / "a"), before);
  EXPECT_EQ(file.get("w").sum().item<float>(), 0);  // one mapping
}

TEST(Safetensors, TensorsThatAreNotMappedHaveMemoryOfTheirOwn) {
  const Folder folder;
  save_file(example(), folder / "a");
  const auto file = File::open(folder / "a", {.mapped = false});
  file.get("w").zero_();
  EXPECT_TRUE(file.get("w").equal(example()["w"]));
  EXPECT_TRUE(file.get_tensors()["w"].equal(example()["w"]));
}

TEST(Safetensors, ReadsLargeTensorsWithSeveralThreads) {
  const Folder folder;
  StateDict tensors;
  tensors.insert("a", at::arange(5'000'000, at::kLong));  // 40 MB: several chunks
  tensors.insert("b", at::arange(100, at::kLong));
  save_file(tensors, folder / "a");
  const auto read = File::open(folder / "a", {.mapped = false}).get_tensors();
  EXPECT_TRUE(read["a"].equal(tensors["a"]));
  EXPECT_TRUE(read["b"].equal(tensors["b"]));
}

TEST(Safetensors, TensorsOfAFileWithAnOddHeaderAreAligned) {
  std::string json = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  json.resize(57, ' ');
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(json.size());
  bytes += json;
  const auto data = serialize({{"w", at::ones({2})}}, {});
  bytes += data.substr(data.size() - 8);
  const auto w = File::from_bytes(bytes).get("w");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(w.data_ptr()) % alignof(float), 0U);
  EXPECT_TRUE(w.equal(at::ones({2})));
}

TEST(Safetensors, SlicesFollowPythonsRules) {
  const Folder folder;
  save_file(example(), folder / "a");
  const auto file = File::open(folder / "a");
  const auto w = example()["w"];
  const auto slice = [&](const std::vector<Range>& ranges) { return file.get_slice("w", ranges); };
  EXPECT_TRUE(slice({}).equal(w));
  EXPECT_TRUE(slice({{1, 2}}).equal(w.slice(0, 1, 2)));
  EXPECT_TRUE(slice({{}, {1, 3}}).equal(w.slice(1, 1, 3)));
  EXPECT_TRUE(slice({{}, {}, {1, 3}}).equal(w.slice(2, 1, 3)));
  EXPECT_TRUE(slice({{1}, {0, 2}, {-2}}).equal(w.slice(0, 1).slice(1, 0, 2).slice(2, -2)));
  EXPECT_TRUE(slice({{0, 100}, {-1}}).equal(w.slice(1, 2)));
  EXPECT_EQ(slice({{1, 1}}).sizes(), (std::vector<std::int64_t>{0, 3, 4}));
  EXPECT_EQ(slice({{}, {2, 1}}).sizes(), (std::vector<std::int64_t>{2, 0, 4}));
  EXPECT_EQ(file.get_slice("n", {}).item<std::int64_t>(), 3);
  EXPECT_EQ(file.get_slice("empty", {{}, {1, 3}}).sizes(), (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)file.get_slice("n", {{0, 1}}); }),
            "Tensor 'n' of '" + folder / "a" + "' has 0 dimensions, but 1 ranges were given.");
}

TEST(Safetensors, SlicesOfManyRunsAreTheSameNearAndFar) {
  const Folder folder;
  StateDict tensors;
  tensors.insert("near", at::arange(300 * 7, at::kInt).reshape({300, 7}));
  tensors.insert("far", at::arange(40 * 5000, at::kInt).reshape({4, 10, 5000}));
  save_file(tensors, folder / "a");
  const auto file = File::open(folder / "a");
  EXPECT_TRUE(
      file.get_slice("near", {{5}, {2, 4}}).equal(tensors["near"].slice(0, 5).slice(1, 2, 4)));
  EXPECT_TRUE(file.get_slice("far", {{1, 3}, {2, 9}, {17, 20}})
                  .equal(tensors["far"].slice(0, 1, 3).slice(1, 2, 9).slice(2, 17, 20)));
}

TEST(Safetensors, ReadIntoFillsATensorThatExists) {
  const Folder folder;
  save_file(example(), folder / "a");
  const auto file = File::open(folder / "a");
  const auto w = example()["w"];
  auto same = at::zeros({2, 3, 4}, at::TensorOptions().requires_grad(true));
  const auto version = same._version();
  file.read_into("w", same);
  EXPECT_TRUE(same.equal(w));
  EXPECT_GT(same._version(), version);
  const auto converted = at::zeros({2, 3, 4}, at::kDouble);
  file.read_into("w", converted);
  EXPECT_TRUE(converted.equal(w.to(at::kDouble)));
  const auto transposed = at::zeros({4, 3, 2}).permute({2, 1, 0});
  file.read_into("w", transposed);
  EXPECT_TRUE(transposed.equal(w));
  EXPECT_EQ(message_of<ArgumentError>([&] { file.read_into("w", at::zeros({24})); }),
            "Tensor 'w' of '" + folder / "a" +
                "' has shape [2, 3, 4] and cannot be read into one of shape [24].");
}

TEST(Safetensors, TheMetaDeviceGetsShapesAlone) {
  const auto file = File::from_bytes(serialize(example()));
  EXPECT_TRUE(file.get("w", c10::kMeta).is_meta());
  EXPECT_EQ(file.get("w", c10::kMeta).sizes(), (std::vector<std::int64_t>{2, 3, 4}));
}

TEST(Safetensors, ReadingAFileThatWasCutIsAnError) {
  const Folder folder;
  save_file(example(), folder / "a");
  const auto file = File::open(folder / "a", {.mapped = false});
  const auto mapped = File::open(folder / "a");
  ASSERT_EQ(::truncate((folder / "a").c_str(), 8), 0);
  for (const auto* one : {&file, &mapped}) {
    EXPECT_NE(message_of<CheckpointError>([&] { (void)one->get("w"); }).find("was cut to"),
              std::string::npos);
  }
}

TEST(Safetensors, AnUnknownNameIsAnErrorWithTheNearestOne) {
  const auto file = File::from_bytes(serialize({{"weight", at::ones({1})}}), "model.safetensors");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)file.get("wieght"); }),
            "'model.safetensors' does not contain tensor 'wieght'. Did you mean 'weight'?");
}

TEST(Safetensors, AWrongFileIsAFormatErrorWithItsPath) {
  const Folder folder;
  std::ofstream(folder / "a") << "not a safetensors file";
  try {
    (void)File::open(folder / "a");
    FAIL();
  } catch (const FormatError& error) {
    EXPECT_EQ(error.path(), folder / "a");
  }
}

TEST(Safetensors, DtypesThatTorchLacksAreRefusedByName) {
  std::string json = R"({"w":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]},)"
                     R"("v":{"dtype":"F4","shape":[2,1],"data_offsets":[3,4]}})";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(json.size());
  const auto file = File::from_bytes(bytes + json + std::string(4, '\0'), "f");
  EXPECT_EQ(file.info("w").dtype, "F6_E2M3");
  EXPECT_EQ(message_of<UnsupportedError>([&] { (void)file.get("w"); }),
            "'f': tensor 'w' has the dtype F6_E2M3, which Torch does not have.");
  EXPECT_EQ(
      message_of<UnsupportedError>([&] { (void)file.get("v"); }),
      "'f': tensor 'v' has the dtype F4 and shape [2, 1]; Torch needs an even last dimension.");
}

std::string refusal(const StateDict& tensors) {
  return message_of<ArgumentError>([&] { (void)serialize(tensors); });
}

TEST(Safetensors, RefusesTensorsThatShareMemory) {
  const auto whole = at::zeros({4});
  EXPECT_EQ(refusal({{"c", whole},
                     {"a", whole.slice(0, 0, 3)},
                     {"b", whole.slice(0, 2)},
                     {"other", at::zeros({4})}}),
            "Some tensors share memory, this will lead to duplicate memory on disk and potential "
            "differences when loading them again: [{'a', 'b', 'c'}]. A potential way to correctly "
            "save your model is to use `save_model`.");
}

TEST(Safetensors, TakesPartsOfAStorageThatDoNotOverlap) {
  const auto whole = at::arange(4);
  const auto file =
      File::from_bytes(serialize({{"a", whole.slice(0, 0, 2)}, {"b", whole.slice(0, 2)}}));
  EXPECT_TRUE(file.get("b").equal(whole.slice(0, 2)));
}

TEST(Safetensors, RefusesWhatTheFormatCannotHold) {
  EXPECT_TRUE(refusal({{"w", at::zeros({4, 4}).t().slice(0, 0, 2)}})
                  .starts_with("You are trying to save a non contiguous tensor: `w` which is not "
                               "allowed."));
  EXPECT_TRUE(
      refusal({{"w", at::eye(3).to_sparse()}})
          .starts_with("You are trying to save a sparse tensors: `['w']` which this library "
                       "does not support."));
  EXPECT_EQ(refusal({{"w", at::zeros({2}, at::kComplexDouble)}}),
            "The tensor 'w' has the dtype ComplexDouble, which safetensors files cannot hold. "
            "Convert it before saving.");
  EXPECT_EQ(refusal({{"w", at::empty({2}, c10::kMeta)}}),
            "The tensor 'w' is on the meta device: it has no data to save.");
  EXPECT_EQ(refusal({{"w", at::Tensor()}}), "The tensor 'w' is undefined.");
  EXPECT_EQ(refusal({{"w", at::empty({}, at::ScalarType::Float4_e2m1fn_x2)}}),
            "The tensor 'w' holds one pair of 4-bit floats and has no dimension, which safetensors "
            "files cannot hold. Save it with shape [1].");
}

TEST(Safetensors, ARefusedStateDictLeavesTheOldFile) {
  const Folder folder;
  save_file(example(), folder / "a");
  const auto before = bytes_of(folder / "a");
  const auto whole = at::zeros({4});
  EXPECT_THROW(save_file({{"a", whole}, {"b", whole}}, folder / "a"), ArgumentError);
  EXPECT_EQ(bytes_of(folder / "a"), before);
}

TEST(Safetensors, WritesConjugatedAndNegatedViewsAsTheirValues) {
  StateDict state;
  state.insert("conjugated", at::complex(at::ones(2), at::ones(2)).conj());
  state.insert("negated", at::_neg_view(at::ones(3)));
  const Folder folder;
  save_file(state, folder / "a");
  const auto file = File::open(folder / "a");
  for (const auto& entry : state) EXPECT_TRUE(file.get(entry.key()).equal(entry.value()));
}

}  // namespace
}  // namespace accelerate::safetensors
