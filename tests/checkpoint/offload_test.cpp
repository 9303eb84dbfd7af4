#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/modeling.h"
#include "accelerate/safetensors.h"
#include "checkpoint/models.h"
#include "checkpoint/offload.h"
#include "checkpoint/offloaded.h"
#include "core/captured_log.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::message_of;
using test::offloaded_tensors;
using test::reference_path;
using Names = std::vector<std::string>;

void expect_equal(const StateDict& a, const StateDict& b) {
  ASSERT_EQ(a.keys(), b.keys());
  for (const auto& entry : a) {
    EXPECT_EQ(entry.value().scalar_type(), b[entry.key()].scalar_type()) << entry.key();
    EXPECT_TRUE(torch::equal(entry.value(), b[entry.key()])) << entry.key();
  }
}

StateDict all_of(const WeightsMap& weights) {
  StateDict state("Tensor");
  for (const auto& name : weights.keys()) state.insert(name, weights.at(name));
  return state;
}

class OffloadTest : public testing::Test {
 protected:
  Folder folder_;
  const fs::path& path_ = folder_.path();
};

TEST_F(OffloadTest, WritesTheFoldersOfPython) {
  offload_state_dict(path_ / "new" / "spill", offloaded_tensors());
  EXPECT_EQ(test::files_in(path_ / "new" / "spill"),
            test::files_in(reference_path("offload/folder")));
}

TEST_F(OffloadTest, ReadsTheFoldersOfPython) {
  const OffloadedWeightsLoader weights({.save_folder = reference_path("offload/folder")});
  expect_equal(all_of(weights), offloaded_tensors());
}

TEST_F(OffloadTest, KeepsTypesThatNumpyDoesNotHave) {
  StateDict state("Tensor");
  state.insert("w", torch::arange(4).to(torch::kFloat8_e4m3fn));
  state.insert("none", torch::zeros({0, 3}));
  offload_state_dict(path_, state);
  const OffloadedWeightsLoader weights({.save_folder = path_});
  EXPECT_EQ(weights.at("w").scalar_type(), torch::kFloat8_e4m3fn);
  EXPECT_TRUE(torch::equal(weights.at("w").to(torch::kFloat), torch::arange(4).to(torch::kFloat)));
  EXPECT_EQ(weights.at("none").sizes(), (std::vector<std::int64_t>{0, 3}));
}

TEST_F(OffloadTest, AddsToAnIndexThatIsThere) {
  OffloadIndex index;
  offload_weight(torch::ones(2), "a", path_, &index);
  offload_weight(torch::ones(3), "b", path_, &index);
  save_offload_index(index, path_);
  OffloadIndex more;
  offload_weight(torch::zeros(5), "b", path_, &more);
  offload_weight(torch::zeros(1), "c", path_, &more);
  save_offload_index(more, path_);
  save_offload_index({}, path_);
  const auto last = offload_weight(torch::ones(1), "d", path_, more);
  EXPECT_EQ(last.keys(), (Names{"b", "c", "d"})) << "as Python returns it";
  EXPECT_FALSE(more.contains("d"));
  const OffloadedWeightsLoader weights({.save_folder = path_});
  EXPECT_EQ(weights.keys(), (Names{"a", "b", "c"}));
  EXPECT_EQ(weights.at("b").numel(), 5);
}

TEST_F(OffloadTest, WritingIntoALoadedTensorLeavesTheFile) {
  offload_state_dict(path_, offloaded_tensors());
  const OffloadedWeightsLoader weights({.save_folder = path_});
  weights.at("half").zero_();
  expect_equal(all_of(weights), offloaded_tensors());
}

TEST_F(OffloadTest, JoinsMemoryFilesAndSafetensors) {
  StateDict in_file("Tensor");
  in_file.insert("inner", torch::ones(3));
  safetensors::save_file(in_file, path_ / "x.safetensors");
  OffloadIndex index{
      {"b",
       {.dtype = "float16", .safetensors_file = path_ / "x.safetensors", .weight_name = "inner"}}};
  offload_weight(torch::full(2, 7.0), "c", path_, &index);
  offload_weight(torch::zeros(2), "a", path_, &index);
  StateDict memory("Tensor");
  memory.insert("d", torch::ones(1));
  memory.insert("a", torch::ones(1));
  const auto weights = std::make_shared<OffloadedWeightsLoader>(
      OffloadedWeightsOptions{.state_dict = memory, .save_folder = path_, .index = index});
  EXPECT_EQ(weights->keys(), (Names{"d", "a", "b", "c"}));
  EXPECT_EQ(weights->size(), 4U);
  EXPECT_EQ(weights->at("a").numel(), 1);  // of the memory
  EXPECT_EQ(weights->at("b").scalar_type(), torch::kHalf);
  EXPECT_EQ(weights->at("c")[0].item<float>(), 7);
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)weights->at("e"); }).substr(0, 34),
            "There is no offloaded weight 'e'. ");
  EXPECT_THROW(OffloadedWeightsLoader({}), ArgumentError);
}

