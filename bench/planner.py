"""Python's side of planner.cpp."""
import time

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes, get_balanced_memory


class Layer(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        if inputs > 0:
            self.weight = torch.nn.Parameter(torch.empty(outputs, inputs))
        if outputs > 0:
            self.bias = torch.nn.Parameter(torch.empty(outputs))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qkvo":
            setattr(self, name, Layer(64, 64))
        self.norm1, self.norm2 = Layer(1, 64), Layer(1, 64)
        self.up, self.down = Layer(64, 256), Layer(256, 64)
        self.act = Layer(0, 0)


class Net(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        embedding = torch.nn.Parameter(torch.empty(1000, 64))
        self.embedding = Layer(0, 0)
        self.embedding.weight = embedding
        self.layers = torch.nn.ModuleList([Block() for _ in range(blocks)])
        self.head = Layer(0, 0)
        self.head.weight = embedding


def once(name, f):
    start = time.perf_counter()
    result = f()
    print(f"{name}\t{(time.perf_counter() - start) * 1e3}\tms", flush=True)
    return result


with torch.device("meta"):
    net = Net(1000)
total = once("compute_module_sizes", lambda: compute_module_sizes(net)[""])
budget = {gpu: total // 4 for gpu in range(4)} | {"cpu": total}
once("get_balanced_memory, blocks stay whole", lambda: get_balanced_memory(net, dict(budget), no_split_module_classes=["Block"]))
once("infer_auto_device_map", lambda: infer_auto_device_map(net, dict(budget)))
once("infer_auto_device_map, blocks stay whole", lambda: infer_auto_device_map(net, dict(budget), no_split_module_classes=["Block"]))
