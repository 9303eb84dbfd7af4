// Our side of dcp.sh, on any number of processes.
//
//     interop_dcp save FOLDER          the tensors of dcp.py and an optimizer, in shards
//     interop_dcp copy FROM TO TYPE    a model, and an optimizer if there is one: each process
//     loads
//                                      its part, and all save what they have in files of a type
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "accelerate/state.h"
#include "checkpoint/sharded_models.h"
#include "checkpoint/stored_state.h"

namespace {

namespace fs = std::filesystem;
using namespace accelerate;
using namespace accelerate::detail::checkpoint;
using test::FlatModel;
using test::FlatOptimizer;
using test::ShardedTensor;

const std::map<std::string, torch::ScalarType> kDtypes = {{"float64", torch::kDouble},
                                                          {"float32", torch::kFloat},
                                                          {"float16", torch::kHalf},
                                                          {"bfloat16", torch::kBFloat16},
                                                          {"int64", torch::kLong},
                                                          {"int32", torch::kInt},
                                                          {"int16", torch::kShort},
                                                          {"int8", torch::kChar},
                                                          {"uint8", torch::kByte},
                                                          {"bool", torch::kBool},
                                                          {"complex128", torch::kComplexDouble},
                                                          {"complex64", torch::kComplexFloat},
                                                          {"uint16", torch::kUInt16},
                                                          {"uint32", torch::kUInt32},
                                                          {"uint64", torch::kUInt64},
                                                          {"float8_e4m3fn", torch::kFloat8_e4m3fn},
                                                          {"float8_e5m2", torch::kFloat8_e5m2}};

const std::vector<ShardedTensor> kShapes = {
    {"matrix", {5, 3}}, {"deep", {2, 3, 5, 7}}, {"vector", {11}}, {"scalar", {}},
    {"empty", {0, 2}},  {"one", {1, 1}},        {"wide", {3, 70}}};

void save(ShardedState& state, const fs::path& folder, const ShardedFileOptions& options = {}) {
  save_sharded_files(state, folder, options, "interop", std::source_location::current());
}

/// Element i is i.
std::shared_ptr<FlatModel> counted_model(const std::vector<ShardedTensor>& tensors) {
  auto model = std::make_shared<FlatModel>(0, 1, tensors);
  for (auto& shard : model->shards) {
    auto values = torch::arange(shard.begin, shard.end, torch::kDouble);
    if (shard.dtype == torch::kBool) values = values.remainder(2);
    shard.values = values.to(shard.dtype);
  }
  model->buffers = StateDict("Tensor");
  return model;
}

void save_all(const fs::path& folder) {
  auto tensors = kShapes;
  for (const auto& [name, dtype] : kDtypes) tensors.push_back({"dtypes." + name, {5, 3}, dtype});
  save(*sharded_state(counted_model(tensors)), folder);
  const auto model = counted_model(kShapes);
  const auto optimizer = std::make_shared<FlatOptimizer>(*model, 3);
  for (std::size_t i = 0; i < kShapes.size(); ++i) {
    optimizer->state.as_dict().at("state").as_dict().at(i).as_dict().erase("skipped");
  }
  optimizer->state.as_dict().at("param_groups").as_list()[0].as_dict().set("lr", 0.5);
  save(*test::optimizer_state(model, optimizer), folder);
}

/// A model as it is in a folder, without values; an optimizer of it if there is one.
std::vector<ShardedTensor> tensors_in(const Value& stored) {
  std::vector<ShardedTensor> tensors;
  for (const auto& [name, leaf] : stored.as_dict()) {
    tensors.push_back(
        {name.to_string(), stored_sizes(leaf), stored_range(leaf, {0, 0}).scalar_type()});
  }
  return tensors;
}

void copy_all(const fs::path& from, const fs::path& to, StateDictType type) {
  const auto model = counted_model(tensors_in(open_stored_state(from / "pytorch_model_fsdp_0")));
  load_sharded_files(*sharded_state(model), from, {});
  save(*sharded_state(model), to, {.type = type});
  if (!fs::exists(from / "optimizer_0")) return;
  // Groups of numbers for the names in the file, in another order than there.
  const auto stored = open_stored_state(from / "optimizer_0");
  std::vector<std::string> names;
  Value::List groups;
  for (const auto& group : stored.at("param_groups").as_list()) {
    Value::List ids;
    const auto& params = group.at("params").as_list();
    for (auto it = params.rbegin(); it != params.rend(); ++it) {
      ids.emplace_back(names.size());
      names.push_back(it->as_string());
    }
    groups.emplace_back(Value::Dict{{"params", std::move(ids)}});
  }
  const auto optimizer = std::make_shared<FlatOptimizer>(*model, 0);
  optimizer->state = Value::Dict{{"state", Value::Dict{}}, {"param_groups", std::move(groups)}};
  const auto state = sharded_optimizer_state(model, optimizer, names);
  load_sharded_files(*state, from, {});
  save(*state, to, {.type = type});
}

}  // namespace

int main(int argc, char** argv) {
  const PartialState state({.cpu = true});
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 2 && arguments[0] == "save") {
    save_all(arguments[1]);
  } else if (arguments.size() == 4 && arguments[0] == "copy") {
    copy_all(arguments[1], arguments[2], from_string<StateDictType>(arguments[3], "TYPE"));
  } else {
    throw std::invalid_argument("interop_dcp save FOLDER | copy FROM TO TYPE");
  }
}
