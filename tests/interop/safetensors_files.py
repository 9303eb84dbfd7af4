"""safetensors_files.py PROGRAM REFERENCE: compares files of interop_safetensors with those of Python's library."""

import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file

program, reference = sys.argv[1:]
sys.path.insert(0, reference)
from write_safetensors import random_state  # noqa: E402


def same(a, b):
    """Equal to the byte, so that NaN is equal to itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.numel() == 0 or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


with tempfile.TemporaryDirectory() as work:
    ours, python, copies = (pathlib.Path(work, name) for name in ("ours", "python", "copies"))
    for folder in (ours, python, copies):
        folder.mkdir()
    subprocess.run([program, "write", ours], check=True)
    count = tensors = 0
    for seed in range(200):
        state, metadata = random_state(seed)
        save_file(state, python / str(seed), metadata)
        assert (ours / str(seed)).read_bytes() == (python / str(seed)).read_bytes(), f"seed {seed}: other bytes"
        with safe_open(ours / str(seed), "pt") as file:
            assert file.metadata() == metadata, f"seed {seed}: other metadata"
            assert sorted(state) == sorted(file.keys())
            for name, tensor in state.items():
                assert same(file.get_tensor(name), tensor), f"seed {seed}: {name!r} differs"
                tensors += 1
        count += 1
    subprocess.run([program, "copy", python, copies], check=True)
    for path in python.iterdir():
        assert (copies / path.name).read_bytes() == path.read_bytes(), f"seed {path.name}: the copy has other bytes"
    print(f"{count} state dicts with {tensors} tensors: the same bytes in both directions")
