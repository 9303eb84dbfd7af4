"""Python Accelerate's side of collectives.cpp: the same work, the same names, under torchrun."""
import torch
import torch.distributed
from accelerate.utils import gather, gather_object, reduce
from support import accelerator, finish, measure, report, settle

with open("/proc/self/status") as status:
    resident = next(float(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS:"))
report("resident memory, state up", resident, "MB")
torch.set_num_threads(1)
settle()

for label, size in (("8 B", 8), ("1 KB", 1 << 10), ("64 KB", 1 << 16), ("4 MB", 1 << 22), ("64 MB", 1 << 26)):
    own = torch.zeros(size // 4)
    everything = torch.zeros(accelerator.num_processes * size // 4)
    measure(f"reduce {label}", lambda: reduce(own))
    measure(f"gather {label}", lambda: gather(own))
    measure(f"all-reduce {label}", lambda: torch.distributed.all_reduce(own))
    measure(f"all-gather {label}", lambda: torch.distributed.all_gather_into_tensor(everything, own))
measure("barrier", torch.distributed.barrier)

measure("gather tree of 8 tensors", lambda: gather({i: torch.ones(16) for i in range(8)}))
records = [{"id": 3, "name": "sample", "score": [0.5, 0.25]}] * 8
measure("gather_object of 8 records", lambda: gather_object(records))
measure("wait_for_everyone", accelerator.wait_for_everyone)
finish()
