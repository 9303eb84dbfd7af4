// Megatron-LM's arguments and schedule.
#include "accelerate/parallel/megatron.h"

#include <c10/util/Type.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <typeinfo>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"
#include "optim/optimizer_options.h"

namespace accelerate {

using detail::str;

MegatronLMArguments::MegatronLMArguments(MegatronLMPlugin plugin)
    : plugin_(std::move(plugin)), arguments_(plugin_.megatron_lm_default_args()) {}

void MegatronLMArguments::set_network_size_args(const torch::nn::Module& model) {
  throw UnsupportedError(str("set_network_size_args: ", model.name(),
                             " has no Transformers configuration, from which Python builds a model "
                             "of Megatron-LM's layers. Give prepare a Pipeline of your model."));
}

void MegatronLMArguments::set_tensorboard_logging_options() {
  throw UnsupportedError(
      "set_all_logging_options is for Megatron-LM's own writer of TensorBoard files, which is not "
      "used here. Use log_with and Accelerator::log.");
}

void MegatronLMArguments::set_mixed_precision(std::string_view mixed_precision) {
  if (mixed_precision == "fp16") arguments_.set("fp16", true);
  if (mixed_precision != "bf16") return;
  arguments_.set("bf16", true);
  arguments_.set("DDP_impl", "local");
}

void MegatronLMArguments::set_training_args(std::int64_t micro_batch_size, std::int64_t dp_degree) {
  arguments_.set("data_parallel_size", dp_degree);
  arguments_.set("micro_batch_size", micro_batch_size);
  arguments_.set("global_batch_size",
                 dp_degree * micro_batch_size * plugin_.num_micro_batches.value_or(1));
}

void MegatronLMArguments::set_optimizer_type(const torch::optim::Optimizer& optimizer) {
  const auto name = detail::to_lower(c10::demangle(typeid(optimizer).name()));
  const auto options = detail::optim::options_by_name(optimizer.defaults());
  const auto copy = [&](const char* to, const char* from) {
    if (const auto* value = options.get(from)) arguments_.set(to, *value);
  };
  if (name.find("adam") != std::string::npos) {
    arguments_.set("optimizer", "adam");
    if (const auto* betas = options.get("betas")) {
      arguments_.set("adam_beta1", betas->items()[0]);
      arguments_.set("adam_beta2", betas->items()[1]);
    }
    copy("adam_eps", "eps");
  } else if (name.find("sgd") != std::string::npos) {
    arguments_.set("optimizer", "sgd");
    copy("sgd_momentum", "momentum");
  } else {
    throw ArgumentError(
        str("Optimizer ", name, " is not supported by Megatron-LM. Use AdamW, Adam or SGD."));
  }
  copy("lr", "lr");
  copy("weight_decay", "weight_decay");
}

void MegatronLMArguments::set_scheduler_args(std::optional<std::int64_t> total_num_steps,
                                             std::int64_t warmup_num_steps) {
  const auto copies = arguments_.at("data_parallel_size").as_int();
  const auto ignored = [](const char* samples, const char* iters) {
    detail::warn(str("Ignoring `", samples, "` as `", iters, "` based on scheduler is being used ",
                     "for training."));
  };
  if (!plugin_.train_iters && total_num_steps) {
    plugin_.train_iters = *total_num_steps / copies;
    if (plugin_.train_samples) ignored("train_samples", "train_iters");
    plugin_.train_samples = std::nullopt;
  }
  if (!plugin_.lr_warmup_iters) {
    plugin_.lr_warmup_iters = warmup_num_steps / copies;
    if (plugin_.lr_warmup_samples) ignored("lr_warmup_samples", "lr_warmup_iters");
    plugin_.lr_warmup_samples = 0;
  }
  const auto set = [&](const char* name, const auto& value) {
    arguments_.set(name, value ? Value(*value) : Value());
  };
  set("train_iters", plugin_.train_iters);
  set("lr_warmup_iters", plugin_.lr_warmup_iters);
  set("train_samples", plugin_.train_samples);
  set("lr_warmup_samples", plugin_.lr_warmup_samples);
  set("lr_decay_iters", plugin_.lr_decay_iters);
  set("lr_decay_samples", plugin_.lr_decay_samples);
  set("lr_warmup_fraction", plugin_.lr_warmup_fraction);
  arguments_.set("lr_decay_style", plugin_.lr_decay_style);
  arguments_.set("weight_decay_incr_style", plugin_.weight_decay_incr_style);
  set("start_weight_decay", plugin_.start_weight_decay);
  set("end_weight_decay", plugin_.end_weight_decay);
  arguments_.set("min_lr", plugin_.min_lr);
}

// ---- the plugin's own functions -----------------------------------------------------------------

namespace {

/// Collects what `f(arguments)` sets.
template <class F>
void collect(MegatronLMPlugin& plugin, F&& f) {
  MegatronLMArguments arguments(plugin.collected_args.empty() ? resolved(plugin) : plugin);
  f(arguments);
  plugin.collected_args = arguments.megatron_lm_default_args();
}

}  // namespace

// Members, as in Python. NOLINTBEGIN(readability-convert-member-functions-to-static)
void MegatronLMPlugin::set_network_size_args(const torch::nn::Module& model) {
  MegatronLMArguments::set_network_size_args(model);
}

void MegatronLMPlugin::set_tensorboard_logging_options() {
  MegatronLMArguments::set_tensorboard_logging_options();
}
// NOLINTEND(readability-convert-member-functions-to-static)

void MegatronLMPlugin::set_mixed_precision(std::string_view mixed_precision) {
  collect(*this, [&](auto& arguments) { arguments.set_mixed_precision(mixed_precision); });
}

void MegatronLMPlugin::set_training_args(std::int64_t micro_batch_size, std::int64_t dp_degree) {
  collect(*this,
          [&](auto& arguments) { arguments.set_training_args(micro_batch_size, dp_degree); });
}

void MegatronLMPlugin::set_optimizer_type(const torch::optim::Optimizer& optimizer) {
  collect(*this, [&](auto& arguments) { arguments.set_optimizer_type(optimizer); });
}

void MegatronLMPlugin::set_scheduler_args(const MegatronLMDummyScheduler& scheduler) {
  collect(*this, [&](auto& arguments) {
    arguments.set_scheduler_args(scheduler.options().total_num_steps,
                                 scheduler.options().warmup_num_steps);
  });
}

// ---- schedule -----------------------------------------------------------------------------------

namespace {

/// From 0 to 1 on the way, in one of the two styles.
double way(const std::string& style, double ratio) {
  if (style == "cosine") return 0.5 * (std::cos(std::numbers::pi * (1 - ratio)) + 1);
  return ratio;
}

std::optional<std::int64_t> integer(const Value::Dict& arguments, const char* name) {
  const auto* value = arguments.get(name);
  return value == nullptr || value->is_none() ? std::nullopt : std::optional(value->as_int());
}

std::optional<double> number(const Value::Dict& arguments, const char* name) {
  const auto* value = arguments.get(name);
  return value == nullptr || value->is_none() ? std::nullopt : std::optional(value->as_double());
}

}  // namespace

MegatronLMSchedule MegatronLMSchedule::from(const Value::Dict& arguments) {
  const auto batch = std::max<std::int64_t>(arguments.at("global_batch_size").as_int(), 1);
  // Megatron-LM counts either in steps or in samples.
  const auto steps = [&](const char* iters, const char* samples) {
    auto found = integer(arguments, iters);
    if (const auto count = integer(arguments, samples); !found && count) found = *count / batch;
    return found;
  };
  MegatronLMSchedule schedule;
  schedule.lr_decay_style = arguments.at("lr_decay_style").as_string();
  schedule.min_lr = arguments.at("min_lr").as_double();
  const auto train = steps("train_iters", "train_samples");
  const auto decay = steps("lr_decay_iters", "lr_decay_samples");
  if (!train && !decay) {
    throw ConfigError(
        "The schedule of Megatron-LM needs the number of steps: give total_num_steps of "
        "MegatronLMDummyScheduler, or train_iters of the plugin.");
  }
  schedule.train_steps = std::max<std::int64_t>(train.value_or(decay.value_or(1)), 1);
  schedule.decay_steps = std::max<std::int64_t>(decay.value_or(schedule.train_steps), 1);
  schedule.warmup_steps = steps("lr_warmup_iters", "lr_warmup_samples").value_or(0);
  if (const auto fraction = number(arguments, "lr_warmup_fraction")) {
    schedule.warmup_steps =
        static_cast<std::int64_t>(*fraction * static_cast<double>(schedule.decay_steps));
  }
  schedule.weight_decay_incr_style = arguments.at("weight_decay_incr_style").as_string();
  schedule.start_weight_decay = number(arguments, "start_weight_decay");
  schedule.end_weight_decay = number(arguments, "end_weight_decay");
  const bool grows = schedule.weight_decay_incr_style != "constant";
  if (grows && (!schedule.start_weight_decay || !schedule.end_weight_decay)) {
    throw ConfigError(str("weight_decay_incr_style is '", schedule.weight_decay_incr_style,
                          "', which needs start_weight_decay and end_weight_decay."));
  }
  if (!grows && schedule.start_weight_decay != schedule.end_weight_decay) {
    throw ConfigError(
        "start_weight_decay and end_weight_decay differ, but weight_decay_incr_style is "
        "'constant'. Use 'linear' or 'cosine', or one value.");
  }
  return schedule;
}

double MegatronLMSchedule::lr(double max_lr, std::int64_t step) const {
  if (warmup_steps > 0 && step <= warmup_steps) {
    return max_lr * static_cast<double>(step) / static_cast<double>(warmup_steps);
  }
  if (lr_decay_style == "constant") return max_lr;
  if (step > decay_steps) return min_lr;
  const auto ratio = static_cast<double>(step - warmup_steps) /
                     static_cast<double>(std::max<std::int64_t>(decay_steps - warmup_steps, 1));
  return min_lr + (1 - way(lr_decay_style, ratio)) * (max_lr - min_lr);
}

std::optional<double> MegatronLMSchedule::weight_decay(std::int64_t step) const {
  if (!start_weight_decay || weight_decay_incr_style == "constant" || step > train_steps) {
    return end_weight_decay;
  }
  const auto ratio = static_cast<double>(step) / static_cast<double>(train_steps);
  return *start_weight_decay +
         way(weight_decay_incr_style, ratio) * (*end_weight_decay - *start_weight_decay);
}

MegatronLMDummyScheduler::MegatronLMDummyScheduler(torch::optim::Optimizer& optimizer,
                                                   MegatronLMDummySchedulerOptions options)
    : LRScheduler(optimizer), options_(options) {
  initialize();
}

void MegatronLMDummyScheduler::_follow(const MegatronLMSchedule& schedule) {
  schedule_ = schedule;
  set_group_lrs(get_lr());
  set_weight_decay();
}

std::vector<double> MegatronLMDummyScheduler::get_lr() {
  if (!schedule_) return group_lrs();
  std::vector<double> lrs;
  for (const auto base : base_lrs()) lrs.push_back(schedule_->lr(base, last_epoch()));
  return lrs;
}

void MegatronLMDummyScheduler::step() {
  LRScheduler::step();
  set_weight_decay();
}

void MegatronLMDummyScheduler::set_weight_decay() {
  if (!schedule_) return;
  const auto decay = schedule_->weight_decay(last_epoch());
  if (!decay) return;
  for (auto& group : optimizer().param_groups()) {
    detail::optim::update_options(group.options(), Value::Dict{{"weight_decay", *decay}});
  }
}

MegatronLMDummyDataLoader::MegatronLMDummyDataLoader(const Value::Dict& /*dataset_kwargs*/) {
  throw UnsupportedError(
      "MegatronLMDummyDataLoader: Megatron's indexed datasets are read by Python code. Give a data "
      "loader to prepare.");
}

}  // namespace accelerate