TEST_F(OffloadTest, PrefixedDatasetSpeaksOfLocalNames) {
  offload_state_dict(path_, offloaded_tensors());
  const PrefixedDataset linear(
      std::make_shared<OffloadedWeightsLoader>(OffloadedWeightsOptions{.save_folder = path_}),
      "linear.");
  EXPECT_EQ(linear.keys(), (Names{"weight", "bias"}));
  EXPECT_EQ(linear.at("weight").numel(), 6);
}

TEST(ExtractSubmodulesStateDict, TakesModulesAndTensorsByTheirWholeName) {
  StateDict state("Tensor");
  for (const auto* name : {"a.1.w", "a.10.w", "a.1", "b.w", "c"}) {
    state.insert(name, torch::ones(1));
  }
  EXPECT_EQ(extract_submodules_state_dict(state, {"a.1", "c"}).keys(),
            (Names{"a.1.w", "a.1", "c"}));
}

// ---- bad input ----------------------------------------------------------------------------------

TEST_F(OffloadTest, NamesAFileThatIsMissingOrCut) {
  offload_state_dict(path_, offloaded_tensors());
  const OffloadedWeightsLoader weights({.save_folder = path_});
  fs::resize_file(path_ / "turned.dat", 40);
  EXPECT_EQ(message_of<FormatError>([&] { (void)weights.at("turned"); }),
            "'" + (path_ / "turned.dat").string() +
                "' has 40 bytes, but its index says 48: it was cut or belongs to another model. "
                "Remove the folder and offload the weights again.");
  fs::remove(path_ / "half.dat");
  EXPECT_NE(message_of<CheckpointError>([&] { (void)weights.at("half"); }).find("half.dat"),
            std::string::npos);
  EXPECT_NE(message_of<CheckpointError>([&] {
              (void)read_offload_index(path_ / "none");
            }).find("is no offload folder: it has no index.json"),
            std::string::npos);
}

TEST_F(OffloadTest, FindsAStaleIndex) {
  using detail::checkpoint::check_offloaded;
  const auto model = test::filled<test::Small>();
  offload_state_dict(path_, state_dict(*model));
  const auto index = read_offload_index(path_);
  check_offloaded(state_dict(*model), index, path_);
  StateDict other("Tensor");
  other.insert("linear1.weight", torch::zeros({4, 4}));
  EXPECT_EQ(message_of<CheckpointError>([&] { check_offloaded(other, index, path_); }),
            "The offload folder '" + path_.string() +
                "' does not belong to this model: 'linear1.weight' has shape [4, 3] there and [4, "
                "4] here. Remove the folder, or offload to another one.");
  StateDict unknown("Tensor");
  unknown.insert("linear3.weight", torch::zeros(1));
  EXPECT_THROW(check_offloaded(unknown, index, path_), CheckpointError);
  StateDict half("Tensor");
  half.insert("linear1.weight", model->linear1->weight.to(torch::kHalf));
  EXPECT_NE(message_of<CheckpointError>([&] {
              check_offloaded(half, index, path_);
            }).find("'linear1.weight' is of the dtype float32 there and float16 here"),
            std::string::npos);
  fs::resize_file(path_ / "linear1.weight.dat", 4);
  EXPECT_THROW(check_offloaded(state_dict(*model), index, path_), CheckpointError);
}

TEST_F(OffloadTest, RefusesASecondWriter) {
  const int folder = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::flock(folder, LOCK_EX), 0);
  EXPECT_EQ(message_of<CheckpointError>([&] { offload_state_dict(path_, offloaded_tensors()); }),
            "Another process or object uses '" + path_.string() +
                "' for offloaded weights. Name another folder, or wait until it has ended.");
  EXPECT_TRUE(test::files_in(path_).empty());
  ::close(folder);
}

TEST_F(OffloadTest, LeavesNothingTornIfThereIsNoRoom) {
  OffloadIndex index;
  offload_weight(torch::ones(4), "w", path_, &index);
  save_offload_index(index, path_);
  const auto before = test::files_in(path_);
  // A file may have no more than 64 bytes from here on.
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{.rlim_cur = 64, .rlim_max = old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  StateDict state("Tensor");
  state.insert("w", torch::zeros(1000));
  const auto message = message_of<CheckpointError>([&] { offload_state_dict(path_, state); });
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("w.dat"), std::string::npos) << message;
  EXPECT_EQ(test::files_in(path_), before);
}

