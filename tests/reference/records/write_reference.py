"""Writes records.json: what Python Accelerate 1.13 makes of its enumerations, constants, handlers, plugins and
parallelism configurations. Run with an interpreter that has accelerate==1.13.0 and torch==2.11.0:

    python write_reference.py
"""

import dataclasses
import datetime
import enum
import itertools
import json
import math
import os
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import torch
from accelerate import parallelism_config
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import constants, dataclasses as records
from accelerate.utils.deepspeed import HfDeepSpeedConfig


warnings.simplefilter("ignore")
PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}


def plain(value):
    """The value as JSON says it, in the words of the C++ dictionaries."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    if value is None or isinstance(value, (bool, int)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, float):
        return "inf" if math.isinf(value) else value
    if isinstance(value, enum.Enum):
        torch_enums = (fsdp.ShardingStrategy, fsdp.BackwardPrefetch, fsdp.StateDictType)
        return value.name if isinstance(value, torch_enums) else value.value
    if isinstance(value, str):
        return value
    if isinstance(value, torch.dtype):
        return DTYPES[value]
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, HfDeepSpeedConfig):
        return plain(value.config)
    if isinstance(value, fsdp.CPUOffload):
        return {"offload_params": value.offload_params}
    if isinstance(value, fsdp.OffloadPolicy):
        return {"offload_params": isinstance(value, fsdp.CPUOffloadPolicy)}
    if value is transformer_auto_wrap_policy:
        return "TRANSFORMER_BASED_WRAP"
    if value is size_based_auto_wrap_policy:
        return "SIZE_BASED_WRAP"
    if isinstance(value, (fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy)):
        names = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
        return {name: plain(getattr(value, name)) for name in names if hasattr(value, name)}
    if isinstance(value, fsdp.StateDictConfig) or isinstance(value, fsdp.OptimStateDictConfig):
        names = ("offload_to_cpu", "rank0_only")
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
        return plain(vars(value))
    if callable(value):
        return "<callable>"
    raise TypeError(type(value))


def environment(variables):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(PREFIXES)}
    return mock.patch.dict(os.environ, {**kept, **variables}, clear=True)


def fields_of(record):
    values = {f.name: plain(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, records.FullyShardedDataParallelPlugin) and values["auto_wrap_policy"] is None:
        values["auto_wrap_policy"] = "NO_WRAP"
    return values


def case(name, make, variables=None):
    """The fields of a record, and its kwargs where the class has them."""
    variables = variables or {}
    with environment(variables):
        record = make()
        result = {"environment": variables, "fields": fields_of(record)}
        if isinstance(record, records.KwargsHandler):
            result["to_dict"] = plain(record.to_dict())
            result["to_kwargs"] = plain(record.to_kwargs())
        if isinstance(record, records.MegatronLMPlugin):
            result["megatron_lm_default_args"] = plain(record.megatron_lm_default_args)
        if isinstance(record, records.DeepSpeedPlugin):
            config = record.hf_ds_config
            result["queries"] = {
                "is_zero2": config.is_zero2(),
                "is_zero3": config.is_zero3(),
                "is_offload": config.is_offload(),
            }
            precisions = {}
            for precision in ("no", "fp16", "bf16", "fp8"):
                plugin = make()
                try:
                    plugin.set_mixed_precision(precision)
                    precisions[precision] = plain(plugin.deepspeed_config)
                except ValueError as error:
                    precisions[precision] = {"error": str(error)}
            result["set_mixed_precision"] = precisions
        if isinstance(record, records.BnbQuantizationConfig):
            result["target_dtype"] = plain(record.target_dtype)
    return name, result


def refusal(name, make, facts, variables=None):
    """What a refused record says; `facts` are the words that a message of ours must have too."""
    variables = variables or {}
    with environment(variables):
        try:
            make()
        except Exception as error:
            for fact in facts:
                assert fact in str(error), (name, fact, str(error))
            return name, {"environment": variables, "type": type(error).__name__, "facts": facts}
    raise AssertionError(f"{name} was accepted")


def enumerations():
    names = (
        "DistributedType SageMakerDistributedType ComputeEnvironment FP8BackendType DynamoBackend LoggerType "
        "PrecisionType RNGType CustomDtype DDPCommunicationHookType"
    ).split()
    texts = {name: {member.name: member.value for member in getattr(records, name)} for name in names}
    for name in ("FP8Format", "AmaxComputeAlgorithm", "OptLevel", "ProfilerActivity"):
        texts[name] = {text: text for text in records.get_args(getattr(records, name))}
    return texts


def all_constants():
    result = {}
    for name, value in vars(constants).items():
        if not name.isupper():
            continue
        if name == "STR_OPERATION_TO_FUNC":
            value = list(value)
        if name == "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING":
            value = [layer.__name__ for layer in value]
        result[name] = value
    return result


def handler_cases():
    r = records
    fp8 = "ACCELERATE_FP8_"
    dynamo = "ACCELERATE_DYNAMO_"
    te = {
        fp8 + "USE_AUTOCAST_DURING_EVAL": "yes",
        fp8 + "MARGIN": "2",
        fp8 + "INTERVAL": "3",
        fp8 + "FORMAT": "e4m3",
        fp8 + "AMAX_HISTORY_LEN": "16",
        fp8 + "AMAX_COMPUTE_ALGO": "MAX",
        fp8 + "OVERRIDE_DGRAD": "1",
    }
    return [
        case("AutocastKwargs/default", lambda: r.AutocastKwargs()),
        case("AutocastKwargs/island", lambda: r.AutocastKwargs(enabled=False, cache_enabled=True)),
        case("DistributedDataParallelKwargs/default", lambda: r.DistributedDataParallelKwargs()),
        case(
            "DistributedDataParallelKwargs/hook",
            lambda: r.DistributedDataParallelKwargs(
                bucket_cap_mb=15,
                find_unused_parameters=True,
                comm_hook=r.DDPCommunicationHookType.POWER_SGD,
                comm_wrapper=r.DDPCommunicationHookType.BF16,
                comm_state_option={"matrix_approximation_rank": 2},
            ),
        ),
        case("GradScalerKwargs/default", lambda: r.GradScalerKwargs()),
        case("GradScalerKwargs/changed", lambda: r.GradScalerKwargs(init_scale=1024, growth_factor=2)),
        case("InitProcessGroupKwargs/default", lambda: r.InitProcessGroupKwargs()),
        case("InitProcessGroupKwargs/gloo", lambda: r.InitProcessGroupKwargs(backend="gloo")),
        case(
            "InitProcessGroupKwargs/timeout",
            lambda: r.InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=800)),
        ),
        case("ProfileKwargs/default", lambda: r.ProfileKwargs()),
        case(
            "ProfileKwargs/schedule",
            lambda: r.ProfileKwargs(
                activities=["cpu", "cuda"],
                schedule_option={"wait": 1, "warmup": 1, "active": 3, "repeat": 2, "skip_first": 1},
                on_trace_ready=print,
                record_shapes=True,
                output_trace_dir="trace",
            ),
        ),
        case("AORecipeKwargs/default", lambda: r.AORecipeKwargs()),
        case(
            "AORecipeKwargs/environment",
            lambda: r.AORecipeKwargs(),
            {fp8 + "PAD_INNER_DIM": "no", fp8 + "ENABLE_FSDP_FLOAT8_ALL_GATHER": "0"},
        ),
        case("TERecipeKwargs/default", lambda: r.TERecipeKwargs()),
        case("TERecipeKwargs/environment", lambda: r.TERecipeKwargs(), te),
        case("TERecipeKwargs/given", lambda: r.TERecipeKwargs(margin=5, fp8_format="e5m2"), te),
        case("MSAMPRecipeKwargs/default", lambda: r.MSAMPRecipeKwargs()),
        case("MSAMPRecipeKwargs/environment", lambda: r.MSAMPRecipeKwargs(), {fp8 + "OPT_LEVEL": "O1"}),
        case("FP8RecipeKwargs/te", lambda: r.FP8RecipeKwargs(backend="te", margin=4)),
        case("GradientAccumulationPlugin/default", lambda: r.GradientAccumulationPlugin()),
        case(
            "GradientAccumulationPlugin/changed",
            lambda: r.GradientAccumulationPlugin(num_steps=4, sync_each_batch=True),
        ),
        case("TorchDynamoPlugin/default", lambda: r.TorchDynamoPlugin()),
        case(
            "TorchDynamoPlugin/environment",
            lambda: r.TorchDynamoPlugin(),
            {dynamo + "BACKEND": "tvm", dynamo + "USE_FULLGRAPH": "on"},
        ),
        case(
            "TorchDynamoPlugin/all",
            lambda: r.TorchDynamoPlugin(mode="max-autotune"),
            {
                dynamo + "BACKEND": "INDUCTOR",
                dynamo + "MODE": "reduce-overhead",
                dynamo + "USE_DYNAMIC": "False",
                dynamo + "USE_REGIONAL_COMPILATION": "t",
            },
        ),
        case("DataLoaderConfiguration/default", lambda: r.DataLoaderConfiguration()),
        case("ProjectConfiguration/default", lambda: r.ProjectConfiguration()),
        case("ProjectConfiguration/project", lambda: r.ProjectConfiguration(project_dir="run", total_limit=3)),
        case("ProjectConfiguration/logging", lambda: r.ProjectConfiguration(project_dir="run", logging_dir="log")),
        case("BnbQuantizationConfig/eight", lambda: r.BnbQuantizationConfig(load_in_8bit=True)),
        case(
            "BnbQuantizationConfig/four",
            lambda: r.BnbQuantizationConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype="bf16",
                skip_modules=["lm_head"],
            ),
        ),
        case("TorchTensorParallelPlugin/default", lambda: r.TorchTensorParallelPlugin()),
        case("TorchTensorParallelConfig/default", lambda: r.TorchTensorParallelConfig()),
        case("TorchContextParallelConfig/default", lambda: r.TorchContextParallelConfig()),
        case(
            "TorchContextParallelConfig/environment",
            lambda: r.TorchContextParallelConfig(),
            {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"},
        ),
        case("DeepSpeedSequenceParallelConfig/default", lambda: r.DeepSpeedSequenceParallelConfig()),
        case(
            "DeepSpeedSequenceParallelConfig/environment",
            lambda: r.DeepSpeedSequenceParallelConfig(),
            {
                "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "false",
                "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "256",
                "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
            },
        ),
        case(
            "DeepSpeedSequenceParallelConfig/none",
            lambda: r.DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False),
            {"PARALLELISM_CONFIG_SP_SEQ_LENGTH": "None"},
        ),
    ]


def fsdp_cases():
    make = records.FullyShardedDataParallelPlugin
    name = "FullyShardedDataParallelPlugin/"
    everything = {
        "FSDP_SHARDING_STRATEGY": "2",
        "FSDP_OFFLOAD_PARAMS": "True",
        "FSDP_BACKWARD_PREFETCH": "backward_post",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer,GPT2Block",
        "FSDP_USE_ORIG_PARAMS": "t",
        "FSDP_FORWARD_PREFETCH": "y",
        "FSDP_ACTIVATION_CHECKPOINTING": "on",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "1",
        "FSDP_IGNORED_MODULES": ".*\\.q_proj$",
    }
    result = [
        case(name + "default", lambda: make()),
        case(name + "version_2", lambda: make(fsdp_version=2)),
        case(name + "version_2_from_environment", lambda: make(), {"FSDP_VERSION": "2"}),
        case(name + "everything", lambda: make(), everything),
        case(
            name + "size",
            lambda: make(auto_wrap_policy="size_based_wrap"),
            {"FSDP_MIN_NUM_PARAMS": "2000", "FSDP_BACKWARD_PREFETCH": "NO_PREFETCH"},
        ),
        case(name + "local", lambda: make(state_dict_type="local_state_dict")),
        case(
            name + "version_2_obsolete",
            lambda: make(
                fsdp_version=2,
                reshard_after_forward=False,
                backward_prefetch="BACKWARD_PRE",
                use_orig_params=True,
                sync_module_states=False,
                cpu_offload=True,
                state_dict_type="FULL_STATE_DICT",
            ),
            {"FSDP_FORWARD_PREFETCH": "true", "FSDP_RESHARD_AFTER_FORWARD": "true"},
        ),
    ]
    for version in (1, 2):
        for precision in ("fp8", "fp16", "bf16", "fp32"):
            result.append(
                case(
                    f"{name}{precision}_version_{version}",
                    lambda: make(fsdp_version=version, mixed_precision_policy=precision),
                )
            )
    return result


def deepspeed_cases():
    make = records.DeepSpeedPlugin
    name = "DeepSpeedPlugin/"
    prefix = "ACCELERATE_DEEPSPEED_"
    automatic = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": "auto",
            "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
            "offload_param": {"device": "auto", "nvme_path": "auto"},
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
    }
    fixed = {
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }
    variables = {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_GRADIENT_CLIPPING": "1.5",
        prefix + "ZERO_STAGE": "3",
        prefix + "OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        prefix + "OFFLOAD_PARAM_DEVICE": "nvme",
        prefix + "OFFLOAD_PARAM_NVME_PATH": "/nvme",
        prefix + "ZERO3_SAVE_16BIT_MODEL": "True",
    }
    return [
        case(name + "default", lambda: make()),
        case(name + "environment", lambda: make(), variables),
        case(name + "no_clipping", lambda: make(gradient_clipping=0.0, zero_stage=1, zero3_init_flag=True)),
        case(name + "automatic", lambda: make(hf_ds_config=automatic), variables),
        case(name + "automatic_default", lambda: make(hf_ds_config=automatic)),
        case(name + "fixed", lambda: make(hf_ds_config=fixed, zero_stage=2, gradient_clipping=2.0)),
        case(name + "text", lambda: make(), {prefix + "CONFIG_FILE": json.dumps(fixed)}),
        case(name + "base64", lambda: make(), {prefix + "CONFIG_FILE": base64_of(fixed)}),
        case(name + "msamp", lambda: make(enable_msamp=True)),
    ]


def base64_of(tree):
    import base64

    return base64.urlsafe_b64encode(json.dumps(tree).encode()).decode()


def megatron_cases():
    make = records.MegatronLMPlugin
    prefix = "MEGATRON_LM_"
    variables = {
        prefix + "TP_DEGREE": "2",
        prefix + "PP_DEGREE": "4",
        prefix + "NUM_MICRO_BATCHES": "8",
        prefix + "GRADIENT_CLIPPING": "0.5",
        prefix + "SEQUENCE_PARALLELISM": "true",
        prefix + "RECOMPUTE_ACTIVATIONS": "true",
        prefix + "USE_DISTRIBUTED_OPTIMIZER": "yes",
        prefix + "RECOMPUTE_GRANULARITY": "selective",
        prefix + "RECOMPUTE_METHOD": "block",
        prefix + "RECOMPUTE_NUM_LAYERS": "2",
        prefix + "ATTENTION_BACKEND": "no",
        prefix + "CONTEXT_PARALLEL_SIZE": "1",
        prefix + "ATTENTION_DROPOUT": "0.1",
        prefix + "DECODER_LAST_PIPELINE_NUM_LAYERS": "3",
        prefix + "USE_CUSTOM_FSDP": "1",
    }
    return [
        case("MegatronLMPlugin/default", lambda: make()),
        case("MegatronLMPlugin/environment", lambda: make(), variables),
        case(
            "MegatronLMPlugin/given",
            lambda: make(
                tp_degree=4,
                consumed_samples=[7],
                tensorboard_dir="board",
                other_megatron_args={"alibi": True, "lr_mult": 3.0},
                custom_get_batch_function=print,
            ),
            variables,
        ),
    ]


def refusals():
    r = records
    fsdp, deepspeed = r.FullyShardedDataParallelPlugin, r.DeepSpeedPlugin
    tree = {"zero_optimization": {"stage": 2}}
    return [
        refusal("te_format", lambda: r.TERecipeKwargs(), ["HYBRID", "E4M3", "E5M2"], {"ACCELERATE_FP8_FORMAT": "x"}),
        refusal(
            "te_algorithm",
            lambda: r.TERecipeKwargs(),
            ["max", "most_recent"],
            {"ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "min"},
        ),
        refusal("msamp_level", lambda: r.MSAMPRecipeKwargs(), ["O1", "O2"], {"ACCELERATE_FP8_OPT_LEVEL": "O3"}),
        refusal("fp8_backend", lambda: r.FP8RecipeKwargs(backend="AO"), ["MSAMP", "TE"]),
        refusal("dynamo_backend", lambda: r.TorchDynamoPlugin(), ["NOPE"], {"ACCELERATE_DYNAMO_BACKEND": "NOPE"}),
        refusal(
            "truth_word", lambda: r.TorchDynamoPlugin(), ["maybe"], {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "maybe"}
        ),
        refusal("bnb_both", lambda: r.BnbQuantizationConfig(load_in_8bit=True, load_in_4bit=True), ["load_in_4bit"]),
        refusal("bnb_none", lambda: r.BnbQuantizationConfig(), ["load_in_4bit", "load_in_8bit"]),
        refusal(
            "bnb_type",
            lambda: r.BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="np4"),
            ["bnb_4bit_quant_type", "np4", "fp4", "nf4"],
        ),
        refusal("cp_strategy", lambda: r.TorchContextParallelConfig("ring"), ["cp_comm_strategy", "ring", "alltoall"]),
        refusal(
            "sp_length",
            lambda: r.DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False),
            ["sp_seq_length", "PARALLELISM_CONFIG_SP_SEQ_LENGTH"],
        ),
        refusal(
            "sp_attention",
            lambda: r.DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"),
            ["sp_attn_implementation", "eager", "flash_attention_2", "sdpa"],
        ),
        refusal(
            "fsdp_reshard_1",
            lambda: fsdp(fsdp_version=1, reshard_after_forward=True),
            ["reshard_after_forward", "ShardingStrategy"],
        ),
        refusal(
            "fsdp_reshard_2",
            lambda: fsdp(fsdp_version=2, reshard_after_forward=2),
            ["reshard_after_forward"],
        ),
        refusal(
            "fsdp_local",
            lambda: fsdp(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT"),
            ["LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "FULL_STATE_DICT"],
        ),
        refusal(
            "fsdp_wrap",
            lambda: fsdp(),
            ["every", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
            {"FSDP_AUTO_WRAP_POLICY": "every"},
        ),
        refusal(
            "fsdp_precision",
            lambda: fsdp(mixed_precision_policy="int8"),
            ["int8", "fp8", "fp16", "bf16", "fp32"],
        ),
        refusal("deepspeed_section", lambda: deepspeed(hf_ds_config={"fp16": {}}), ["DeepSpeed config"]),
        refusal("deepspeed_text", lambda: deepspeed(hf_ds_config="nowhere.json"), ["nowhere.json", "base64"]),
        refusal(
            "deepspeed_fields",
            lambda: deepspeed(hf_ds_config=tree),
            ["zero_stage", "mixed_precision", "zero3_save_16bit_model"],
            {"ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero_stage"},
        ),
        refusal("deepspeed_msamp", lambda: deepspeed(enable_msamp=True, zero_stage=3), ["MS-AMP"]),
        refusal("deepspeed_process", process_with_mismatches, PROCESS_FACTS),
        refusal("deepspeed_auto", process_with_auto, ["optimizer.params.lr"]),
    ]


PROCESS_FACTS = [
    "- ds train_micro_batch_size_per_gpu=1 vs arg train_micro_batch_size_per_gpu=16",
    "- ds zero_optimization.stage=2 vs arg zero_optimization.stage=3",
    "- ds optimizer.params.lr=0.001 vs arg optimizer.params.lr=0.1",
]


def process_with_mismatches():
    tree = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"params": {"lr": 0.001}},
        "zero_optimization": {"stage": 2},
    }
    plugin = records.DeepSpeedPlugin(hf_ds_config=tree)
    arguments = {"train_micro_batch_size_per_gpu": 16, "zero_optimization.stage": 3, "optimizer.params.lr": 0.1}
    plugin.deepspeed_config_process(**arguments)


def process_with_auto():
    tree = {"optimizer": {"params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}}
    records.DeepSpeedPlugin(hf_ds_config=tree).deepspeed_config_process()


def parallelism_cases():
    """Every combination of three sizes in five dimensions: the derived lists, or the refusal."""
    result = []
    dimensions = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    for sizes in itertools.product((1, 2, 3), repeat=5):
        entry = {"sizes": dict(zip(dimensions, sizes))}
        try:
            config = ParallelismConfig(**{f"{name}_size": size for name, size in entry["sizes"].items()})
        except ValueError:
            entry["refused"] = True
            result.append(entry)
            continue
        lists = ("dp_dim_names", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names")
        for name in (*lists, "fsdp_dim_names", "active_mesh_dims"):
            entry[name] = getattr(config, name)
        for name in ("total_size", "non_data_parallel_size", "data_parallel_size"):
            entry[name] = getattr(config, name)
        mesh = config._get_mesh()
        entry["mesh"] = [list(part) for part in mesh]
        result.append(entry)
    return result


def mesh_cases():
    """Coordinates and groups as torch's own DeviceMesh has them."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    result = []
    for replicate, shard, tp, cp in [(2, 2, 2, 1), (1, 4, 1, 2), (2, 2, 1, 3), (1, 2, 3, 2), (1, 1, 4, 1), (3, 2, 1, 1)]:
        world = replicate * shard * tp * cp
        for rank in sorted({0, 1, world // 2, 5 % world, world - 1}):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            config = ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=shard, tp_size=tp, cp_size=cp)
            mesh = config.build_device_mesh("cpu")
            entry = {
                "sizes": {"dp_replicate": replicate, "dp_shard": shard, "tp": tp, "cp": cp},
                "rank": rank,
                "shape": list(mesh.mesh.shape),
                "names": list(mesh.mesh_dim_names),
                "coordinates": list(mesh.get_coordinate()),
                "dimensions": {},
            }
            joint = [("dp", config.dp_dim_names), ("dp_shard_cp", config.dp_shard_cp_dim_names)]
            joint.append(("dp_cp", config.dp_cp_dim_names))
            for name in [*mesh.mesh_dim_names, *(name for name, members in joint if members)]:
                part = mesh[name]
                entry["dimensions"][name] = {
                    "members": part.mesh.flatten().tolist(),
                    "local_rank": part.get_local_rank(),
                }
            result.append(entry)
            dist.destroy_process_group()
    return result


def pretend_that_packages_are_installed():
    """The recipes look for packages that need not be here to read options."""

    class Float8LinearConfig(types.SimpleNamespace):
        pass

    torchao = types.ModuleType("torchao")
    torchao.float8 = types.ModuleType("torchao.float8")
    torchao.float8.Float8LinearConfig = Float8LinearConfig
    sys.modules.update({"torchao": torchao, "torchao.float8": torchao.float8})
    for name in ("is_torchao_available", "is_transformer_engine_available", "is_cuda_available"):
        setattr(records, name, lambda: True)
    torch.cuda.current_device = lambda: 0
    records.compare_versions = lambda *_: True
    parallelism_config.warnings.warn = lambda *_, **__: None


def one_line_per_entry(sections):
    """JSON that a difference can be read in."""
    texts = []
    for name, section in sections.items():
        if isinstance(section, dict):
            lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in section.items()]
            texts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
        else:
            texts.append(f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(value) for value in section) + "\n]")
    return "{\n" + ",\n".join(texts) + "\n}\n"


def main():
    pretend_that_packages_are_installed()
    records_json = {
        "enumerations": enumerations(),
        "constants": all_constants(),
        "cases": dict(handler_cases() + fsdp_cases() + deepspeed_cases() + megatron_cases()),
        "refusals": dict(refusals()),
        "parallelism": parallelism_cases(),
        "meshes": mesh_cases(),
    }
    path = Path(__file__).with_name("records.json")
    path.write_text(one_line_per_entry(records_json))
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
