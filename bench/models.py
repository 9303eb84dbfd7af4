"""Python's side of models.cpp."""
import os
import tempfile
import time

import torch
from accelerate import Accelerator
from accelerate.utils import load_checkpoint_in_model

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def report(name, f):
    start = time.perf_counter()
    f()
    print(f"{name}\t{megabytes / (time.perf_counter() - start)}\tMB/s", flush=True)


def save(target, limit, safe):
    """With the data on disk at the end, as ours."""
    accelerator.save_model(model, target, max_shard_size=limit, safe_serialization=safe)
    for name in os.listdir(target):
        with open(os.path.join(target, name), "rb") as file:
            os.fsync(file.fileno())


accelerator = Accelerator(cpu=True)
model = torch.nn.Module()
for i in range(max(1, int(os.environ.get("BENCH_FILES_MB", "1000")) // 4)):
    model.register_module(f"layer{i}", torch.nn.Linear(1024, 1024))
megabytes = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
for limit in ("10GB", "100MB"):
    for safe in (True, False):
        kind = f"{'safetensors' if safe else 'archives'}, shards of {limit}"
        with tempfile.TemporaryDirectory() as target:
            os.sync()
            report(f"save_model, {kind}", lambda: save(target, limit, safe))
            report(f"load_checkpoint_in_model, {kind}", lambda: load_checkpoint_in_model(model, target))
