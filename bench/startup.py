"""Python Accelerate's side of startup.cpp."""
import os
import time

import torch
from accelerate import PartialState
from accelerate.utils import gather

state = PartialState(cpu=os.environ.get("ACCELERATE_USE_CPU") == "1")  # Python's reads no variable here
total = gather(torch.ones(4, device=state.device)).sum().item()
if state.is_main_process and total == 4 * state.num_processes:
    ticks = float(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
    elapsed = time.clock_gettime(time.CLOCK_BOOTTIME) * 1e3 - ticks * 1e3 / os.sysconf("SC_CLK_TCK")
    print(f"start to first gather\t{elapsed}\tms")
    resident = next(float(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmRSS:"))
    print(f"resident memory then\t{resident}\tMB")
state.destroy_process_group()
