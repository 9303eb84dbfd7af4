"""Python's side of offload.cpp."""
import os
import tempfile
import time

# The same for ours is in the library: LibTorch believes in tiles that some machines announce and do not have.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
import torch  # noqa: E402
from accelerate import (
    Accelerator,
    PartialState,
    cpu_offload,
    disk_offload,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
device = PartialState().device
gpu = device.type == "cuda"
width = int(os.environ.get("BENCH_OFFLOAD_WIDTH", "8192" if gpu else "2048"))
layer_gigabytes = 2 * width * (width + 1) / 1e9
count = max(2, int(float(os.environ.get("BENCH_OFFLOAD_GB", "10" if gpu else "0.2")) / layer_gigabytes))
gigabytes = count * layer_gigabytes


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(count):
            self.register_module(f"layer{i}", torch.nn.Linear(width, width, dtype=torch.bfloat16))

    def forward(self, x):
        for layer in self.children():
            x = torch.nn.functional.gelu(layer(x))
        return x


def filled():
    """With values, which do not matter."""
    with init_empty_weights():
        net = Layers()
    net.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1e-3)
    return net


def synchronize():
    if gpu:
        torch.cuda.synchronize()


def seconds(repeats, f):
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        f()
    synchronize()
    return (time.perf_counter() - start) / repeats


def report(name, value, unit):
    print(f"{name}\t{value}\t{unit}", flush=True)


@torch.no_grad()
def forwards(name, model):
    for batch in (1, 4, 16, 64):
        x = torch.randn(batch, width, dtype=torch.bfloat16, device=device)
        model(x)
        report(f"{name}, batch {batch}", gigabytes / seconds(2, lambda: model(x)), "GB/s")


if not gpu:
    def build():
        with init_empty_weights():
            return torch.nn.Sequential(*(torch.nn.Linear(10_000, 10_000) for _ in range(1000)))

    report("init_empty_weights, 10^11 parameters", seconds(1, build), "s")

net = filled()
with tempfile.TemporaryDirectory() as folder:
    Accelerator().save_model(net, f"{folder}/checkpoint", max_shard_size="1TB")
    forwards("cpu_offload forward", cpu_offload(net, execution_device=device))
    net = filled()
    forwards("disk_offload forward", disk_offload(net, f"{folder}/spill", execution_device=device))
    del net
    with init_empty_weights():
        empty = Layers()
    report(
        "load_checkpoint_and_dispatch",
        gigabytes / seconds(1, lambda: load_checkpoint_and_dispatch(
            empty, f"{folder}/checkpoint", device_map={"": 0 if gpu else "cpu"})),
        "GB/s",
    )
