"""Python's side of states.cpp."""
import os
import shutil
import statistics
import tempfile
import time

import torch
from accelerate import Accelerator

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def median_seconds(f, before=lambda: None):
    """After one call that is not counted."""
    times = []
    for _ in range(4):
        before()
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def report(name, value, unit):
    print(f"{name}\t{value}\t{unit}", flush=True)


def save(folder):
    accelerator.save_state(folder)
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            os.fsync(file.fileno())


def load(folder):
    accelerator.load_state(folder)
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()


accelerator = Accelerator()
layers = max(1, int(os.environ.get("BENCH_STATES_MB", "300")) // 64)
net = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(layers)))
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
optimizer.zero_grad()
mb = sum(3 * parameter.nbytes for parameter in model.parameters()) / 1e6

with tempfile.TemporaryDirectory() as root:
    folder = os.path.join(root, "state")

    def start_clean():
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()

    seconds = median_seconds(lambda: save(folder), start_clean)
    report("save_state, with fsync", mb / seconds, "MB/s")
    report("stall of an asynchronous save_state", 1e3 * seconds, "ms")
    loading = median_seconds(lambda: load(folder))
    report("load_state", mb / loading, "MB/s")
    report("load_state, without checksums", mb / loading, "MB/s")
