// src/core/config.h - configuration files for the command line and the state layer: the members
// under their names in files, and parts of accelerate/config.h.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "accelerate/config.h"
#include "accelerate/environment.h"
#include "accelerate/value/fields.h"

namespace accelerate {

// In the order of Python's files.
ACCELERATE_VALUE_FIELDS(ClusterConfig, compute_environment, distributed_type, mixed_precision,
                        use_cpu, debug, num_processes, machine_rank, num_machines, gpu_ids,
                        main_process_ip, main_process_port, rdzv_backend, same_network,
                        main_training_function, enable_cpu_affinity, fp8_config, deepspeed_config,
                        fsdp_config, parallelism_config, megatron_lm_config, mpirun_config,
                        downcast_bf16, tpu_name, tpu_zone, tpu_use_cluster, tpu_use_sudo,
                        command_file, commands, tpu_vm, tpu_env, dynamo_config);
ACCELERATE_VALUE_FIELDS(SageMakerConfig, compute_environment, distributed_type, mixed_precision,
                        use_cpu, debug, ec2_instance_type, iam_role_name, image_uri, profile,
                        region, num_machines, gpu_ids, base_job_name, pytorch_version,
                        transformers_version, py_version, sagemaker_inputs_file,
                        sagemaker_metrics_file, additional_args, dynamo_config,
                        enable_cpu_affinity);

namespace detail::inline core {

/// Where Hugging Face's libraries keep their files: HF_HOME, else huggingface in the user's cache.
[[nodiscard]] std::filesystem::path huggingface_home(const Environment& environment);

/// `default_config_file()` of another environment.
[[nodiscard]] std::filesystem::path default_config_file(const Environment& environment);

/// The content of a configuration file. Throws `ConfigError`.
[[nodiscard]] Value::Dict read_config_file(const std::filesystem::path& path);
/// The configuration with this content; `path` names its file in messages. Throws `ConfigError`.
[[nodiscard]] Config config_from(const Value::Dict& content, const std::filesystem::path& path);

/// What `write_basic_config` writes for a machine with `accelerator_count` devices; `several` is
/// the type of a run on more than one of them. Throws `ArgumentError` for an unknown precision.
[[nodiscard]] ClusterConfig basic_config(std::string_view mixed_precision, DistributedType several,
                                         int accelerator_count);

/// `write_basic_config` once the machine is known.
[[nodiscard]] std::optional<std::filesystem::path> write_basic_config(
    std::string_view mixed_precision, const std::filesystem::path& save_location,
    DistributedType several, int accelerator_count);

/// The keys that a section of the file may have, for example "fsdp_config". Empty for other members
/// and for sections that may have any key.
[[nodiscard]] std::vector<std::string> known_section_keys(std::string_view section);

/// The prefix that keys of a section may leave out, for example "fsdp_"; "" if there is none.
[[nodiscard]] std::string_view optional_section_prefix(std::string_view section);

}  // namespace detail::inline core
}  // namespace accelerate
