"""Writes the configuration files that Python Accelerate writes, and what it makes of old ones.

- written/: as `accelerate config`, `to_yaml_file`, `to_json_file` and `write_basic_config` leave them
- legacy/NAME.yaml, and legacy/NAME.expected.yaml: the same file after `accelerate config update`

    python tests/reference/config/write_reference.py
"""

import pathlib
import shutil

import yaml
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
from accelerate.commands.config.default import write_basic_config

here = pathlib.Path(__file__).parent
written, legacy = here / "written", here / "legacy"
for folder in (written, legacy):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

# What the questionnaire always says.
ASKED = dict(compute_environment="LOCAL_MACHINE", debug=False, downcast_bf16="no", machine_rank=0, main_training_function="main",
             num_machines=1, rdzv_backend="static", same_network=True, tpu_env=[], tpu_use_cluster=False, tpu_use_sudo=False,
             use_cpu=False, enable_cpu_affinity=False)


def cluster(name, **fields):
    config = ClusterConfig(**{**ASKED, **fields})
    config.to_yaml_file(str(written / f"{name}.yaml"))
    ClusterConfig(**{**ASKED, **fields}).to_json_file(str(written / f"{name}.json"))


cluster("cpu", distributed_type="NO", mixed_precision="no", num_processes=1, use_cpu=True)
cluster("multi_cpu", distributed_type="MULTI_CPU", mixed_precision="bf16", num_processes=8, num_machines=2, machine_rank=1,
        main_process_ip="10.0.0.1", main_process_port=29500, use_cpu=True, mpirun_config={"mpirun_hostfile": "/home/me/hostfile"})
cluster("multi_gpu", distributed_type="MULTI_GPU", mixed_precision="fp16", num_processes=2, gpu_ids="all",
        dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False, "dynamo_use_fullgraph": False})
cluster("some_gpus", distributed_type="MULTI_GPU", mixed_precision="no", num_processes=3, gpu_ids="0,2,3", enable_cpu_affinity=True, debug=True)
cluster("one_gpu", distributed_type="NO", mixed_precision="bf16", num_processes=1, gpu_ids="0")
cluster("two_nodes", distributed_type="MULTI_GPU", mixed_precision="bf16", num_processes=16, num_machines=2, gpu_ids="all",
        main_process_ip="node-1.cluster", main_process_port=29501, same_network=False, rdzv_backend="c10d")
