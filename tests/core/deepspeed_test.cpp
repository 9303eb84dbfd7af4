// DeepSpeed configurations: keys, batch sizes, the last round of "auto", the loss scale.
#include <gtest/gtest.h>

#include "core/deepspeed_auto.h"
#include "core/deepspeed_settings.h"
#include "core/json.h"
#include "core/loss_scale.h"
#include "records_support.h"

namespace accelerate {
namespace {

using detail::deepspeed_settings;
using detail::DeepSpeedLossScale;
using detail::DeepSpeedObjects;
using detail::DeepSpeedSettings;
using detail::GivenObject;
using detail::json_loads;
using testing::Json;
using testing::message_of;
using testing::to_json;

Value::Dict tree_of(const Json& json) { return json_loads(json.dump()).as_dict(); }

DeepSpeedSettings settings_of(const std::string& text) {
  return deepspeed_settings(json_loads(text).as_dict());
}

// ---- keys ---------------------------------------------------------------------------------------

TEST(DeepSpeedKeys, EveryKeyThatIsHonouredIsRead) {
  const auto settings = settings_of(R"({
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5, "communication_data_type": "fp32", "prescale_gradients": true,
    "seq_parallel_communication_data_type": "bf16", "gradient_predivide_factor": 2.0,
    "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false,
    "steps_per_print": 100, "dump_state": true,
    "fp16": {"enabled": "true", "auto_cast": true, "loss_scale": 0, "initial_scale_power": 8,
             "loss_scale_window": 7, "hysteresis": 3, "consecutive_hysteresis": true,
             "min_loss_scale": 2},
    "bf16": {"enabled": false, "check_grad_overflow": true},
    "zero_optimization": {
      "stage": 3, "reduce_bucket_size": 2e8, "allgather_bucket_size": 300, "overlap_comm": false,
      "contiguous_gradients": false, "reduce_scatter": false, "stage3_prefetch_bucket_size": 1e3,
      "stage3_param_persistence_threshold": 17, "stage3_max_live_parameters": 18,
      "stage3_max_reuse_distance": 19, "sub_group_size": 1e9, "ignore_unused_parameters": true,
      "stage3_gather_16bit_weights_on_model_save": true, "round_robin_gradients": true,
      "offload_optimizer": {"device": "nvme", "nvme_path": "/o", "pin_memory": true,
                            "buffer_count": 6, "pipeline_read": true, "pipeline_write": true,
                            "ratio": 1.0},
      "offload_param": {"device": "cpu", "nvme_path": null, "pin_memory": true, "buffer_count": 7,
                        "buffer_size": 1e8, "max_in_cpu": 1e9}},
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}})");
  EXPECT_EQ(settings.train_batch_size, 32);
  EXPECT_EQ(settings.micro_batch_size, 4);
  EXPECT_EQ(settings.accumulation_steps, 2);
  EXPECT_EQ(settings.gradient_clipping, 0.5);
  EXPECT_EQ(settings.communication_data_type, "fp32");
  EXPECT_TRUE(settings.fp16);
  EXPECT_EQ(settings.initial_scale_power, 8);
  EXPECT_EQ(settings.loss_scale_window, 7);
  EXPECT_EQ(settings.hysteresis, 3);
  EXPECT_TRUE(settings.consecutive_hysteresis);
  EXPECT_EQ(settings.min_loss_scale, 2);
  EXPECT_FALSE(settings.bf16);
  EXPECT_TRUE(settings.check_grad_overflow);
  EXPECT_EQ(settings.stage, 3);
  EXPECT_EQ(settings.reduce_bucket_size, 200'000'000);  // written as 2e8
  EXPECT_EQ(settings.prefetch_bucket_size, 1000);
  EXPECT_EQ(settings.param_persistence_threshold, 17);
  EXPECT_EQ(settings.sub_group_size, 1'000'000'000);
  EXPECT_TRUE(settings.gather_16bit_weights);
  EXPECT_EQ(settings.optimizer_device, "nvme");
  EXPECT_EQ(settings.optimizer_path, "/o");
  EXPECT_EQ(settings.optimizer_buffer_count, 6);
  EXPECT_EQ(settings.param_device, "cpu");
  EXPECT_EQ(settings.param_path, std::nullopt);
  EXPECT_FALSE(settings.force_cpu_optimizer);
  EXPECT_EQ(settings.optimizer_params, (Value::Dict{{"lr", 0.1}}));
  EXPECT_EQ(settings.scheduler_type, "WarmupLR");
}

TEST(DeepSpeedKeys, KeysThatAreMappedSaySo) {
  EXPECT_EQ(settings_of("{}").notes, detail::Warnings{});
  const auto notes = settings_of(R"({"wall_clock_breakdown": true, "zero_optimization": {
      "stage": 3, "stage3_param_persistence_threshold": 100, "zero_hpz_partition_size": 8}})")
                         .notes;
  EXPECT_EQ(
      notes,
      (detail::Warnings{
          "'zero_optimization.stage3_param_persistence_threshold' of the DeepSpeed "
          "configuration: parameters with fewer elements stay gathered.",
          "'zero_optimization.zero_hpz_partition_size' of the DeepSpeed configuration: it is the "
          "number of processes of a shard group.",
          "'wall_clock_breakdown' of the DeepSpeed configuration: it prints nothing here; "
          "`accelerate monitor` shows the times of steps."}));
}

