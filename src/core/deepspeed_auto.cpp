#include "core/deepspeed_auto.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

constexpr std::string_view kMicroBatch = "train_micro_batch_size_per_gpu";

/// The batch size of a process: the smallest of all loaders, or the largest.
Value micro_batch_size(const DeepSpeedPlugin& plugin, const DeepSpeedObjects& objects) {
  if (!plugin.is_auto(kMicroBatch)) return plugin.get_value(kMicroBatch);
  if (objects.batch_sizes.empty()) {
    throw ConfigError(str("'", kMicroBatch, "' is 'auto' in the DeepSpeed configuration, and ",
                          "prepare was given no data loader with a batch size. Give it one, or ",
                          "set the number in the configuration."));
  }
  std::vector<std::int64_t> sizes;
  for (const auto& size : objects.batch_sizes) {
    if (!size) {
      throw ConfigError(str("At least one of the data loaders given to prepare has no batch size, ",
                            "and '", kMicroBatch, "' is 'auto' in the DeepSpeed configuration. ",
                            "Set the number in the configuration."));
    }
    sizes.push_back(objects.split_batches ? *size / objects.data_parallel_size() : *size);
  }
  return plugin.is_train_batch_min ? *std::ranges::min_element(sizes)
                                   : *std::ranges::max_element(sizes);
}

/// The sizes of buckets follow from the width of the model.
void add_sizes(Value::Dict& values, const DeepSpeedPlugin& plugin,
               const DeepSpeedObjects& objects) {
  static constexpr auto kKeys = std::to_array<std::string_view>(
      {"zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
       "zero_optimization.stage3_param_persistence_threshold"});
  std::vector<std::string_view> wanted;
  std::ranges::copy_if(kKeys, std::back_inserter(wanted),
                       [&](std::string_view key) { return plugin.is_auto(key); });
  if (wanted.empty()) return;
  const std::string reasoning =
      str("therefore it's not possible to automatically fill out the following `auto` entries in "
          "the DeepSpeed config file: ",
          join(wanted), ". Set a number for each of them.");
  if (!objects.hidden_sizes) {
    throw ConfigError(
        str("The model does not tell its hidden sizes (it is no HiddenSizes), ", reasoning));
  }
  if (objects.hidden_sizes->empty()) {
    throw ConfigError(str("hidden_sizes() of the model is empty, ", reasoning));
  }
  const std::int64_t width = *std::ranges::max_element(*objects.hidden_sizes);
  const auto square = static_cast<double>(width) * static_cast<double>(width);
  values.set(kKeys[0], width * width);
  values.set(kKeys[1], static_cast<std::int64_t>(0.9 * square));
  values.set(kKeys[2], 10 * width);
}

void add_scheduler(Value::Dict& values, const DeepSpeedObjects& objects) {
  if (objects.scheduler != GivenObject::kDummy || objects.has_scheduler_callable) return;
  values.set("scheduler.params.warmup_min_lr", 0);
  values.set("scheduler.params.warmup_max_lr", objects.scheduler_lr);
  values.set("scheduler.params.warmup_num_steps", objects.warmup_num_steps);
  if (!objects.total_num_steps) return;
  const auto parts = objects.split_batches ? 1 : objects.num_processes;
  values.set("scheduler.params.total_num_steps", (*objects.total_num_steps + parts - 1) / parts);
}

}  // namespace

void check_optimizer_and_scheduler(const DeepSpeedPlugin& plugin, const DeepSpeedObjects& objects) {
  const auto& tree = plugin.deepspeed_config();
  const bool dummy_optimizer = objects.optimizer == GivenObject::kDummy;
  if (tree.contains("optimizer") && objects.optimizer == GivenObject::kReal) {
    throw ConfigError(
        "You cannot specify an optimizer in the config file and in the code at the same time. "
        "Remove it from the DeepSpeed configuration, or give prepare a DummyOptim.");
  }
  if (!tree.contains("optimizer") && dummy_optimizer) {
    throw ConfigError(
        "You cannot create a `DummyOptim` without specifying an optimizer in the config file. Add "
        "'optimizer' to the DeepSpeed configuration, or give prepare an optimizer.");
  }
  if (tree.contains("scheduler") && objects.scheduler == GivenObject::kReal) {
    throw ConfigError(
        "You cannot specify a scheduler in the config file and in the code at the same time. "
        "Remove it from the DeepSpeed configuration, or give prepare a DummyScheduler.");
  }
  if (!tree.contains("scheduler") && objects.scheduler == GivenObject::kDummy &&
      !objects.has_scheduler_callable) {
    throw ConfigError(
        "Either specify a scheduler in the config file or pass in the `lr_scheduler_callable` "
        "parameter when using DummyScheduler.");
  }
  if (dummy_optimizer && objects.scheduler == GivenObject::kReal) {
    throw ConfigError(
        "You can only specify a DummyScheduler in the code when using `DummyOptim`: the optimizer "
        "of the DeepSpeed configuration is made by prepare.");
  }
}

std::int64_t fill_deepspeed_config(DeepSpeedPlugin& plugin, const DeepSpeedObjects& objects,
                                   Warnings& warnings) {
  const Value micro = micro_batch_size(plugin, objects);
  plugin.fill_match(
      "gradient_accumulation_steps",
      Value::Dict{{"gradient_accumulation_steps", objects.gradient_accumulation_steps}});
  const std::int64_t steps = plugin.get_value("gradient_accumulation_steps", 1).as_int();
  if (steps != objects.gradient_accumulation_steps) {
    warnings.push_back(str("Gradient accumulation steps mismatch: the accelerator has ",
                           objects.gradient_accumulation_steps, ", the DeepSpeed configuration ",
                           steps, ". Using the configuration's value."));
  }
  check_optimizer_and_scheduler(plugin, objects);
  if (objects.optimizer == GivenObject::kReal) {
    plugin.hf_ds_config->config().set("zero_allow_untested_optimizer", true);
  }
  if (!objects.has_model) return steps;

  Value::Dict values{{"gradient_clipping", 1.0},
                     {"zero_optimization.stage3_gather_16bit_weights_on_model_save", false}};
  if (!micro.is_none()) {
    values.set(kMicroBatch, micro);
    values.set("train_batch_size", micro.as_int() * steps * objects.data_parallel_size());
  }
  add_sizes(values, plugin, objects);
  if (objects.optimizer == GivenObject::kDummy) {
    values.set("optimizer.params.lr", objects.lr);
    values.set("optimizer.params.weight_decay", objects.weight_decay);
  }
  add_scheduler(values, objects);
  plugin.deepspeed_config_process(values, /*must_match=*/false);
  return steps;
}

}  // namespace accelerate::detail::inline core
