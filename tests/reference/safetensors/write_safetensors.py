"""Writes files.json and dtypes.safetensors: run it in this folder with the Python of `make interop`.

files.json has length and FNV-1a hash of the files that Python's safetensors writes for 200 random state dicts. The C++ side
(tests/checkpoint/random_state.h) makes the same tensors from the same numbers.
"""

import json
import pathlib

import torch
from safetensors.torch import save

DTYPES = [
    torch.bool, torch.float4_e2m1fn_x2, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.uint32,
    torch.float32, torch.complex64, torch.float64, torch.int64, torch.uint64,
]
PIECES = ["weight", "bias", "layers", "0", "é", "重み", "😀", 'a"b', "back\\slash", "new\nline", "\x1f\x7f", "", "a/b", "\u2028"]


class Numbers:
    """A linear congruential generator: the same in all languages."""

    def __init__(self, seed):
        self.state = seed

    def below(self, limit):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % limit


def random_tensor(numbers):
    dtype = DTYPES[numbers.below(len(DTYPES))]
    rank = numbers.below(4)
    if dtype is torch.float4_e2m1fn_x2 and rank == 0:  # a pair of numbers is no scalar
        rank = 1
    shape = [numbers.below(5) for _ in range(rank)]
    count = torch.empty(shape, dtype=torch.uint8).numel() * torch.empty(0, dtype=dtype).element_size()
    data = bytearray(numbers.below(2 if dtype is torch.bool else 256) for _ in range(count))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def random_text(numbers):
    return ".".join(PIECES[numbers.below(len(PIECES))] for _ in range(1 + numbers.below(3)))


def random_state(seed):
    """Tensors by name, and metadata or None."""
    numbers = Numbers(seed)
    tensors = {}
    for i in range(numbers.below(12)):
        name = f"{random_text(numbers)}.{i}"
        tensors[name] = random_tensor(numbers)
    kind = numbers.below(3)
    if kind == 0:
        return tensors, None
    return tensors, {"format": "pt"} if kind == 1 else {random_text(numbers): random_text(numbers)}


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def main():
    files = []
    for seed in range(200):
        data = save(*random_state(seed))
        files.append({"bytes": len(data), "fnv1a": fnv1a(data)})
    lines = ",\n".join(json.dumps(file) for file in files)
    pathlib.Path("files.json").write_text(f"[\n{lines}\n]\n")

    numbers = Numbers(1)
    tensors = {}
    for dtype in DTYPES:
        size = torch.empty(0, dtype=dtype).element_size()
        data = bytearray(numbers.below(2 if dtype is torch.bool else 256) for _ in range(6 * size))
        tensors[str(dtype).split(".")[1]] = torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(2, 3)
    pathlib.Path("dtypes.safetensors").write_bytes(save(tensors, {"format": "pt"}))


if __name__ == "__main__":
    main()
