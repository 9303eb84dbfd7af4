"""Writes files of torch.save for tests/checkpoint. Run with torch 2.11 and numpy.

No number is drawn, so that every run writes the same bytes. `dtypes.pt` has a tensor over the bytes 0..47 (0 and 1 for
bool) for each dtype; the other files are described where they are written.
"""

import collections
import pathlib
import pickle
import random
import re

import numpy as np
import torch

HERE = pathlib.Path(__file__).parent

# fmt: off
DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex128", "complex64",
    "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2",
]
# fmt: on


def dtypes():
    tensors = {}
    for name in DTYPES:
        numbers = torch.arange(48, dtype=torch.uint8)
        if name == "bool":
            numbers = numbers % 2
        tensors[name] = numbers.view(getattr(torch, name))
    return tensors


def plain():
    return {
        "none": None,
        "truth": [True, False],
        "ints": [0, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 3000000000, 2**63 - 1, -(2**63)],
        "doubles": (0.0, -0.0, 1e-05, float("inf"), 0.1),
        "texts": ["", "weight", "\u00e4\u4e2d\U0001f600", "weight"],
        "bytes": [b"", b"\x00\xff\x80abc"],
        "bytearray": bytearray(b"\x01\x02"),
        "nested": {1: {"a": []}, True and 7: (), "ordered": collections.OrderedDict([("b", 1), ("a", 2)])},
        "size": torch.Size([2, 3]),
        "float64": np.float64(2.5),
        "int64": np.int64(-3),
        "bool_": np.bool_(True),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "counter": collections.Counter({3: 1, 5: 2}),
    }


def objects():
    return {
        "big": 2**64,
        "set": {1},
        "complex": 1 + 2j,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "pairs": {(1, 2): 3},
        "sparse": torch.eye(2).to_sparse(),
    }


def shared():
    base = torch.arange(12, dtype=torch.float32)
    weight = base.view(3, 4)
    return {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "row": weight[1],
        "step": base[1::3],
        "expanded": torch.tensor([7.0]).expand(2, 3),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "grad": torch.zeros(1, requires_grad=True),
    }


def flagged():
    """Views whose values are not those of their storage, and the same values in storages of their own."""
    base = torch.complex(torch.arange(6.0), torch.arange(6.0) + 10).view(2, 3)
    views = {
        "conj": base.conj(),
        "neg": base.clone().conj().imag,
        "half": base.to(torch.complex32).conj(),
        "both": torch._neg_view(base.conj()),
        "parameter": torch.nn.Parameter(base.conj()),
    }
    return {"views": views, "values": {name: view.detach().resolve_conj().resolve_neg().clone() for name, view in views.items()}}


def random_states():
    """As Accelerate's save_accelerator_state does it on a machine without GPUs."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    return {
        "step": 11,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }


def main():
    torch.save(dtypes(), HERE / "dtypes.pt")
    torch.save(plain(), HERE / "plain.pt")
    torch.save(objects(), HERE / "objects.pt")
    torch.save(shared(), HERE / "shared.pt")
    torch.save(flagged(), HERE / "flagged.pt")
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Conv1d(1, 2, 1, bias=False))
    with torch.no_grad():
        module[1].weight.fill_(0.5)
    torch.save(module.state_dict(), HERE / "module.v1.bin")  # an OrderedDict with _metadata; a name with two dots
    torch.save(random_states(), HERE / "random_states_0.pkl")
    write_legacy(HERE / "legacy.pt")
    (HERE / "bare.pkl").write_bytes(pickle.dumps({"epoch": 3}, protocol=2))
    # As older versions wrote it: without the entries whose names begin with a dot, and without byteorder.
    older(HERE / "shared.pt", HERE / "shared_1_6.pt")


def write_legacy(target):
    """The format before Torch 1.6. Its keys are addresses: one storage, whose key is replaced."""
    weight = torch.arange(6.0)
    torch.save({"weight": weight, "tied": weight, "view": weight[2:4], "epoch": 3}, target, _use_new_zipfile_serialization=False)
    data = re.sub(rb"X.\x00\x00\x00\d{10,}", b"X\x0a\x00\x00\x001234567890", target.read_bytes(), flags=re.DOTALL)
    target.write_bytes(data)
    assert torch.load(target)["view"].tolist() == [2, 3]


def older(source, target):
    with open(source, "rb") as file:
        reader = torch._C.PyTorchFileReader(file)
        names = [name for name in reader.get_all_records() if not name.startswith(".") and name not in ("byteorder", "version")]
        records = [(name, bytes(reader.get_record(name))) for name in names]
    writer = torch._C.PyTorchFileWriter(str(target))
    for name, data in records:
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()


if __name__ == "__main__":
    main()
