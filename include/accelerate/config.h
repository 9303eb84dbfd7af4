// accelerate/config.h - the configuration file that `accelerate config` writes and `launch` reads.
//
//     auto config = std::get<accelerate::ClusterConfig>(accelerate::load_config_from_file());
//     config.num_processes = 4;
//     config.to_yaml_file("four.yaml");
//
// Files are those of Python Accelerate: either side reads what the other writes. Members and their
// order are Python's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/value.h"

namespace accelerate {

/// How to run on machines of one's own.
struct ACCELERATE_API ClusterConfig {
  ComputeEnvironment compute_environment = ComputeEnvironment::kLocalMachine;
  DistributedType distributed_type = DistributedType::kNo;
  /// Unset: the launcher takes "no"; a DeepSpeed file may say it instead.
  std::optional<PrecisionType> mixed_precision = std::nullopt;
  bool use_cpu = false;
  bool debug = false;
  /// -1: must be given to the launcher.
  std::int64_t num_processes = -1;
  std::int64_t machine_rank = 0;
  std::int64_t num_machines = 1;
  /// "all", "0,1", ...
  std::optional<std::string> gpu_ids = std::nullopt;
  std::optional<std::string> main_process_ip = std::nullopt;
  std::optional<std::int64_t> main_process_port = std::nullopt;
  std::optional<std::string> rdzv_backend = "static";
  std::optional<bool> same_network = false;
  std::string main_training_function = "main";
  bool enable_cpu_affinity = false;
  Value::Dict fp8_config = {};
  Value::Dict deepspeed_config = {};
  Value::Dict fsdp_config = {};
  Value::Dict parallelism_config = {};
  Value::Dict megatron_lm_config = {};
  Value::Dict mpirun_config = {};
  /// false, or the text "no" that the questionnaire writes. For TPUs only.
  Value downcast_bf16 = false;
  std::optional<std::string> tpu_name = std::nullopt;
  std::optional<std::string> tpu_zone = std::nullopt;
  bool tpu_use_cluster = false;
  bool tpu_use_sudo = false;
  std::optional<std::string> command_file = std::nullopt;
  std::optional<std::vector<std::string>> commands = std::nullopt;
  std::optional<std::vector<std::string>> tpu_vm = std::nullopt;
  std::optional<std::vector<std::string>> tpu_env = std::nullopt;
  Value::Dict dynamo_config = {};

  /// Reads a file; what it does not say keeps its default. Old spellings are understood: `fp16`,
  /// `dynamo_backend`, the type TPU; `ipex_config` and `tp_config` are dropped with a warning.
  ///
  /// Throws `ConfigError` that names the file when it is missing, empty or does not parse (with
  /// line and column), has no `distributed_type`, has keys that are not known (lists them) or a
  /// value of the wrong kind. Unknown keys inside a section such as `fsdp_config` get a warning
  /// with the nearest known key, and stay.
  [[nodiscard]] static ClusterConfig from_yaml_file(const std::filesystem::path& path);
  [[nodiscard]] static ClusterConfig from_json_file(const std::filesystem::path& path);
  /// Reads the content of a file. `source` names it in messages.
  [[nodiscard]] static ClusterConfig from_dict(const Value::Dict& dict,
                                               const std::string& source = "the configuration");

  /// Writes the file as Python does. A reader finds the old file or the new one, never a part.
  /// Throws `ConfigError` with the reason when it cannot be written.
  void to_yaml_file(const std::filesystem::path& path) const;
  void to_json_file(const std::filesystem::path& path) const;

  /// What goes into a file: enumerations as texts, without unset members and empty sections.
  [[nodiscard]] Value::Dict to_dict() const;

  bool operator==(const ClusterConfig&) const = default;
};

/// How to run on Amazon SageMaker. Such files can be read and written; the C++ launcher refuses
/// them.
struct ACCELERATE_API SageMakerConfig {
  ComputeEnvironment compute_environment = ComputeEnvironment::kAmazonSagemaker;
  SageMakerDistributedType distributed_type = SageMakerDistributedType::kNo;
  std::optional<PrecisionType> mixed_precision = std::nullopt;
  bool use_cpu = false;
  bool debug = false;
  std::string ec2_instance_type = {};
  std::string iam_role_name = {};
  std::optional<std::string> image_uri = std::nullopt;
  std::optional<std::string> profile = std::nullopt;
  std::string region = "us-east-1";
  std::int64_t num_machines = 1;
  std::string gpu_ids = "all";
  std::string base_job_name = "accelerate-sagemaker-1";
  std::string pytorch_version = "1.10.2";
  std::string transformers_version = "4.17.0";
  std::string py_version = "py38";
  std::optional<std::string> sagemaker_inputs_file = std::nullopt;
  std::optional<std::string> sagemaker_metrics_file = std::nullopt;
  Value::Dict additional_args = {};
  Value::Dict dynamo_config = {};
  bool enable_cpu_affinity = false;

  // As of `ClusterConfig`; `ec2_instance_type` and `iam_role_name` are needed too.
  [[nodiscard]] static SageMakerConfig from_yaml_file(const std::filesystem::path& path);
  [[nodiscard]] static SageMakerConfig from_json_file(const std::filesystem::path& path);
  [[nodiscard]] static SageMakerConfig from_dict(const Value::Dict& dict,
                                                 const std::string& source = "the configuration");
  void to_yaml_file(const std::filesystem::path& path) const;
  void to_json_file(const std::filesystem::path& path) const;
  [[nodiscard]] Value::Dict to_dict() const;

  bool operator==(const SageMakerConfig&) const = default;
};

using Config = std::variant<ClusterConfig, SageMakerConfig>;

/// $HF_HOME/accelerate/default_config.yaml; without HF_HOME under $XDG_CACHE_HOME/huggingface, else
/// under ~/.cache/huggingface. An empty variable counts as unset.
[[nodiscard]] ACCELERATE_API std::filesystem::path default_config_file();

/// Reads a configuration file (unset: the default one). Names that end in .json are JSON, all
/// others YAML, which may hold JSON text. Throws `ConfigError` as `ClusterConfig::from_yaml_file`
/// does.
[[nodiscard]] ACCELERATE_API Config
load_config_from_file(const std::optional<std::filesystem::path>& config_file = std::nullopt);

/// Writes a configuration for this machine, with all its accelerators or for the CPU, and returns
/// where (unset: `default_config_file()`). Makes the folders. A file that exists is left alone with
/// a message, and nothing is returned. Throws `ArgumentError` for a precision other than no, fp16,
/// bf16 and fp8 in any case.
ACCELERATE_API std::optional<std::filesystem::path> write_basic_config(
    const std::string& mixed_precision = "no",
    const std::optional<std::filesystem::path>& save_location = std::nullopt);

}  // namespace accelerate
