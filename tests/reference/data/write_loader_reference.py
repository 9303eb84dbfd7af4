"""Writes loader.json: what Python's DataLoader draws, and which samples its batches hold. Run with torch 2.11."""

import json
import pathlib

import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler


def case(kind, own, seed, size, batch_size, drop_last, workers):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 100) if own else None
    options = {"batch_size": batch_size, "drop_last": drop_last, "generator": generator, "num_workers": workers}
    if kind == "shuffle":
        options["shuffle"] = True
    elif kind == "weighted":
        options["sampler"] = WeightedRandomSampler([1.0 + i % 3 for i in range(size)], size, generator=generator)
    elif kind == "subset":
        options["sampler"] = SubsetRandomSampler(range(0, size, 2), generator=generator)
    loader = DataLoader(range(size), **options)
    passes, seeds = [], []
    for _ in range(3):
        iterator = iter(loader)
        seeds.append(str(iterator._base_seed))
        passes.append([batch.tolist() for batch in iterator])
    after = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
    return {
        "kind": kind, "own": own, "seed": seed, "size": size, "batch_size": batch_size, "drop_last": drop_last,
        "length": len(loader), "base_seeds": seeds, "passes": passes, "after": str(after),
    }


if __name__ == "__main__":
    cases = [
        case(kind, own, seed, size, batch_size, drop_last, 0)
        for kind in ("sequential", "shuffle", "weighted", "subset")
        for own in (False, True)
        for seed, size, batch_size, drop_last in ((0, 10, 3, False), (42, 17, 4, True), (7, 8, 8, False))
    ]
    # Workers change nothing.
    assert case("shuffle", True, 0, 10, 3, False, 2) == case("shuffle", True, 0, 10, 3, False, 0)
    path = pathlib.Path(__file__).with_name("loader.json")
    path.write_text(json.dumps(cases) + "\n")