cluster("fsdp1", distributed_type="FSDP", mixed_precision="bf16", num_processes=4, fsdp_config={
    "fsdp_version": 1, "fsdp_reshard_after_forward": "FULL_SHARD", "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "BertLayer,T5Block",
    "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True, "fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": False})
cluster("fsdp2", distributed_type="FSDP", mixed_precision="bf16", num_processes=8, fsdp_config={
    "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 100000000, "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": False}, parallelism_config={
    "parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 4, "parallelism_config_tp_size": 1,
    "parallelism_config_cp_size": 2, "parallelism_config_cp_comm_strategy": "allgather"})
cluster("deepspeed", distributed_type="DEEPSPEED", mixed_precision="bf16", num_processes=4, deepspeed_config={
    "zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "nvme", "offload_param_nvme_path": "/nvme",
    "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "zero3_save_16bit_model": True, "zero3_init_flag": True,
    "deepspeed_moe_layer_cls_names": None})
cluster("deepspeed_file", distributed_type="DEEPSPEED", mixed_precision=None, num_processes=4, num_machines=2, main_process_ip="10.1.1.1",
        main_process_port=29500, deepspeed_config={
    "deepspeed_config_file": "/etc/ds config.json", "zero3_init_flag": False, "deepspeed_multinode_launcher": "pdsh",
    "deepspeed_hostfile": "~/hostfile", "deepspeed_exclusion_filter": "worker-1@worker-2:0,1"})
cluster("megatron", distributed_type="MEGATRON_LM", mixed_precision="bf16", num_processes=8, megatron_lm_config={
    "megatron_lm_tp_degree": 2, "megatron_lm_sequence_parallelism": True, "megatron_lm_pp_degree": 2, "megatron_lm_num_micro_batches": 2,
    "megatron_lm_recompute_activations": True, "megatron_lm_use_distributed_optimizer": True, "megatron_lm_gradient_clipping": 1.0})
cluster("fp8_te", distributed_type="MULTI_GPU", mixed_precision="fp8", num_processes=2, gpu_ids="all", fp8_config={
    "backend": "TE", "use_autocast_during_eval": False, "margin": 0, "interval": 1, "fp8_format": "E4M3", "amax_history_length": 1024,
    "amax_compute_algorithm": "most_recent", "override_linear_precision": [True, False, False]})
cluster("fp8_ao", distributed_type="FSDP", mixed_precision="fp8", num_processes=2, fp8_config={
    "backend": "AO", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}, fsdp_config={"fsdp_version": 2})
cluster("tpu", distributed_type="XLA", mixed_precision="no", num_processes=8, tpu_name="my-tpu", tpu_zone="us-central1-a", tpu_use_cluster=True,
        tpu_use_sudo=True, command_file=None, commands=["cd /usr/share", "echo 'yes: no' # done"], tpu_env=["A=1", "B=x y"], downcast_bf16="yes")
cluster("odd_texts", distributed_type="MULTI_GPU", mixed_precision="no", num_processes=2, gpu_ids="1", main_process_ip="127.0.0.1",
        main_training_function="yes", rdzv_backend="0x10", tpu_name="1e5", tpu_zone="- dash", command_file="it's: é",
        deepspeed_config={"empty": {}, "none": None, "list": [], "float": 1e-8, "big": 1e20, "date": "2024-01-01", "multi": "a\nb"})

SAGEMAKER = dict(compute_environment="AMAZON_SAGEMAKER", distributed_type="DATA_PARALLEL", mixed_precision="fp16", use_cpu=False, debug=False,
                 ec2_instance_type="ml.p3.16xlarge", iam_role_name="accelerate_sagemaker_execution_role", profile="default", region="eu-west-1",
                 num_machines=2, additional_args={"max_run": 3600}, sagemaker_inputs_file="inputs.tsv")
SageMakerConfig(**SAGEMAKER).to_yaml_file(str(written / "sagemaker.yaml"))
SageMakerConfig(**SAGEMAKER).to_json_file(str(written / "sagemaker.json"))

# JSON text in a file with a YAML name; the machine that ran this had no accelerator.
for precision in ("no", "bf16"):
    write_basic_config(precision, str(written / f"basic_{precision}.yaml"))
ClusterConfig(compute_environment="LOCAL_MACHINE", mixed_precision="fp16", num_processes=4, use_cpu=False, distributed_type="MULTI_GPU", debug=False,
              enable_cpu_affinity=False).to_json_file(str(written / "basic_four_gpus.yaml"))

old = {
    "fp16": "compute_environment: LOCAL_MACHINE\ndeepspeed_config: {}\ndistributed_type: MULTI_GPU\nfp16: true\nmachine_rank: 0\nmain_process_ip: null\n"
            "main_process_port: null\nmain_training_function: main\nnum_machines: 1\nnum_processes: 2\n",
    "fp16_off": "distributed_type: 'NO'\nfp16: false\n",
    "fp16_and_mixed": "distributed_type: 'NO'\nfp16: true\nmixed_precision: bf16\n",
    "dynamo": "distributed_type: MULTI_GPU\ndynamo_backend: INDUCTOR\nnum_processes: 2\nmixed_precision: 'no'\n",
    "dynamo_no": "distributed_type: MULTI_GPU\ndynamo_backend: 'NO'\nnum_processes: 2\nmixed_precision: 'no'\n",
    "minimal": "distributed_type: 'NO'\n",
    "minimal_multi": "distributed_type: MULTI_GPU\n",
    "fsdp_0_x": "compute_environment: LOCAL_MACHINE\ncommand_file: null\ncommands: null\ndeepspeed_config: {}\ndistributed_type: FSDP\ndowncast_bf16: 'no'\n"
                "dynamo_backend: 'NO'\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch: BACKWARD_PRE\n"
                "  fsdp_offload_params: false\n  fsdp_sharding_strategy: 1\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
                "  fsdp_transformer_layer_cls_to_wrap: T5Block\ngpu_ids: null\nmachine_rank: 0\nmain_process_ip: null\nmain_process_port: null\n"
                "main_training_function: main\nmegatron_lm_config: {}\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 2\nrdzv_backend: static\n"
                "same_network: true\ntpu_name: null\ntpu_zone: null\nuse_cpu: false\n",
    "commented": "# by hand\ncompute_environment: LOCAL_MACHINE # here\ndistributed_type: \"MULTI_GPU\"\nmixed_precision: bf16\nnum_processes: 0x4\n"
                 "fsdp_config: &f {fsdp_version: 2}\ndebug: on\nuse_cpu: No\n",
}
for name, text in old.items():
    path = legacy / f"{name}.yaml"
    path.write_text(text)
    load_config_from_file(str(path)).to_yaml_file(str(legacy / f"{name}.expected.yaml"))
    assert yaml.safe_load((legacy / f"{name}.expected.yaml").read_text())