TEST(DeepSpeedKeys, SwitchesWithOnePositionHereAreToldOrRefused) {
  const auto switched = [](const std::string& key, const char* position) {
    return settings_of("{\"zero_optimization\": {\"" + key + "\": " + position + "}}");
  };
  EXPECT_EQ(switched("contiguous_gradients", "true").notes, detail::Warnings{});
  EXPECT_EQ(switched("contiguous_gradients", "false").notes,
            (detail::Warnings{"'zero_optimization.contiguous_gradients' of the DeepSpeed "
                              "configuration is false: gradients are copied into one buffer all "
                              "the same."}));
  EXPECT_EQ(switched("reduce_scatter", "false").notes.size(), 1u);
  EXPECT_EQ(message_of([&] { static_cast<void>(switched("ignore_unused_parameters", "false")); }),
            "'zero_optimization.ignore_unused_parameters' in the DeepSpeed configuration is false, "
            "but must be true: parameters that a loss does not reach count as zeros.");
  EXPECT_EQ(
      message_of([] { static_cast<void>(settings_of(R"({"gradient_predivide_factor": 0})")); }),
      "'gradient_predivide_factor' in the DeepSpeed configuration is 0, but must be more than "
      "0.");
}

TEST(DeepSpeedKeys, EveryKeyThatIsRefusedIsNamedUnlessItIsOff) {
  for (const std::string key : {"amp",
                                "torch_autocast",
                                "sparse_gradients",
                                "sparse_attention",
                                "progressive_layer_drop",
                                "curriculum_learning",
                                "data_efficiency",
                                "compression_training",
                                "eigenvalue",
                                "elasticity",
                                "msamp",
                                "autotuning",
                                "flops_profiler",
                                "zenflow",
                                "super_offload",
                                "moe",
                                "activation_checkpointing",
                                "tensorboard",
                                "wandb",
                                "comet",
                                "csv_monitor",
                                "comms_logger",
                                "data_types",
                                "checkpoint",
                                "nebula",
                                "hybrid_engine",
                                "compile"}) {
    EXPECT_NE(message_of<UnsupportedError>([&] {
                static_cast<void>(settings_of("{\"" + key + "\": {\"enabled\": true}}"));
              }).find("'" + key + "' in the DeepSpeed configuration is not supported"),
              std::string::npos);
    EXPECT_NO_THROW(static_cast<void>(settings_of("{\"" + key + "\": {\"enabled\": false}}")));
  }
  for (const std::string key : {"memory_breakdown", "dataloader_drop_last"}) {
    EXPECT_THROW(static_cast<void>(settings_of("{\"" + key + "\": true}")), UnsupportedError);
    EXPECT_NO_THROW(static_cast<void>(settings_of("{\"" + key + "\": false}")));
  }
  for (const std::string key : {"zero_quantized_weights", "zero_quantized_gradients",
                                "zero_quantized_nontrainable_weights", "zeropp_loco_param"}) {
    EXPECT_THROW(static_cast<void>(settings_of("{\"zero_optimization\": {\"" + key + "\": true}}")),
                 UnsupportedError);
  }
}

