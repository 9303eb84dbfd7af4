"""launch_plan.py ACCELERATE: plans of the native launcher against those of Python's, case by case.

Python's own functions (its parser, _validate_launch_command, prepare_*_env) give the variables that its workers would
get; `accelerate launch --dry_run=json` gives ours. What may differ is in DIFFERENCES, with the reason; a difference that
no case shows any more is an error too.
"""
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

tool = sys.argv[1]
work = pathlib.Path(tempfile.mkdtemp())
for name in list(os.environ):
    if name.startswith(("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "MASTER_", "PET_", "SLURM_", "OMPI_", "PMI_")):
        del os.environ[name]
os.environ.update(HF_HOME=str(work), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="3", PYTHON_EXEC=sys.executable)
os.chdir(work)

import accelerate.utils.launch as prepare  # noqa: E402
from accelerate.commands.launch import _validate_launch_command, launch_command_parser  # noqa: E402

prepare.is_fp8_available = lambda: True
prepare.is_port_in_use = lambda port=None: False
prepare.get_free_port = lambda: 0
prepare.compare_versions = lambda *args: False
prepare._get_mpirun_args = lambda: ("mpirun", "-f", "-n", "-ppn", "")
warnings.simplefilter("ignore")
logging.disable()

FAKE_MPIRUN = work / "bin"
FAKE_MPIRUN.mkdir()
(FAKE_MPIRUN / "mpirun").write_text("#!/bin/sh\necho Intel MPI\n")
(FAKE_MPIRUN / "mpirun").chmod(0o755)
os.environ["PATH"] = f"{FAKE_MPIRUN}:{os.environ['PATH']}"


def python_plan(words):
    """(mode, changed variables, command or None, agent settings or None) of Python's launcher."""
    args = launch_command_parser().parse_args(words)
    args, defaults, precision_from_file = _validate_launch_command(args)
    before = dict(os.environ)
    command = None
    if args.use_deepspeed and not args.cpu:
        fields = list(defaults.deepspeed_config.keys()) if defaults else []
        args.deepspeed_fields_from_accelerate_config = ",".join(fields + ["mixed_precision"] * precision_from_file)
        command, env = prepare.prepare_deepspeed_cmd_env(args)
        mode = "agent" if command is None else "command"
    elif (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
        env, mode = prepare.prepare_multi_gpu_env(args), "agent"
    else:
        command, env = prepare.prepare_simple_launcher_cmd_env(args)
        mode = "command" if args.mpirun_hostfile else "simple"
    changed = {k: v for k, v in env.items() if before.get(k) != v or k == "OMP_NUM_THREADS"}
    if args.use_deepspeed and not args.cpu:
        changed.pop("OMP_NUM_THREADS", None)
    agent = None
    if mode == "agent":
        agent = {"nproc_per_node": int(args.nproc_per_node), "max_nodes": int(getattr(args, "nnodes", 1)),
                 "node_rank": int(getattr(args, "node_rank", 0))}
        endpoint = getattr(args, "rdzv_endpoint", "")
        if endpoint:
            agent["master_addr"], agent["master_port"] = endpoint.rsplit(":", 1)
        else:
            agent["master_addr"] = getattr(args, "master_addr", "127.0.0.1")
            agent["master_port"] = args.master_port
        agent["master_port"] = int(agent["master_port"])
    return mode, changed, command, agent


def our_plan(words):
    done = subprocess.run([tool, "launch", "--dry_run=json", *words], capture_output=True, text=True, cwd=work)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())
    plan = json.loads(done.stdout)
    return plan["mode"], plan["variables"], plan["command"], plan["agent"]


TRUTHS = {"True": "true", "1": "true", "False": "false", "0": "false"}


def truth(text):
    return TRUTHS.get(text, text)


# name: (why, does it explain this variable in this case?)
DIFFERENCES = {
    "cpu": ("without an accelerator the workers are told to use the CPU, and get what Python's launcher means to give them",
            lambda case, name, theirs, ours: name in ("ACCELERATE_USE_CPU", "KMP_AFFINITY", "KMP_BLOCKTIME") and
            ours in ("True", "granularity=fine,compact,1,0", "1") and theirs in (None, "False")),
    "agent port": ("several CPU processes have an agent, which gives each worker its address",
                   lambda case, name, theirs, ours: name in ("MASTER_ADDR", "MASTER_PORT") and ours is None and
                   case.ours_mode == "agent" and case.python_mode == "simple"),
    "spelling": ("truth values of fp8 and Megatron-LM are always True and False; readers take any spelling",
                 lambda case, name, theirs, ours: name.startswith(("ACCELERATE_FP8_", "MEGATRON_LM_")) and
                 theirs is not None and ours is not None and truth(theirs) == truth(ours)),
    "numbers": ("a number is written as a number of its kind, also when the file has 1 for 1.0",
                lambda case, name, theirs, ours: "CLIPPING" in name and theirs is not None and float(theirs) == float(ours)),
    "nvme": ("Python drops the paths", lambda case, name, theirs, ours: name.endswith("_NVME_PATH") and theirs is None),
    "none": ("a value that is not set has no variable; Python writes the word None",
             lambda case, name, theirs, ours: theirs == "None" and ours is None),
    "environment": ("a variable counts more than the file and the default",
                    lambda case, name, theirs, ours: name in case.env and case.env[name] == ours),
    "file": ("values of the file that Python's launcher does not look at",
             lambda case, name, theirs, ours: name in case.file_only and case.file_only[name] == ours),
    "old keys": ("the spellings of the questionnaire count",
                 lambda case, name, theirs, ours: name in ("ACCELERATE_FP8_AMAX_HISTORY_LENGTH", "ACCELERATE_FP8_AMAX_COMPUTE_ALGORITHM",
                                                           "ACCELERATE_FP8_OPTIMIZATION_LEVEL") and ours is None),
}
seen = set()


class Case:
    def __init__(self, words, config=None, env=None, file_only=None, modes=None):
        self.words, self.config, self.env, self.file_only, self.modes = words.split(), config, env or {}, file_only or {}, modes
        self.python_mode = self.ours_mode = None

    def __str__(self):
        text = " ".join(self.words)
        return f"{self.env or ''} {text}" + (f"\n  with the file\n{self.config}" if self.config else "")


FULL = "--num_machines 1 --mixed_precision no --dynamo_backend no"
CONFIG = "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nnum_processes: {}\n"
CPU_AGENT = ("simple", "agent")  # Python starts one process where we start them all

cases = [
    # simple
    Case(f"--num_processes 1 {FULL} train.py --cpu --epochs 3"),
    Case("train.py"),
    Case("--cpu train.py"),
    Case("--cpu --num_processes 1 --mixed_precision bf16 train.py"),
    Case("--cpu --debug --num-processes 1 --num-machines=1 train.py"),
    Case("--cpu --num_cpu_threads_per_process 5 train.py"),
    Case("--cpu --enable_cpu_affinity train.py"),
    Case("--cpu --dynamo_backend inductor --dynamo_mode reduce-overhead --dynamo_use_fullgraph --dynamo_use_dynamic train.py"),
    Case("--cpu --dynamo_use_regional_compilation -m some.module --flag"),
    Case("--cpu --no_python ./program a b"),
    Case("--num_processes 1 --gpu_ids 1 train.py"),
    Case("--cpu --num_processes 2 train.py", modes=CPU_AGENT),
    Case("--cpu --num_processes 4 --main_process_port 1234 train.py", modes=CPU_AGENT),
    Case("--cpu --mixed_precision fp8 --fp8_backend te --fp8_margin 3 --fp8_override_linear_precision true,false,yes train.py"),
    Case("--cpu --mixed_precision fp8 --fp8_backend ao --fp8_pad_inner_dim false --fp8_opt_level O1 train.py"),
    Case("train.py", config=CONFIG.format("'NO'", 1) + "use_cpu: true\nmixed_precision: bf16\ndebug: true\n"),
    Case("train.py", config=CONFIG.format("'NO'", 1) + "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n  dynamo_use_dynamic: true\n"),
    Case("--mixed_precision no train.py", config=CONFIG.format("'NO'", 1) + "mixed_precision: fp16\ngpu_ids: '1'\n"),
    Case("train.py", config=CONFIG.format("'NO'", 1) + "enable_cpu_affinity: true\n", file_only={"ACCELERATE_CPU_AFFINITY": "1"}),
    # several GPUs
    Case(f"--multi_gpu --num_processes 2 {FULL} train.py"),
    Case("--multi_gpu --num_processes 2 --gpu_ids 0,1 --mixed_precision fp16 train.py"),
    Case("--multi_gpu --num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 5000 train.py"),
    Case("--multi_gpu --num_processes 4 --num_machines 2 --machine_rank 0 --main_process_ip host --same_network --debug train.py"),
    Case("--multi_gpu --num_processes 2 --main_process_port 0 --enable_cpu_affinity train.py"),
    Case("train.py", config=CONFIG.format("MULTI_GPU", 2) + "gpu_ids: 0,1\nmain_process_port: 4321\ndebug: true\n"),
    Case("--num_processes 6 train.py", config=CONFIG.format("MULTI_GPU", 2) + "num_machines: 2\nmachine_rank: 1\nmain_process_ip: 1.2.3.4\nmain_process_port: 4321\n"),
    Case("train.py", config=CONFIG.format("MULTI_GPU", 2) + "mixed_precision: fp8\nfp8_config:\n  backend: TE\n  fp8_format: E4M3\n  margin: 2\n  amax_history_length: 32\n",
         file_only={"ACCELERATE_FP8_AMAX_HISTORY_LEN": "32"}),
    # FSDP
    Case("--use_fsdp --num_processes 2 train.py"),
    Case("--use_fsdp --num_processes 2 --fsdp_version 2 --fsdp_reshard_after_forward FULL_SHARD --fsdp_offload_params True train.py"),
    Case("--use_fsdp --num_processes 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap BertLayer,T5Block "
         "--fsdp_state_dict_type SHARDED_STATE_DICT --fsdp_backward_prefetch BACKWARD_PRE --fsdp_min_num_params 2000 train.py"),
    Case("--fsdp_offload_params false train.py", config=CONFIG.format("FSDP", 2) +
         "fsdp_config:\n  fsdp_sync_module_states: false\n  fsdp_cpu_ram_efficient_loading: false\n  offload_params: true\n  fsdp_ignored_modules: lm_head\n"),
    Case("--use_fsdp --num_processes 1 --mixed_precision bf16 train.py"),
    # parallelism
    Case("--use_fsdp --fsdp_version 2 --use_parallelism_config --num_processes 4 --parallelism_config_dp_shard_size 2 --parallelism_config_cp_size 2 train.py"),
    Case("--use_fsdp --fsdp_version 2 --use_parallelism_config --num_processes 4 --parallelism_config_tp_size 2 --parallelism_config_sp_size 2 train.py"),
    Case("train.py", config=CONFIG.format("FSDP", 4) + "fsdp_config:\n  fsdp_version: 2\nparallelism_config:\n  parallelism_config_dp_shard_size: 4\n"),
    # Megatron-LM
    Case("--use_megatron_lm --num_processes 2 --megatron_lm_tp_degree 2 --megatron_lm_sequence_parallelism true --megatron_lm_hidden_dropout 0.5 train.py"),
    Case("train.py", config=CONFIG.format("MEGATRON_LM", 2) +
         "megatron_lm_config:\n  megatron_lm_tp_degree: 2\n  megatron_lm_recompute_activations: true\n  megatron_lm_gradient_clipping: 1\n"),
    # DeepSpeed
    Case("--use_deepspeed --num_processes 2 --zero_stage 3 --offload_optimizer_device CPU --zero3_init_flag True --gradient_clipping 0.5 train.py"),
    Case("--use_deepspeed --num_processes 2 --deepspeed_config_file ds.json --deepspeed_moe_layer_cls_names A,B --gradient_accumulation_steps 4 train.py"),
    Case("--use_deepspeed --num_processes 2 --zero_stage 3 --offload_param_device nvme --offload_param_nvme_path /nvme train.py"),
    Case("train.py", config=CONFIG.format("DEEPSPEED", 2) + "mixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 2\n  gradient_clipping: 1.0\n  zero3_init_flag: false\n"),
    Case("train.py --x", config=CONFIG.format("DEEPSPEED", 4) + "num_machines: 2\nmachine_rank: 0\nmain_process_ip: 1.2.3.4\nmain_process_port: 99\n"
         "deepspeed_config:\n  zero_stage: 2\n  deepspeed_hostfile: hosts\n  deepspeed_multinode_launcher: pdsh\n  deepspeed_inclusion_filter: 'a@b'\n"),
    Case("--module package.train", config=CONFIG.format("DEEPSPEED", 4) + "num_machines: 2\nmachine_rank: 1\nmain_process_ip: 1.2.3.4\nmain_process_port: 99\n"
         "deepspeed_config:\n  deepspeed_hostfile: hosts\n  deepspeed_multinode_launcher: nossh\n"),
    Case("train.py", config=CONFIG.format("DEEPSPEED", 4) + "num_machines: 2\nmachine_rank: 1\nmain_process_ip: 1.2.3.4\nmain_process_port: 99\n"
         "deepspeed_config:\n  deepspeed_multinode_launcher: standard\n  zero_stage: 1\n"),
    # MPI
    Case("--cpu --num_processes 16 --num_machines 4 --mpirun_hostfile /home/user/hostfile --main_process_ip h --main_process_port 7 train.py --cpu"),
    Case("train.py", config=CONFIG.format("MULTI_CPU", 2) + "use_cpu: true\nmpirun_config:\n  mpirun_hostfile: hosts\n"),
    # the environment
    Case("train.py", env={"ACCELERATE_MIXED_PRECISION": "fp16"}),
    Case("train.py", config=CONFIG.format("FSDP", 2) + "fsdp_config:\n  fsdp_version: 1\n", env={"FSDP_VERSION": "2"}),
]


def compare(case):
    words = list(case.words)
    if case.config is not None:
        path = work / "config.yaml"
        path.write_text(case.config)
        words = ["--config_file", str(path), *words]
    before = dict(os.environ)
    os.environ.update(case.env)
    try:
        case.python_mode, theirs, their_command, their_agent = python_plan(words)
        case.ours_mode, ours, our_command, our_agent = our_plan(words)
    finally:
        os.environ.clear()
        os.environ.update(before)
    problems = []
    if (case.python_mode, case.ours_mode) != (case.modes or (case.python_mode,) * 2):
        problems.append(f"mode: Python {case.python_mode}, ours {case.ours_mode}")
    for name in sorted(theirs.keys() | ours.keys()):
        a, b = theirs.get(name), ours.get(name)
        if a == b or (a is None and before.get(name) == b):
            continue
        reasons = [key for key, (_, explains) in DIFFERENCES.items() if explains(case, name, a, b)]
        seen.update(reasons)
        if not reasons:
            problems.append(f"{name}: Python {a!r}, ours {b!r}")
    if their_command is not None and case.ours_mode == case.python_mode and their_command != our_command:
        problems.append(f"command: Python {their_command}, ours {our_command}")
    for name, value in (their_agent or {}).items():
        if our_agent[name] != value:
            problems.append(f"{name}: Python {value!r}, ours {our_agent[name]!r}")
    return problems


# Both refuse these.
refused = [
    Case("--cpu --multi_gpu train.py"),
    Case("--multi_gpu --num_processes 1 train.py"),
    Case("--use_fsdp --use_deepspeed train.py"),
    Case("--module --no_python --cpu train.py"),
    Case("--mixed_precision fp12 train.py"),
    Case("--num_processes two train.py"),
    Case("--num_proc 2 train.py"),
    Case("train.py", config="compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n"),
    Case("train.py", config=CONFIG.format("MULTI_GPU", 2) + "gpu_ids: '0'\n"),
    Case("train.py", config=CONFIG.format("MULTI_GPU", 2) + "unknown_key: 1\n"),
]

failed = 0
for case in cases:
    problems = compare(case)
    for problem in problems:
        print(f"{case}\n  {problem}")
    failed += bool(problems)
for case in refused:
    words = case.words
    if case.config is not None:
        (work / "config.yaml").write_text(case.config)
        words = ["--config_file", str(work / "config.yaml"), *words]
    stderr, sys.stderr = sys.stderr, open(os.devnull, "w")
    try:
        python_plan(words)
        print(f"{case}\n  Python takes it")
        failed += 1
    except (ValueError, SystemExit):
        pass
    finally:
        sys.stderr = stderr
    try:
        our_plan(words)
        print(f"{case}\n  taken, but Python refuses it")
        failed += 1
    except ValueError as error:
        assert str(error).startswith("accelerate: "), error
for name in DIFFERENCES.keys() - seen:
    print(f"the difference '{name}' does not show in any case")
    failed += 1
if failed:
    sys.exit(f"{failed} of {len(cases)} cases differ")
print(f"{len(cases)} command lines give the same variables, but for: {', '.join(DIFFERENCES)}; {len(refused)} are refused by both")
