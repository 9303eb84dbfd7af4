"""Writes folder/, an offload folder of Python Accelerate with several dtypes.

    python tests/reference/offload/write_reference.py
"""

import pathlib
import shutil

import torch
from accelerate.utils import offload_state_dict

here = pathlib.Path(__file__).parent


def tensors():
    """As offloaded_tensors() of tests/checkpoint/offloaded.h."""
    numbers = torch.arange(6)
    return {
        "linear.weight": numbers.reshape(2, 3).to(torch.float32) / 4,
        "linear.bias": numbers.to(torch.bfloat16) / 3,
        "turned": numbers.reshape(2, 3).t().to(torch.float64),
        "half": numbers.to(torch.float16) - 2,
        "flags": numbers % 2 == 0,
        "step": torch.tensor(19),
        "scale": torch.tensor(1.5, dtype=torch.bfloat16),
        "phase": torch.complex(numbers.float(), -numbers.float()),
        "small": (numbers - 3).to(torch.int8),
        "byte": numbers.to(torch.uint8),
    }


def main():
    shutil.rmtree(here / "folder", ignore_errors=True)
    offload_state_dict(here / "folder", tensors())


if __name__ == "__main__":
    main()
