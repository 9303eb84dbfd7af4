"""Python's side of files.cpp, with the safetensors library, torch.save and Accelerate."""
import functools
import os
import statistics
import tempfile
import time

import torch
from accelerate.utils import load_checkpoint_in_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def median_seconds(f, before=lambda: None):
    """After one call that is not counted: files.cpp says why."""
    f()
    times = []
    for _ in range(5):
        before()
        times.append(seconds(f))
    return statistics.median(times)


def report(name, value, unit):
    print(f"{name}\t{value}\t{unit}", flush=True)


def save(write, path):
    write()
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def read_all(tensors):
    for tensor in tensors.values():
        tensor.view(torch.int64).sum().item()


def load_to_gpu(path):
    load_file(path, device="cuda:0")
    torch.cuda.synchronize()


class Layer(torch.nn.Module):
    def __init__(self, state):
        super().__init__()
        for name, tensor in state.items():
            setattr(self, name, torch.nn.Parameter(torch.empty_like(tensor, device="cuda:0"), requires_grad=False))


def fill_gpu_model(net, path):
    load_checkpoint_in_model(net, path, device_map={"": 0})
    torch.cuda.synchronize()


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.safetensors")
    archive = os.path.join(folder, "model.bin")
    model = {}
    for i in range(max(1, int(os.environ.get("BENCH_FILES_MB", "1000")) // 32)):
        model[f"model.layers.{i}.weight"] = torch.ones(4096, 4096, dtype=torch.bfloat16)
        model[f"model.layers.{i}.norm"] = torch.ones(4096, dtype=torch.bfloat16)
    mb = sum(tensor.nbytes for tensor in model.values()) / 1e6


    def rate_of_saving(write, path):
        def start_clean():
            os.remove(path)
            os.sync()

        return mb / median_seconds(lambda: save(write, path), start_clean)

    report("save, with fsync", rate_of_saving(lambda: save_file(model, path, {"format": "pt"}), path), "MB/s")
    report("load, mapped, no byte touched", 1e6 * median_seconds(lambda: load_file(path)), "us")
    report("load, mapped, every byte read once", mb / median_seconds(lambda: read_all(load_file(path))), "MB/s")
    report("load into memory", mb / median_seconds(lambda: load_file(path, backend="pread")), "MB/s")
    if torch.cuda.is_available():
        report("load to the GPU", mb / median_seconds(lambda: load_to_gpu(path)), "MB/s")
        layers = [{name: model[f"model.layers.{i}.{name}"] for name in ("weight", "norm")} for i in range(len(model) // 2)]
        net = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(map(Layer, layers))})})
        report("load_checkpoint_in_model on the GPU", mb / median_seconds(lambda: fill_gpu_model(net, path)), "MB/s")
        del net
    os.remove(path)
    report("torch_save, with fsync", rate_of_saving(lambda: torch.save(model, archive), archive), "MB/s")
    load_archive = functools.partial(torch.load, archive, weights_only=True)
    report("torch_load into memory", mb / median_seconds(load_archive), "MB/s")
    report("torch_load, mapped, no byte touched", 1e6 * median_seconds(lambda: load_archive(mmap=True)), "us")
    report("torch_load, mapped, every byte read once", mb / median_seconds(lambda: read_all(load_archive(mmap=True))), "MB/s")
    many = os.path.join(folder, "many.safetensors")
    whole = torch.zeros(200_000)
    save_file({f"model.layers.{i}.mlp.weight": whole[2 * i : 2 * i + 2] for i in range(100_000)}, many)
    report("open, 100,000 tensors", 1e3 * median_seconds(lambda: safe_open(many, "pt").keys()), "ms")
