"""config.py INTEROP_CONFIG: round trips of config files between Python Accelerate and the native reader and writer."""
import itertools
import pathlib
import random
import subprocess
import sys
import tempfile

from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

tool = sys.argv[1]
work = pathlib.Path(tempfile.mkdtemp())
random.seed(0)

texts = ["no", "yes", "on", "1", "1e8", "0x1f", "1:30", "~", "null", "", "a b", "a: b", "# c", "-x", "'q'", '"', "é", "tab\there",
         "{a}", "[b]", "*c", "&d", "!e", "%f", "@g", "`h", "x" * 200, "multi\nline", " lead", "trail ", "2024-01-01", "3.14", "-.5", "=", "<<"]


def nested(seed):
    rng = random.Random(seed)
    pick = lambda: rng.choice([True, False, None, 0, -3, 2.5, 1e300, rng.choice(texts), [rng.choice(texts), 1, None], [], {"k": rng.choice(texts)}])
    return {f"fsdp_{name}": pick() for name in ("transformer_layer_cls_to_wrap", "min_num_params", "version", "offload_params")}


count = 0
for kind, precision, number in itertools.product(["NO", "MULTI_CPU", "MULTI_GPU", "FSDP"], [None, "no", "bf16"], range(12)):
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type=kind, mixed_precision=precision, use_cpu=number % 2 == 0, debug=False,
        num_processes=number + 1, main_process_ip=random.choice(texts) or None, gpu_ids=random.choice(["all", "0,1", "3"]), fsdp_config=nested(count))
    ours_out = {}
    for suffix, write in ((".yaml", config.to_yaml_file), (".json", config.to_json_file)):
        source, copy = work / f"python{suffix}", work / f"ours{suffix}"
        write(source)
        done = subprocess.run([tool, source, copy], capture_output=True, text=True)
        assert done.returncode == 0, f"{source.read_text()}\n{done.stderr}"
        if source.read_bytes() != copy.read_bytes():
            sys.exit(f"written differently.\nPython:\n{source.read_text()}\nours:\n{copy.read_text()}")
        again = load_config_from_file(str(copy))
        assert again == load_config_from_file(str(source)), copy.read_text()
    count += 1
print(f"{count} configs, YAML and JSON, identical in both directions")
