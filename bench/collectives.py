"""Python Accelerate's side of collectives.cpp: the same work, the same names, two processes under torchrun."""
import time

import torch
from accelerate import Accelerator
from accelerate.utils import gather, gather_object, reduce

accelerator = Accelerator(cpu=True)
torch.set_num_threads(1)


def resident_megabytes():
    with open("/proc/self/status") as status:
        return next(float(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS:"))


def report(name, value, unit):
    if accelerator.is_main_process:
        print(f"{name}\t{value}\t{unit}", flush=True)


def microseconds(repeats, f):
    for _ in range(20):
        f()
    accelerator.wait_for_everyone()
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            f()
        rounds.append((time.perf_counter() - start) / repeats * 1e6)
    return sorted(rounds)[2]


report("resident memory, state up", resident_megabytes(), "MB")
small, large = torch.ones(256), torch.ones(1 << 20)
report("gather 1 KB", microseconds(300, lambda: gather(small)), "us")
report("gather 4 MB", microseconds(30, lambda: gather(large)), "us")
report("reduce 1 KB", microseconds(300, lambda: reduce(small)), "us")
report("reduce 4 MB", microseconds(30, lambda: reduce(large)), "us")
report("gather tree of 8 tensors", microseconds(100, lambda: gather({i: torch.ones(16) for i in range(8)})), "us")
records = [{"id": 3, "name": "sample", "score": [0.5, 0.25]}] * 8
report("gather_object of 8 records", microseconds(200, lambda: gather_object(records)), "us")
report("barrier", microseconds(300, accelerator.wait_for_everyone), "us")
accelerator.end_training()
