"""torch_archive.py INTEROP_TORCH_ARCHIVE ACCELERATE REFERENCE WORK: see torch_archive.sh."""

import math
import os
import pathlib
import random
import subprocess
import sys
import warnings

import numpy as np
import torch

program, accelerate, reference, work = sys.argv[1:]
reference, work = pathlib.Path(reference), pathlib.Path(work)
sys.dont_write_bytecode = True
for folder in ("states", "optimizers", "schedulers"):
    sys.path.insert(0, str(reference / folder))
warnings.simplefilter("ignore")

import write_schedulers  # noqa: E402
from write_optimizers import gradient  # noqa: E402


def load_module(name):
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, reference / name / "write_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


states = load_module("states")


def load(path):
    return torch.load(path, weights_only=True)


def same(a, b):
    if isinstance(a, torch.Tensor):
        raw = [x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(x.to(torch.float32) for x in raw))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


def check_values():
    plain = load(work / "plain.pt")
    assert plain["ints"] == [0, 255, 256, 65535, 65536, -1, 3000000000, 2**63 - 1, -(2**63)], plain
    assert plain["doubles"] == (0.0, 0.1, 1e-300) and plain["texts"] == ["", "\u00e4\U0001f600"], plain
    assert plain["bytes"] == b"\0\xff\x80" and plain["empty"] == [b"", (), {}, []], plain
    assert plain["keys"] == {1: "overwritten", "text": (1, 2, 3, 4)}, plain
    for mmap in (False, True):
        tensors = torch.load(work / "tensors.pt", weights_only=True, mmap=mmap)
        assert tensors["tied"] is tensors["weight"]
        assert tensors["row"].data_ptr() == tensors["weight"][1].data_ptr()
        assert tensors["transposed"].equal(tensors["weight"].t()) and tensors["expanded"].stride() == (0, 0)
        assert tensors["scalar"].item() == 5 and tensors["empty"].shape == (0, 3) and tensors["grad"].requires_grad
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    module.load_state_dict(load(work / "module.bin"))
    assert type(load(work / "module.bin")).__name__ == "OrderedDict"


def check_copies():
    """What Python wrote, through us."""
    for name in ("dtypes.pt", "shared.pt", "plain.pt", "module.v1.bin", "legacy.pt"):
        subprocess.run([program, "copy", reference / "torch_archive" / name, work / name], check=True)
        old = torch.load(reference / "torch_archive" / name, weights_only=False)  # has numpy's classes
        new = load(work / name)
        if name == "plain.pt":
            old["array"] = torch.from_numpy(old["array"].copy())
            old = {key: value.item() if isinstance(value, np.generic) else value for key, value in old.items()}
            old["bytearray"], old["size"] = bytes(old["bytearray"]), tuple(old["size"])
        assert same(dict(old), dict(new)), name


def check_optimizers():
    cases = load(work / "optimizers.pt")
    assert list(cases) == sorted(states.OPTIMIZERS), list(cases)
    for name, case in cases.items():
        params = [tensor.clone().requires_grad_() for tensor in case["params"]]
        opt = states.OPTIMIZERS[name](states.groups(params))
        opt.load_state_dict(case["state"])
        for number in range(states.BEFORE + 1, states.BEFORE + states.AFTER + 1):
            states.step(opt, params, number)
        for ours, theirs in zip(case["next"], params):
            assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12), (name, ours, theirs)
    print(f"{len(cases)} optimizers of Python went on from our states")


def check_schedulers():
    cases = load(work / "schedulers.pt")
    for name, case in cases.items():
        opt = write_schedulers.optimizer(write_schedulers.optimizer_of(name))
        scheduler = write_schedulers.CASES[name](opt)
        opt.load_state_dict(case["optimizer"])
        scheduler.load_state_dict(case["state"])
        for i, lrs in enumerate(case["lr"]):
            write_schedulers.advance(name, scheduler, opt, write_schedulers.STATE_AFTER + 1 + i)
            now = [group["lr"] for group in opt.param_groups]
            assert all(math.isclose(a, b, rel_tol=1e-13, abs_tol=1e-15) for a, b in zip(lrs, now)), (name, i, lrs, now)
    print(f"{len(cases)} schedulers of Python went on from our states")


def check_random_states():
    """As Accelerate's load_accelerator_state does it."""
    found = load(work / "random_states_0.pkl")
    assert found["step"] == 0
    random.setstate(found["random_state"])
    np.random.set_state(found["numpy_random_seed"])
    torch.set_rng_state(found["torch_manual_seed"])
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item()), drawn
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(load(work / "scaler.pt"))
    assert scaler.get_scale() == 1024.0 and scaler.get_growth_interval() == 5


def check_merge():
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    model, optimizer = reference / "dcp" / "model", reference / "dcp" / "optimizer"
    merge_fsdp_weights(str(model), str(work / "python"))
    subprocess.run([accelerate, "merge-weights", model, work / "ours"], check=True, stdout=subprocess.DEVNULL)
    ours, theirs = ((work / who / "model.safetensors").read_bytes() for who in ("ours", "python"))
    assert ours == theirs, "the merged safetensors files differ"
    assert load_file(work / "ours" / "model.safetensors")["rows"].flatten().tolist() == list(range(15))
    for folder in (model, optimizer):
        merge_fsdp_weights(str(folder), str(work / "python"), safe_serialization=False)
        command = [accelerate, "merge-weights", folder, work / "ours", "--unsafe_serialization"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        assert same(*(load(work / who / "pytorch_model.bin") for who in ("ours", "python"))), folder


def main():
    os.environ["ACCELERATE_USE_CPU"] = "1"
    subprocess.run([program, "write", work], check=True)
    for check in (check_values, check_copies, check_optimizers, check_schedulers, check_random_states, check_merge):
        check()
        print(check.__name__, "passed")


if __name__ == "__main__":
    main()