TEST(DeepSpeedKeys, WhatIsRefusedSaysWhatToUseInstead) {
  const auto message = [](const std::string& text) {
    return message_of<UnsupportedError>([&] { static_cast<void>(settings_of(text)); });
  };
  EXPECT_EQ(message(R"({"activation_checkpointing": {"partition_activations": true}})"),
            "'activation_checkpointing' in the DeepSpeed configuration is not supported: blocks "
            "are computed again where the model says it. Call activation_checkpoint() around "
            "them.");
  EXPECT_NE(message(R"({"wandb": {"enabled": true}})").find("Set log_with"), std::string::npos);
  EXPECT_NE(message(R"({"flops_profiler": {"enabled": true}})").find("accelerator.profile()"),
            std::string::npos);
  EXPECT_NE(message(R"({"zero_optimization": {"cpu_offload": true}})").find("offload_optimizer"),
            std::string::npos);
  EXPECT_NE(message(R"({"fp16": {"fp16_master_weights_and_grads": true}})").find("float32"),
            std::string::npos);
  // A section that asks for nothing passes.
  EXPECT_NO_THROW(static_cast<void>(settings_of(
      R"({"activation_checkpointing": {"partition_activations": false,
                                       "number_checkpoints": null}})")));
}

TEST(DeepSpeedKeys, KeysForSpeedAloneAreToldInTheLog) {
  const auto notes = settings_of(R"({"aio": {"queue_depth": 8}, "zero_optimization": {
      "elastic_checkpoint": true, "load_from_fp32_weights": false,
      "memory_efficient_linear": false, "stage3_model_persistence_threshold": 1e5}})")
                         .notes;
  EXPECT_EQ(notes.size(), 5U);
  const auto more = settings_of(R"({"disable_allgather": false,
      "bf16": {"immediate_grad_update": true},
      "pipeline": {"stages": "auto", "partition": "best", "seed_layers": false},
      "zero_optimization": {"offload_optimizer": {"fast_init": false},
        "stage3_use_all_reduce_for_fetch_params": true, "mics_hierarchical_params_gather": true,
        "stage3_module_granularity_threshold": 1000, "log_trace_cache_warnings": true,
        "use_multi_rank_bucket_allreduce": false, "enable_sanity_checks": true}})")
                        .notes;
  EXPECT_EQ(more.size(), 10U);
}

TEST(DeepSpeedKeys, AnUnknownKeyIsAnErrorWithTheNearestOne) {
  const auto message = [](const std::string& text) {
    return message_of([&] { static_cast<void>(settings_of(text)); });
  };
  EXPECT_EQ(message(R"({"gradient_cliping": 1.0})"),
            "'gradient_cliping' in the DeepSpeed configuration is not known here. Did you mean "
            "'gradient_clipping'? Remove it, or correct its name.");
  EXPECT_EQ(message(R"({"zero_optimization": {"stage": 2, "stage3_max_live_parameter": 3}})"),
            "'zero_optimization.stage3_max_live_parameter' in the DeepSpeed configuration is not "
            "known here. Did you mean 'zero_optimization.stage3_max_live_parameters'? Remove it, "
            "or correct its name.");
  EXPECT_EQ(message(R"({"galaxy": {"enabled": true}})"),
            "'galaxy' in the DeepSpeed configuration is not known here. Remove it, or correct its "
            "name.");
}