// A file may have no more than 1000 bytes: the index fits, and "first", but not "second".
TEST_F(OffloadTest, AnUpdateThatFailsHalfWayLeavesNoIndexOfTwoModels) {
  const auto all = [](std::int64_t size, double value) {
    StateDict state("Tensor");
    for (const auto* name : {"first", "second"}) state.insert(name, torch::full(size, value));
    return state;
  };
  auto before = all(1000, 1.0);
  before.insert("other", torch::ones(4));
  offload_state_dict(path_, before);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{.rlim_cur = 1000, .rlim_max = old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  auto more = all(1000, 2.0);
  more["first"] = torch::zeros(4);
  EXPECT_THROW(offload_state_dict(path_, more), CheckpointError);
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(read_offload_index(path_).keys(), Names{"other"});
  offload_state_dict(path_, more);
  const OffloadedWeightsLoader weights({.save_folder = path_});
  EXPECT_EQ(weights.keys(), (Names{"other", "first", "second"}));
  EXPECT_TRUE(torch::equal(weights.at("second"), more["second"]));
}

TEST_F(OffloadTest, MapsMoreTensorsThanAProcessMayHaveFilesOpen) {
  StateDict state("Tensor");
  for (int i = 0; i < 200; ++i) state.insert("w" + std::to_string(i), torch::full(3, i));
  offload_state_dict(path_, state);
  rlimit old{};
  ::getrlimit(RLIMIT_NOFILE, &old);
  const rlimit few{.rlim_cur = 64, .rlim_max = old.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &few);
  const OffloadedWeightsLoader weights({.save_folder = path_});
  StateDict mapped("Tensor");
  EXPECT_NO_THROW(mapped = all_of(weights));
  ::setrlimit(RLIMIT_NOFILE, &old);
  expect_equal(mapped, state);
}

TEST_F(OffloadTest, RefusesNamesThatAreNoFiles) {
  EXPECT_THROW(offload_weight(torch::ones(1), "a/b", path_), ArgumentError);
  EXPECT_THROW(offload_weight(torch::ones(1), "", path_), ArgumentError);
  EXPECT_THROW(offload_weight(torch::ones(1, torch::kMeta), "a", path_), StateError);
}

// ---- models -------------------------------------------------------------------------------------

TEST_F(OffloadTest, LoadsOffloadedWeightsIntoAModel) {
  const auto source = test::filled<test::Small>();
  offload_state_dict(path_, state_dict(*source));
  auto index = read_offload_index(path_);
  index.set("linear1.SCB", {.dtype = "float32", .shape = {4}});  // of a quantised weight
  test::Small net;
  set_module_tensor_to_device(net, "linear1.weight", torch::kMeta);
  load_offloaded_weights(net, index, path_);
  test::expect_equal(net, *source);
}

class MappedLoadTest : public OffloadTest {
 protected:
  MappedLoadTest() { safetensors::save_file(state_dict(*source_), path_ / "model.safetensors"); }
  std::shared_ptr<test::Small> source_ = test::filled<test::Small>();
  fs::path spill_ = path_ / "spill";
};

TEST_F(MappedLoadTest, WritesWhatIsMappedToDiskIntoTheOffloadFolder) {
  test::Small net;
  const auto weight = net.linear1->weight;
  load_checkpoint_in_model(net, path_,
                           {.device_map = {{"linear1", "disk"}, {"batchnorm", "disk"}, {"", "cpu"}},
                            .offload_folder = spill_});
  EXPECT_TRUE(weight.is_meta());
  EXPECT_TRUE(weight.is_same(net.linear1->weight));
  EXPECT_TRUE(net.batchnorm->weight.is_meta());
  EXPECT_FALSE(net.batchnorm->running_mean.is_meta());  // buffers stay, and are loaded
  EXPECT_TRUE(torch::equal(net.batchnorm->running_mean, source_->batchnorm->running_mean));
  EXPECT_TRUE(torch::equal(net.linear2->weight, source_->linear2->weight));
  const OffloadedWeightsLoader weights({.save_folder = spill_});
  EXPECT_EQ(weights.keys(),
            (Names{"linear1.weight", "linear1.bias", "batchnorm.weight", "batchnorm.bias"}));
  EXPECT_TRUE(torch::equal(weights.at("linear1.weight"), source_->linear1->weight));
  load_offloaded_weights(net, read_offload_index(spill_), spill_);
  test::expect_equal(net, *source_);
}

TEST_F(MappedLoadTest, ConvertsOnceWhenWriting) {
  test::Small net;
  load_checkpoint_in_model(net, path_,
                           {.device_map = {{"", "disk"}},
                            .offload_folder = spill_,
                            .dtype = torch::kBFloat16,
                            .offload_buffers = true,
                            .keep_in_fp32_modules = {"linear2"}});
  const OffloadedWeightsLoader weights({.save_folder = spill_});
  EXPECT_EQ(weights.size(), 9U);
  EXPECT_EQ(weights.at("linear1.weight").scalar_type(), torch::kBFloat16);
  EXPECT_EQ(net.linear1->weight.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(weights.at("linear2.weight").scalar_type(), torch::kFloat);
  EXPECT_EQ(weights.at("batchnorm.num_batches_tracked").scalar_type(), torch::kLong);
}

TEST_F(MappedLoadTest, LeavesTheModelIfTheFolderCannotBeWritten) {
  fs::create_directory(spill_);
  const int folder = ::open(spill_.c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::flock(folder, LOCK_EX), 0);  // of another writer
  const auto net = test::filled<test::Small>();
  net->linear1->bias.detach().zero_();
  EXPECT_THROW(load_checkpoint_in_model(
                   *net, path_,
                   {.device_map = {{"linear2", "disk"}, {"", "cpu"}}, .offload_folder = spill_}),
               CheckpointError);
  EXPECT_FALSE(net->linear2->weight.is_meta());
  EXPECT_EQ(net->linear1->bias.sum().item<float>(), 0);
  ::close(folder);
}

TEST_F(MappedLoadTest, KeepsTheCpuPartInMappedFiles) {
  const auto temporary = path_ / "tmp";
  fs::create_directory(temporary);
  ::setenv("TMPDIR", temporary.c_str(), 1);
  test::Small net;
  load_checkpoint_in_model(net, path_, {.device_map = {{"", "cpu"}}, .offload_state_dict = true});
  ::unsetenv("TMPDIR");
  test::expect_equal(net, *source_);
  EXPECT_TRUE(test::names_in(temporary).empty());
}

TEST_F(MappedLoadTest, FillsAModelWithoutMemory) {
  test::Small net;
  for (const auto& name : state_dict(net).keys()) {
    set_module_tensor_to_device(net, name, torch::kMeta);
  }
  load_checkpoint_in_model(net, path_);
  test::expect_equal(net, *source_);
  net.linear1(torch::ones({1, 3})).sum().backward();
}

TEST_F(MappedLoadTest, TiesStay) {
  const auto tied = test::filled<test::Tied>();
  save_model(state_dict(*tied), path_ / "tied");
  test::Tied net;
  for (const auto& name : state_dict(net).keys()) {
    set_module_tensor_to_device(net, name, torch::kMeta);
  }
  load_checkpoint_in_model(net, path_ / "tied", {.device_map = {{"", "cpu"}}});
  EXPECT_EQ(find_tied_parameters(net), (std::vector<Names>{{"embed.weight", "head.weight"}}));
  test::expect_equal(net, *tied);
}

TEST_F(MappedLoadTest, ATiedTensorStaysInMemoryIfOneOfItsNamesDoes) {
  const auto tied = test::filled<test::Tied>();
  StateDict both("Tensor");  // a file with the values under each name
  for (const auto& item : state_dict(*tied)) both.insert(item.key(), item.value().clone());
  safetensors::save_file(both, path_ / "tied.safetensors");
  for (const std::string on_disk : {"embed", "head"}) {
    test::Tied net;
    DeviceMap map{{"embed", "cpu"}, {"block", "cpu"}, {"head", "cpu"}};
    map.set(on_disk, "disk");
    load_checkpoint_in_model(net, path_ / "tied.safetensors",
                             {.device_map = map, .offload_folder = path_ / ("spill_" + on_disk)});
    test::expect_equal(net, *tied);
  }
}

TEST_F(MappedLoadTest, NamesWhatIsWrong) {
  test::Small net;
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { load_checkpoint_in_model(net, path_, {.device_map = {{"", "disk"}}}); }),
            "At least one of the model submodule will be offloaded to disk, please pass along an "
            "`offload_folder`.");
  EXPECT_EQ(message_of<ArgumentError>([&] {
              load_checkpoint_in_model(net, path_, {.device_map = {{"linear1", "cpu"}}});
            }),
            "batchnorm.weight doesn't have any device set.");
  EXPECT_THROW(load_checkpoint_in_model(
                   net, path_, {.device_map = {{"", "cpu"}}, .broadcast_from_rank0 = true}),
               ArgumentError);
}

}  // namespace
}  // namespace accelerate
