"""Python's side of gpu_training.cpp: the same steps with Accelerate and torch's fused optimizers.

In place of captured steps: torch.compile, and as the best setting its mode reduce-overhead.
"""
import os
import statistics
import time

import torch
from accelerate import Accelerator
from gpt import Gpt
from resnet import make_resnet
from torch import nn

accelerator = Accelerator(mixed_precision="bf16")
first = True


def report(name, value, unit):
    print(f"{name}\t{value}\t{unit}", flush=True)


def since_start():
    ticks = float(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1e3 - ticks * 1e3 / os.sysconf("SC_CLK_TCK")


def peak_memory():
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


def time_of(step, wait, steps):
    for _ in range(8):
        step()
    times = []
    for _ in range(int(os.environ.get("BENCH_GPU_ROUNDS", "5"))):
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append((time.perf_counter() - start) / steps * 1e6)
    return statistics.median(times)


def measure(name, net, optimizer, x, y, steps):
    global first
    model, optimizer = accelerator.prepare(net, optimizer)
    prepared = since_start()

    def step_of(forward):
        def step():
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(forward(x).flatten(0, -2), y.flatten())
                accelerator.backward(loss)
                optimizer.step()

        return step

    def wait():
        list(net.parameters())[-1].sum().item()

    peak_memory()
    step_of(model)()
    wait()
    if first:
        report("start to a model on the device", prepared, "ms")
        report("start to the end of the first step", since_start(), "ms")
        first = False
    compiled = {"captured step": "default", "captured step, best": "reduce-overhead"}
    for what in ("step", *compiled):
        # Else the recompilations of earlier cases would count.
        torch._dynamo.reset()
        forward = torch.compile(model, mode=compiled[what]) if what in compiled else model
        report(f"{name}: {what}", time_of(step_of(forward), wait, steps), "us")
        memory, _, best = what.partition(", ")
        report(f"{name}: {memory}, peak memory" + (f", {best}" if best else ""), peak_memory(), "GB")
    accelerator.free_memory()


def measure_gpt(name, config, steps):
    torch.manual_seed(0)
    net = Gpt(*config)
    vocab, block = config[:2]
    ids = torch.randint(vocab, (8, block), device=accelerator.device)
    target = torch.randint(vocab, (8, block), device=accelerator.device)
    measure(name, net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True), ids, target, steps)


def measure_resnet():
    torch.manual_seed(0)
    net = make_resnet()
    images = torch.randn(64, 3, 64, 64, device=accelerator.device)
    labels = torch.randint(100, (64,), device=accelerator.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, fused=True)
    measure("ResNet, 64 x 3 x 64 x 64", net, optimizer, images, labels, 50)


report("start to the accelerator", since_start(), "ms")
parts = os.environ.get("BENCH_GPU_PARTS", "gpt3m gpt124 resnet").split()
if "gpt3m" in parts:
    measure_gpt("GPT 3.3 M, 8 x 128", (256, 128, 4, 4, 256, False), 200)
if "gpt124" in parts:
    measure_gpt("GPT 124 M, 8 x 1024", (50304, 1024, 12, 12, 768, True), 20)
if "resnet" in parts:
    measure_resnet()
if accelerator.num_processes > 1:
    torch.distributed.destroy_process_group()
