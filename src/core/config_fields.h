// src/core/config_fields.h - the members of the configurations under their names in files.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "accelerate/config.h"
#include "accelerate/value/fields.h"

namespace accelerate {

// In the order of Python's files.
constexpr auto value_fields(std::type_identity<ClusterConfig>) {
  return ACCELERATE_FIELDS(ClusterConfig, compute_environment, distributed_type, mixed_precision,
                           use_cpu, debug, num_processes, machine_rank, num_machines, gpu_ids,
                           main_process_ip, main_process_port, rdzv_backend, same_network,
                           main_training_function, enable_cpu_affinity, fp8_config,
                           deepspeed_config, fsdp_config, parallelism_config, megatron_lm_config,
                           mpirun_config, downcast_bf16, tpu_name, tpu_zone, tpu_use_cluster,
                           tpu_use_sudo, command_file, commands, tpu_vm, tpu_env, dynamo_config);
}
constexpr auto value_fields(std::type_identity<SageMakerConfig>) {
  return ACCELERATE_FIELDS(
      SageMakerConfig, compute_environment, distributed_type, mixed_precision, use_cpu, debug,
      ec2_instance_type, iam_role_name, image_uri, profile, region, num_machines, gpu_ids,
      base_job_name, pytorch_version, transformers_version, py_version, sagemaker_inputs_file,
      sagemaker_metrics_file, additional_args, dynamo_config, enable_cpu_affinity);
}

namespace detail::inline core {

/// The keys that a section of the file may have, for example "fsdp_config". Empty for other members
/// and for sections that may have any key.
[[nodiscard]] std::vector<std::string> known_section_keys(std::string_view section);

/// The prefix that keys of a section may leave out, for example "fsdp_"; "" if there is none.
[[nodiscard]] std::string_view optional_section_prefix(std::string_view section);

}  // namespace detail::inline core
}  // namespace accelerate