TEST(DeepSpeedKeys, ValuesOfAWrongKindAreNamed) {
  const auto message = [](const std::string& text) {
    return message_of([&] { static_cast<void>(settings_of(text)); });
  };
  EXPECT_EQ(message(R"({"fp16": true})"),
            "'fp16' in the DeepSpeed configuration is True, but must be a section: {...}.");
  EXPECT_EQ(
      message(R"({"train_batch_size": 2.5})"),
      "'train_batch_size' in the DeepSpeed configuration is 2.5, but must be a whole number.");
  EXPECT_EQ(message(R"({"bf16": {"enabled": 1}})"),
            "'bf16.enabled' in the DeepSpeed configuration is 1, but must be true or false.");
  EXPECT_EQ(message(R"({"gradient_clipping": "auto"})"),
            "'gradient_clipping' is 'auto' in the DeepSpeed configuration, and nothing here tells "
            "its value. Set it in the configuration.");
  EXPECT_EQ(message(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"),
            "The DeepSpeed configuration enables both fp16 and bf16. Choose one.");
  EXPECT_EQ(message(R"({"zero_optimization": {"stage": 4}})"),
            "'zero_optimization.stage' in the DeepSpeed configuration is 4, but must be 0, 1, 2 or "
            "3.");
  EXPECT_EQ(
      message(R"({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}})"),
      "'zero_optimization.offload_optimizer.ratio' in the DeepSpeed configuration is 0.5, but "
      "must be 1: all of the optimizer is moved.");
  EXPECT_EQ(message(R"({"tensor_parallel": {"autotp_size": 2}})"),
            "'tensor_parallel.autotp_size' in the DeepSpeed configuration is 2, but must be 0: "
            "models are not split by tensor parallelism on their own.");
}

// ---- batch sizes --------------------------------------------------------------------------------

TEST(DeepSpeedBatchSizes, TheMissingOnesFollowFromTheOthers) {
  struct Case {
    std::optional<std::int64_t> train, micro, steps;
    std::int64_t all[3];
  };
  const Case cases[] = {{{}, 4, 2, {16, 4, 2}},   {16, {}, 2, {16, 4, 2}}, {16, 4, {}, {16, 4, 2}},
                        {16, {}, {}, {16, 8, 1}}, {{}, 4, {}, {8, 4, 1}},  {16, 4, 2, {16, 4, 2}}};
  for (const auto& [train, micro, steps, all] : cases) {
    DeepSpeedSettings settings{
        .train_batch_size = train, .micro_batch_size = micro, .accumulation_steps = steps};
    detail::derive_batch_sizes(settings, 2);
    EXPECT_EQ(settings.train_batch_size, all[0]);
    EXPECT_EQ(settings.micro_batch_size, all[1]);
    EXPECT_EQ(settings.accumulation_steps, all[2]);
  }
}

TEST(DeepSpeedBatchSizes, WhatDoesNotFitIsRefused) {
  DeepSpeedSettings none{.accumulation_steps = 2};
  EXPECT_THROW(detail::derive_batch_sizes(none, 2), ConfigError);
  DeepSpeedSettings wrong{.train_batch_size = 17, .micro_batch_size = 4, .accumulation_steps = 2};
  EXPECT_EQ(message_of([&] { detail::derive_batch_sizes(wrong, 2); }),
            "The batch sizes of the DeepSpeed configuration do not fit: train_batch_size is 17, "
            "but train_micro_batch_size_per_gpu * gradient_accumulation_steps * processes is 4 * 2 "
            "* 2. Set one of them to 'auto'.");
  DeepSpeedSettings rest{.train_batch_size = 9, .micro_batch_size = 4};
  EXPECT_THROW(detail::derive_batch_sizes(rest, 2), ConfigError);
}

// ---- "auto" -------------------------------------------------------------------------------------

GivenObject given(const Json& objects, const char* name) {
  const auto text = objects.value(name, "");
  return text == "real"    ? GivenObject::kReal
         : text == "dummy" ? GivenObject::kDummy
                           : GivenObject::kNone;
}

DeepSpeedObjects objects_of(const Json& json) {
  DeepSpeedObjects objects{.has_model = true};
  for (const auto& size : json.value("batch_sizes", Json::array())) {
    objects.batch_sizes.push_back(size.is_null() ? std::nullopt
                                                 : std::optional(size.get<std::int64_t>()));
  }
  objects.split_batches = json.value("split_batches", false);
  objects.num_processes = json.value("num_processes", 1);
  objects.gradient_accumulation_steps = json.value("gradient_accumulation_steps", 1);
  if (json.contains("hidden_sizes")) {
    objects.hidden_sizes = json["hidden_sizes"].get<std::vector<std::int64_t>>();
  }
  objects.optimizer = given(json, "optimizer");
  objects.lr = json.value("lr", 0.001);
  objects.weight_decay = json.value("weight_decay", 0.0);
  objects.scheduler = given(json, "scheduler");
  objects.has_scheduler_callable = json.value("callable", false);
  objects.scheduler_lr = objects.lr;
  objects.warmup_num_steps = json.value("warmup_num_steps", 0);
  if (json.contains("total_num_steps")) {
    objects.total_num_steps = json["total_num_steps"].get<std::int64_t>();
  }
  return objects;
}

TEST(DeepSpeedAuto, IsFilledAsInPython) {
  const auto reference =
      Json::parse(test::read_file(test::reference_path("sharding/deepspeed.json")));
  for (const auto& [name, entry] : reference.items()) {
    SCOPED_TRACE(name);
    auto plugin = resolved(DeepSpeedPlugin{.hf_ds_config = tree_of(entry["config"]),
                                           .is_train_batch_min = entry["is_train_batch_min"]},
                           Environment());
    detail::Warnings warnings;
    const auto fill = [&] {
      return detail::fill_deepspeed_config(plugin, objects_of(entry["objects"]), warnings);
    };
    const auto& expected = entry["result"];
    if (expected.contains("error")) {
      EXPECT_THROW(static_cast<void>(fill()), ConfigError);
      continue;
    }
    EXPECT_EQ(fill(), expected["gradient_accumulation_steps"].get<std::int64_t>());
    auto filled = plugin.deepspeed_config();
    filled.erase("steps_per_print");
    // Ints and floats of one value, and orders of keys, are the same here.
    EXPECT_EQ(nlohmann::json(to_json(filled)), nlohmann::json(expected["config"]));
    EXPECT_EQ(warnings.size(), name == "steps of the file" ? 1U : 0U);
  }
}

TEST(DeepSpeedAuto, ErrorsHavePythonsWords) {
  const auto reference =
      Json::parse(test::read_file(test::reference_path("sharding/deepspeed.json")));
  const auto message = [&](const char* name) {
    const auto& entry = reference.at(name);
    auto plugin =
        resolved(DeepSpeedPlugin{.hf_ds_config = tree_of(entry["config"])}, Environment());
    detail::Warnings warnings;
    return message_of([&] {
      static_cast<void>(
          detail::fill_deepspeed_config(plugin, objects_of(entry["objects"]), warnings));
    });
  };
  const std::pair<const char*, const char*> cases[] = {
      {"two optimizers", "You cannot specify an optimizer in the config file and in the code"},
      {"no optimizer", "You cannot create a `DummyOptim` without specifying an optimizer"},
      {"two schedulers", "You cannot specify a scheduler in the config file and in the code"},
      {"no scheduler", "Either specify a scheduler in the config file or pass in the"},
      {"real scheduler of a dummy", "You can only specify a DummyScheduler in the code when using"},
      {"no loader", "prepare was given no data loader with a batch size"},
      {"loader without a size", "At least one of the data loaders given to prepare has no batch"},
      {"no model that tells", "The model does not tell its hidden sizes"},
      {"no widths", "hidden_sizes() of the model is empty"},
      {"no total", "'scheduler.params.total_num_steps' is 'auto'"}};
  for (const auto& [name, words] : cases) {
    EXPECT_NE(message(name).find(words), std::string::npos) << message(name);
  }
}

// ---- loss scale ---------------------------------------------------------------------------------

DeepSpeedSettings scaling(std::int64_t window, std::int64_t hysteresis, bool consecutive = false) {
  return {.initial_scale_power = 4,
          .loss_scale_window = window,
          .hysteresis = hysteresis,
          .consecutive_hysteresis = consecutive};
}

TEST(DeepSpeedLossScale, DoublesAfterAWindowOfCleanIterations) {
  DeepSpeedLossScale scale(scaling(3, 2));
  std::vector<double> factors;
  for (int i = 0; i < 8; ++i) factors.push_back(scale.update(false));
  EXPECT_EQ(factors, (std::vector<double>{16, 16, 16, 32, 32, 32, 64, 64}));
}

TEST(DeepSpeedLossScale, OverflowsUseUpTheHysteresisFirst) {
  DeepSpeedLossScale scale(scaling(2, 2));
  EXPECT_EQ(scale.update(true), 16);  // one of two
  EXPECT_EQ(scale.update(true), 8);
  EXPECT_EQ(scale.update(true), 4);  // not refilled yet
  EXPECT_EQ(scale.update(false), 4);
  EXPECT_EQ(scale.update(false), 4);
  EXPECT_EQ(scale.update(false), 8);  // two clean ones before: doubles and refills
  EXPECT_EQ(scale.update(true), 8);
}

TEST(DeepSpeedLossScale, ConsecutiveHysteresisRefillsWithEachCleanIteration) {
  DeepSpeedLossScale scale(scaling(100, 2, /*consecutive=*/true));
  EXPECT_EQ(scale.update(true), 16);
  EXPECT_EQ(scale.update(false), 16);
  EXPECT_EQ(scale.update(true), 16);
  EXPECT_EQ(scale.update(true), 8);
}

TEST(DeepSpeedLossScale, StopsAtItsMinimumAndNeverChangesWhenStatic) {
  DeepSpeedLossScale scale(scaling(100, 1));
  for (const double next : {8, 4, 2, 1}) EXPECT_EQ(scale.update(true), next);
  EXPECT_NE(message_of<StateError>([&] {
              scale.update(true);
            }).find("Current loss scale already at minimum (1)"),
            std::string::npos);
  DeepSpeedLossScale fixed({.loss_scale = 128});
  EXPECT_EQ(fixed.update(true), 128);
  EXPECT_EQ(fixed.update(false), 128);
}

}  // namespace
}  // namespace accelerate
