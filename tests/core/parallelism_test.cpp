#include "accelerate/parallelism_config.h"

#include <gtest/gtest.h>

#include <sstream>

#include "core/resolve.h"
#include "core/supported.h"
#include "records_support.h"

namespace accelerate {
namespace {

using testing::Json;
using testing::message_of;
using testing::reference;

const Environment kEmpty;

ParallelismConfig config_of(const Json& sizes) {
  return {.dp_replicate_size = sizes.at("dp_replicate").get<std::int64_t>(),
          .dp_shard_size = sizes.at("dp_shard").get<std::int64_t>(),
          .tp_size = sizes.at("tp").get<std::int64_t>(),
          .cp_size = sizes.at("cp").get<std::int64_t>(),
          .sp_size = sizes.value("sp", std::int64_t{1})};
}

TEST(ParallelismConfig, DerivesPythonsListsForEveryCombinationOfSizes) {
  std::size_t accepted = 0;
  for (const auto& entry : reference().at("parallelism")) {
    SCOPED_TRACE(entry.at("sizes").dump());
    const auto given = config_of(entry.at("sizes"));
    if (entry.contains("refused")) {
      EXPECT_THROW(validate(given, kEmpty), ConfigError);
      continue;
    }
    ++accepted;
    const auto config = resolved(given, kEmpty);
    EXPECT_EQ(Json(config.dp_dim_names()), entry.at("dp_dim_names"));
    EXPECT_EQ(Json(config.non_dp_dim_names()), entry.at("non_dp_dim_names"));
    EXPECT_EQ(Json(config.dp_shard_cp_dim_names()), entry.at("dp_shard_cp_dim_names"));
    EXPECT_EQ(Json(config.dp_cp_dim_names()), entry.at("dp_cp_dim_names"));
    EXPECT_EQ(Json(config.fsdp_dim_names()), entry.at("fsdp_dim_names"));
    EXPECT_EQ(Json(config.active_mesh_dims()), entry.at("active_mesh_dims"));
    EXPECT_EQ(Json(config.total_size()), entry.at("total_size"));
    EXPECT_EQ(Json(config.data_parallel_size()), entry.at("data_parallel_size"));
    EXPECT_EQ(Json(config.non_data_parallel_size()), entry.at("non_data_parallel_size"));
    const auto mesh = config.mesh();
    const Json names_and_shape = mesh ? Json::array({mesh->names(), mesh->shape()}) : Json::array();
    EXPECT_EQ(names_and_shape, entry.at("mesh"));
  }
  EXPECT_GT(accepted, 80U);
}

TEST(ParallelismConfig, ItsMeshStandsAsTorchsDeviceMesh) {
  for (const auto& entry : reference().at("meshes")) {
    SCOPED_TRACE(entry.dump());
    const auto mesh = config_of(entry.at("sizes")).mesh().value();
    const auto rank = entry.at("rank").get<std::int64_t>();
    EXPECT_EQ(Json(mesh.shape()), entry.at("shape"));
    EXPECT_EQ(Json(mesh.names()), entry.at("names"));
    EXPECT_EQ(Json(mesh.coordinates(rank)), entry.at("coordinates"));
    for (const auto& [name, group] : entry.at("dimensions").items()) {
      EXPECT_EQ(Json(mesh.members(name, rank)), group.at("members")) << name;
      EXPECT_EQ(Json(mesh.local_rank(name, rank)), group.at("local_rank")) << name;
      EXPECT_EQ(mesh.size(name), static_cast<std::int64_t>(group.at("members").size())) << name;
    }
  }
}

TEST(ParallelismConfig, SequenceParallelismIsADimensionOfTheMesh) {
  const ParallelismConfig config{.dp_replicate_size = 2, .sp_size = 2};
  const auto mesh = resolved(config, kEmpty).mesh().value();
  EXPECT_EQ(mesh.names(), (std::vector<std::string>{"dp_replicate", "sp"}));
  EXPECT_EQ(mesh.members("sp", 3), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(mesh.members("dp_sp", 0), (std::vector<std::int64_t>{0, 1, 2, 3}));
}

TEST(ParallelismConfig, APipelineIsTheOutermostDimension) {
  const ParallelismConfig config{.dp_shard_size = 2, .tp_size = 2, .pp_size = 2};
  EXPECT_EQ(config.total_size(), 8);
  EXPECT_EQ(config.data_parallel_size(), 2);
  EXPECT_EQ(config.non_data_parallel_size(), 4);
  EXPECT_EQ(config.non_dp_dim_names(), (std::vector<std::string>{"tp", "pp"}));
  const auto mesh = config.mesh().value();
  EXPECT_EQ(mesh.names(), (std::vector<std::string>{"pp", "dp_shard", "tp"}));
  EXPECT_EQ(mesh.members("pp", 5), (std::vector<std::int64_t>{1, 5}));
  EXPECT_EQ(mesh.members("dp", 5), (std::vector<std::int64_t>{5, 7}));
  EXPECT_EQ(message_of([&] {
              static_cast<void>(validated_for(config, {.num_processes = 4, .distributed = true}));
            }),
            "The sizes of the ParallelismConfig multiply to 8 (pp_size 2, dp_replicate_size 1, "
            "dp_shard_size 2, cp_size 1, sp_size 1, tp_size 2), but the run has 4 processes.");
}

TEST(ParallelismConfig, WithoutDimensionsThereIsNoMesh) {
  EXPECT_EQ(ParallelismConfig{}.mesh(), std::nullopt);
  EXPECT_EQ(ParallelismConfig{}.total_size(), 1);
}

TEST(ParallelismConfig, AllSizesCanComeFromTheEnvironment) {
  const auto environment = Environment({{"PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2"},
                                        {"PARALLELISM_CONFIG_DP_SHARD_SIZE", "3"},
                                        {"PARALLELISM_CONFIG_TP_SIZE", "4"},
                                        {"PARALLELISM_CONFIG_CP_SIZE", "5"},
                                        {"PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall"}});
  const auto config = resolved(ParallelismConfig{.tp_size = 2}, environment);
  EXPECT_EQ(config.dp_replicate_size, 2);
  EXPECT_EQ(config.dp_shard_size, 3);
  EXPECT_EQ(config.tp_size, 2);
  EXPECT_EQ(config.cp_size, 5);
  EXPECT_EQ(config.sp_size, 1);
  EXPECT_EQ(config.cp_backend, "torch");
  EXPECT_EQ(config.sp_backend, "deepspeed");
  EXPECT_EQ(config.tp_handler, TorchTensorParallelConfig{});
  EXPECT_EQ(config.cp_handler.value().cp_comm_strategy, "alltoall");
  EXPECT_EQ(config.sp_handler, std::nullopt);
}

TEST(ParallelismConfig, ChecksItsSizesInOrder) {
  const auto refused = [](const ParallelismConfig& config) {
    return message_of([&] { validate(config, kEmpty); });
  };
  EXPECT_EQ(refused({.dp_replicate_size = 0, .tp_size = 0}),
            "dp_replicate_size is 0, but it must be at least 1.");
  EXPECT_EQ(refused({.tp_size = -1}), "tp_size is -1, but it must be at least 1.");
  EXPECT_EQ(refused({.cp_backend = "ring"}), "cp_backend is 'ring'. Choose one of: torch.");
  EXPECT_EQ(refused({.sp_backend = "torch"}), "sp_backend is 'torch'. Choose one of: deepspeed.");
  EXPECT_EQ(refused({.cp_size = 2, .sp_size = 4}),
            "cp_size is 2 and sp_size is 4: context and sequence parallelism exclude each other. "
            "Set one of them to 1.");
  EXPECT_EQ(refused({.dp_replicate_size = 2, .tp_size = 2}),
            "tp_size is 2 and cp_size is 1, which do not go with pure replication "
            "(dp_replicate_size 2, dp_shard_size 1). Set dp_shard_size above 1.");
  EXPECT_NO_THROW(validate(ParallelismConfig{.dp_replicate_size = 2, .sp_size = 2}, kEmpty));
}

TEST(ParallelismConfig, MustFillTheRun) {
  const ParallelismConfig config{.dp_shard_size = 2, .tp_size = 2};
  EXPECT_EQ(validated_for(config, {.num_processes = 4, .distributed = true}), config);
  EXPECT_EQ(
      message_of([&] {
        static_cast<void>(validated_for(config, {.num_processes = 8, .distributed = true}));
      }),
      "The sizes of the ParallelismConfig multiply to 4 (dp_replicate_size 1, dp_shard_size 2, "
      "cp_size 1, sp_size 1, tp_size 2), but the run has 8 processes.");
  // Python does not look when sequence parallelism is on.
  EXPECT_THROW(
      static_cast<void>(validated_for({.sp_size = 2}, {.num_processes = 4, .distributed = true})),
      ConfigError);
}

TEST(ParallelismConfig, WithoutSizesReplicatesOverAllProcesses) {
  const auto config = validated_for({}, {.num_processes = 4, .distributed = true});
  EXPECT_EQ(config.dp_replicate_size, 4);
  EXPECT_EQ(config.total_size(), 4);
  EXPECT_EQ(validated_for({}, {.num_processes = 1, .distributed = false}), ParallelismConfig{});
}

TEST(ParallelismConfig, ContextParallelismNeedsShardingOfVersionTwo) {
  const ParallelismConfig config{.cp_size = 2};
  ParallelismFacts facts{.num_processes = 2, .distributed = true};
  const auto refused = [&] {
    return message_of([&] { static_cast<void>(validated_for(config, facts)); });
  };
  EXPECT_NE(refused().find("there is no fsdp_plugin"), std::string::npos);
  facts.fsdp_version = 1;
  EXPECT_EQ(refused(),
            "cp_size is 2, which needs fsdp_version 2, but the fsdp_plugin is of version 1.");
  facts.fsdp_version = 2;
  EXPECT_NO_THROW(static_cast<void>(validated_for(config, facts)));
  facts = {.num_processes = 2, .distributed = true, .allow_cp_standalone = true};
  EXPECT_NO_THROW(static_cast<void>(validated_for(config, facts)));
}

TEST(ParallelismConfig, GoesToJsonAndBack) {
  const auto config =
      resolved(ParallelismConfig{.dp_shard_size = 2,
                                 .sp_size = 2,
                                 .sp_handler =
                                     DeepSpeedSequenceParallelConfig{
                                         .sp_seq_length = 128, .sp_seq_length_is_variable = false}},
               kEmpty);
  EXPECT_EQ(ParallelismConfig::from_json(config.to_json()), config);
  EXPECT_EQ(ParallelismConfig::from_json(ParallelismConfig{}.to_json()), ParallelismConfig{});
  EXPECT_EQ(message_of([] { static_cast<void>(ParallelismConfig::from_json(R"({"tp": 2})")); }),
            "The parallelism configuration has the unknown key 'tp'. Choose among: "
            "dp_replicate_size, dp_shard_size, tp_size, cp_size, cp_backend, sp_size, sp_backend, "
            "tp_handler, cp_handler, sp_handler, pp_size.");
  const auto wrong = [] { static_cast<void>(ParallelismConfig::from_json(R"({"tp_size": "2"})")); };
  EXPECT_NE(
      message_of(wrong).find(R"(The parallelism configuration {"tp_size": "2"} does not fit)"),
      std::string::npos);
}

TEST(ParallelismConfig, NamesAMisspeltKeyOfAHandler) {
  const auto refused = [](const char* text) {
    return message_of([&] { static_cast<void>(ParallelismConfig::from_json(text)); });
  };
  EXPECT_EQ(refused(R"({"cp_size": 2, "cp_handler": {"cp_comm_stratgy": "alltoall"}})"),
            "The parallelism configuration's cp_handler has the unknown key 'cp_comm_stratgy'. "
            "Choose among: cp_comm_strategy.");
  EXPECT_NE(refused(R"({"tp_handler": {"async": true}})").find("enable_async_tp"),
            std::string::npos);
  EXPECT_NE(refused(R"({"sp_handler": {"seq_length": 8}})").find("sp_seq_length"),
            std::string::npos);
}

TEST(ParallelismConfig, RefusesSizesWhoseProductNoNumberHolds) {
  const ParallelismConfig config{.dp_replicate_size = std::int64_t{1} << 32,
                                 .dp_shard_size = std::int64_t{1} << 32};
  const std::string message =
      "The sizes of the ParallelismConfig (dp_replicate_size 4294967296, dp_shard_size 4294967296, "
      "cp_size 1, sp_size 1, tp_size 1) multiply to a number beyond 64 bits. Together they must be "
      "the number of processes.";
  EXPECT_EQ(message_of([&] { static_cast<void>(config.total_size()); }), message);
  EXPECT_EQ(message_of([&] { static_cast<void>(config.data_parallel_size()); }), message);
  EXPECT_EQ(config.non_data_parallel_size(), 1);
  EXPECT_EQ(message_of([&] { validate(config, kEmpty); }), message);
  std::ostringstream out;
  out << config;
  EXPECT_TRUE(out.str().ends_with("total_size=beyond 64 bits)")) << out.str();
}

TEST(ParallelismConfig, IsWrittenWithItsFieldsAndItsTotal) {
  std::ostringstream out;
  out << ParallelismConfig{.dp_shard_size = 4, .tp_size = 2};
  EXPECT_EQ(out.str(),
            "ParallelismConfig(dp_replicate_size=None, dp_shard_size=4, tp_size=2, cp_size=None, "
            "cp_backend=None, sp_size=None, sp_backend=None, tp_handler=None, cp_handler=None, "
            "sp_handler=None, pp_size=None, total_size=8)");
}

TEST(ParallelismConfig, TakesTheDeprecatedTensorParallelPlugin) {
  EXPECT_EQ(to_parallelism_config({.tp_size = 4}), ParallelismConfig{.tp_size = 4});
  detail::Warnings warnings;
  static_cast<void>(detail::resolve(TorchTensorParallelPlugin{.tp_size = 4}, kEmpty, warnings));
  EXPECT_EQ(warnings, detail::Warnings{"TorchTensorParallelPlugin is deprecated. Use "
                                       "ParallelismConfig with tp_size instead."});
}

TEST(ParallelismConfig, AttentionKernelsThatLibTorchLacksAreRecordedAndRefused) {
  const auto attention = [](const char* name) {
    return resolved(
        ParallelismConfig{
            .sp_size = 2,
            .sp_handler = DeepSpeedSequenceParallelConfig{.sp_attn_implementation = name}},
        kEmpty);
  };
  EXPECT_NO_THROW(detail::require_supported(attention("sdpa")));
  EXPECT_NO_THROW(detail::require_supported(attention("flash_attention_2")));
  EXPECT_THROW(detail::require_supported(attention("flash_attention_3")), UnsupportedError);
  EXPECT_THROW(detail::require_supported(attention("kernels-community/flash-attn3")),
               UnsupportedError);
}

TEST(MeshLayout, PlacesRanksRowByRow) {
  MeshLayout mesh({"dp_replicate", "dp_shard", "tp"}, {2, 2, 2});
  mesh.flatten("dp", {"dp_replicate", "dp_shard"});
  EXPECT_EQ(mesh.coordinates(5), (std::vector<std::int64_t>{1, 0, 1}));
  EXPECT_EQ(mesh.members("tp", 5), (std::vector<std::int64_t>{4, 5}));
  EXPECT_EQ(mesh.members("dp_shard", 5), (std::vector<std::int64_t>{5, 7}));
  EXPECT_EQ(mesh.members("dp_replicate", 5), (std::vector<std::int64_t>{1, 5}));
  EXPECT_EQ(mesh.members("dp", 5), (std::vector<std::int64_t>{1, 3, 5, 7}));
  EXPECT_EQ(mesh.local_rank("dp", 5), 2);
  EXPECT_EQ(mesh.flattened_names(), std::vector<std::string>{"dp"});
}

TEST(MeshLayout, FlattensDimensionsThatAreNotNeighbours) {
  MeshLayout mesh({"a", "b", "c"}, {2, 3, 2});
  mesh.flatten("ac", {"a", "c"});
  EXPECT_EQ(mesh.members("ac", 9), (std::vector<std::int64_t>{2, 3, 8, 9}));
  EXPECT_EQ(mesh.local_rank("ac", 9), 3);
}

TEST(MeshLayout, ListsTheGroupsOfADimensionByTheirFirstRank) {
  const MeshLayout mesh({"dp", "tp"}, {2, 3});
  EXPECT_EQ(mesh.groups("tp"), (std::vector<std::vector<std::int64_t>>{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(mesh.groups("dp"), (std::vector<std::vector<std::int64_t>>{{0, 3}, {1, 4}, {2, 5}}));
}

TEST(MeshLayout, RefusesUnknownNamesAndRanksAndShapes) {
  MeshLayout mesh({"dp", "tp"}, {2, 3});
  EXPECT_EQ(message_of<ArgumentError>([&] { static_cast<void>(mesh.size("cp")); }),
            "The mesh has no dimension 'cp'. It has: dp, tp.");
  EXPECT_EQ(message_of<ArgumentError>([&] { static_cast<void>(mesh.coordinates(6)); }),
            "Rank 6 is not in a mesh of 6 ranks.");
  EXPECT_EQ(message_of<ArgumentError>([&] { mesh.flatten("all", {"tp", "dp"}); }),
            "The dimensions (tp, dp) cannot be flattened into 'all': they must be of the mesh (dp, "
            "tp), and in its order.");
  EXPECT_THROW(mesh.flatten("tp", {"dp"}), ArgumentError);
  EXPECT_THROW(MeshLayout({"dp"}, {2, 2}), ArgumentError);
  EXPECT_THROW(MeshLayout({"dp"}, {0}), ArgumentError);
}

}  // namespace
}  // namespace accelerate
