"""Python's side of gpu_training.cpp: the same steps with Accelerate and torch's fused AdamW."""
import os
import statistics
import time

import torch
from accelerate import Accelerator
from gpt import Gpt
from torch import nn

accelerator = Accelerator(mixed_precision="bf16")
first = True


def report(name, value, unit):
    print(f"{name}\t{value}\t{unit}", flush=True)


def since_start():
    ticks = float(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1e3 - ticks * 1e3 / os.sysconf("SC_CLK_TCK")


def measure(name, config, steps):
    global first
    torch.manual_seed(0)
    net = Gpt(*config)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True))
    prepared = since_start()
    vocab, block = config[:2]
    ids = torch.randint(vocab, (8, block), device=accelerator.device)
    target = torch.randint(vocab, (8, block), device=accelerator.device)

    def step():
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), target.flatten())
            accelerator.backward(loss)
            optimizer.step()

    def wait():
        list(net.parameters())[-1].sum().item()

    step()
    wait()
    if first:
        report("start to a model on the device", prepared, "ms")
        report("start to the end of the first step", since_start(), "ms")
        first = False
    for _ in range(8):
        step()
    times = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append((time.perf_counter() - start) / steps * 1e6)
    report(f"{name}: step", statistics.median(times), "us")
    accelerator.free_memory()


report("start to the accelerator", since_start(), "ms")
measure("GPT 3.3 M, 8 x 128", (256, 128, 4, 4, 256, False), 200)
measure("GPT 124 M, 8 x 1024", (50304, 1024, 12, 12, 768, True), 20)
if accelerator.num_processes > 1:
    torch.distributed.destroy_process_group()
