"""Writes random.json: what Python draws after set_seed. Run with accelerate 1.13 and torch 2.11."""

import json
import pathlib
import random

import torch
from accelerate.utils import set_seed


def tolerance(case):
    """How far two processors may differ: the logarithm and the cosine behind randn are approximated in vectors."""
    return 1e-6


def main():
    cases = []
    for seed in (0, 1, 42, 1234, 2**32 - 1):
        set_seed(seed)
        case = {"seed": seed, "host": [random.getrandbits(32) for _ in range(5)]}
        case["rand"] = torch.rand(4).double().tolist()
        case["randn"] = torch.randn(20).double().tolist()
        case["randperm"] = torch.randperm(10).tolist()
        case["randint"] = torch.randint(0, 1000, (5,)).tolist()
        cases.append(case)

    # Python's random module takes seeds that numpy, and so set_seed, refuses.
    host = []
    for seed in (2**32, 2**40 + 7, 2**64 - 1):
        random.seed(seed)
        host.append({"seed": str(seed), "host": [random.getrandbits(32) for _ in range(700)][-3:]})

    state = torch.Generator().manual_seed(7)
    torch.rand(3, generator=state)
    states = {"bytes": state.get_state().numel(), "next": torch.rand(2, generator=state).double().tolist()}

    path = pathlib.Path(__file__).with_name("random.json")
    path.write_text(json.dumps({"set_seed": cases, "host": host, "generator": states}, indent=1) + "\n")


if __name__ == "__main__":
    main()
