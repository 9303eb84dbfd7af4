// src/core/config_fields.h - the members of the configuration records under their names in files.
#pragma once

#include <string_view>
#include <vector>

#include "accelerate/config.h"

namespace accelerate::detail {

/// Calls `f(name, member)` for each member, in Python's order. `C` is the record or a const one.
template <class C, class F>
requires std::same_as<std::remove_const_t<C>, ClusterConfig>
void for_each_field(C& config, F&& f) {
  f("compute_environment", config.compute_environment);
  f("distributed_type", config.distributed_type);
  f("mixed_precision", config.mixed_precision);
  f("use_cpu", config.use_cpu);
  f("debug", config.debug);
  f("num_processes", config.num_processes);
  f("machine_rank", config.machine_rank);
  f("num_machines", config.num_machines);
  f("gpu_ids", config.gpu_ids);
  f("main_process_ip", config.main_process_ip);
  f("main_process_port", config.main_process_port);
  f("rdzv_backend", config.rdzv_backend);
  f("same_network", config.same_network);
  f("main_training_function", config.main_training_function);
  f("enable_cpu_affinity", config.enable_cpu_affinity);
  f("fp8_config", config.fp8_config);
  f("deepspeed_config", config.deepspeed_config);
  f("fsdp_config", config.fsdp_config);
  f("parallelism_config", config.parallelism_config);
  f("megatron_lm_config", config.megatron_lm_config);
  f("mpirun_config", config.mpirun_config);
  f("downcast_bf16", config.downcast_bf16);
  f("tpu_name", config.tpu_name);
  f("tpu_zone", config.tpu_zone);
  f("tpu_use_cluster", config.tpu_use_cluster);
  f("tpu_use_sudo", config.tpu_use_sudo);
  f("command_file", config.command_file);
  f("commands", config.commands);
  f("tpu_vm", config.tpu_vm);
  f("tpu_env", config.tpu_env);
  f("dynamo_config", config.dynamo_config);
}

template <class C, class F>
requires std::same_as<std::remove_const_t<C>, SageMakerConfig>
void for_each_field(C& config, F&& f) {
  f("compute_environment", config.compute_environment);
  f("distributed_type", config.distributed_type);
  f("mixed_precision", config.mixed_precision);
  f("use_cpu", config.use_cpu);
  f("debug", config.debug);
  f("ec2_instance_type", config.ec2_instance_type);
  f("iam_role_name", config.iam_role_name);
  f("image_uri", config.image_uri);
  f("profile", config.profile);
  f("region", config.region);
  f("num_machines", config.num_machines);
  f("gpu_ids", config.gpu_ids);
  f("base_job_name", config.base_job_name);
  f("pytorch_version", config.pytorch_version);
  f("transformers_version", config.transformers_version);
  f("py_version", config.py_version);
  f("sagemaker_inputs_file", config.sagemaker_inputs_file);
  f("sagemaker_metrics_file", config.sagemaker_metrics_file);
  f("additional_args", config.additional_args);
  f("dynamo_config", config.dynamo_config);
  f("enable_cpu_affinity", config.enable_cpu_affinity);
}

/// The keys that a section of the file may have, e.g. of "fsdp_config"; none for what is no section
/// or is free.
[[nodiscard]] const std::vector<std::string>& known_section_keys(std::string_view section);

/// The prefix that the keys of a section may leave out, e.g. "fsdp_"; "" where none may.
[[nodiscard]] std::string_view optional_section_prefix(std::string_view section);

}  // namespace accelerate::detail
