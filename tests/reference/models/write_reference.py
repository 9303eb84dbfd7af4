"""Writes folders with Accelerator.save_model, one per case: <model>_<limit>_<format>.

    python tests/reference/models/write_reference.py
"""

import pathlib
import shutil

import torch
from accelerate import Accelerator

here = pathlib.Path(__file__).parent


class Small(torch.nn.Module):
    """The model of Accelerate's own tests."""

    def __init__(self):
        super().__init__()
        self.linear1 = torch.nn.Linear(3, 4)
        self.batchnorm = torch.nn.BatchNorm1d(4)
        self.linear2 = torch.nn.Linear(4, 5)


class Leaf(torch.nn.Module):
    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self.register_parameter(name, tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)


class Tied(torch.nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self):
        super().__init__()
        weight = torch.nn.Parameter(torch.zeros(6, 4))
        self.embed = Leaf(weight=weight)
        self.block = Leaf(weight=torch.zeros(4, 4), bias=torch.zeros(4))
        self.head = Leaf(weight=weight)


class Mixed(torch.nn.Module):
    """Several dtypes, a scalar, a tensor without elements, one larger than the limit in the middle."""

    def __init__(self):
        super().__init__()
        self.first = Leaf(low=torch.zeros(3, dtype=torch.float16), brain=torch.zeros(2, 3, dtype=torch.bfloat16))
        self.second = Leaf(big=torch.zeros(5, 4), step=torch.tensor(0), flags=torch.zeros(5, dtype=torch.bool))
        self.third = Leaf(none=torch.zeros(0, 3), last=torch.zeros(7, dtype=torch.float64))


def filled(model):
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.copy_((torch.arange(tensor.numel()) + number).reshape(tensor.shape))
    return model


def main():
    accelerator = Accelerator(cpu=True)
    for model in (Small, Tied, Mixed):
        for limit in ("10GB", 100, 32):
            for format in ("safetensors", "bin"):
                if format == "bin" and limit == 32:
                    continue
                folder = here / f"{model.__name__.lower()}_{limit}_{format}"
                shutil.rmtree(folder, ignore_errors=True)
                accelerator.save_model(filled(model()), folder, max_shard_size=limit, safe_serialization=format == "safetensors")


if __name__ == "__main__":
    main()
