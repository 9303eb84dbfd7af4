"""Writes grad_scaler.json: what torch.amp.GradScaler does step by step.

    python write_grad_scaler.py        (torch 2.11.0)

Each run has options and a list of steps. A step says what the gradient before unscaling is ("finite" is the loss's own, "inf" and "nan" are put
there), and holds whether it was carried out, and factor, tracker and parameter afterwards. The loss is (w * [1, 2, 3]).sum(), the optimizer SGD with lr 0.1, w starts as ones.
"""
import json
import math
import os

import torch


def run(options, kinds):
    scaler = torch.amp.GradScaler("cpu", **options)
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    steps = []
    for kind in kinds:
        before = w.tolist()
        optimizer.zero_grad()
        scaler.scale((w * torch.tensor([1.0, 2.0, 3.0])).sum()).backward()
        if kind == "inf":
            w.grad[1] = math.inf
        if kind == "nan":
            w.grad[2] = math.nan
        scaler.step(optimizer)
        scaler.update()
        steps.append({"kind": kind, "done": w.tolist() != before, "scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "w": w.tolist(),
                      "state": scaler.state_dict()})
    return {"options": options, "steps": steps}


def tolerance(run):
    """How far two processors may differ: some fuse a product and a sum into one rounding."""
    return 1e-7


def main():
    kinds = ["finite", "finite", "inf", "finite", "finite", "nan", "nan", "finite", "finite", "finite", "inf", "finite"]
    runs = [
        run({"init_scale": 1024.0, "growth_interval": 2}, kinds),
        run({"init_scale": 3.0, "growth_factor": 1.5, "backoff_factor": 0.3, "growth_interval": 1}, kinds),
        run({"init_scale": 2.0**126, "growth_interval": 1}, ["finite"] * 4),  # a factor with which they overflow by themselves
        run({}, kinds),
    ]
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "grad_scaler.json"), "w") as file:
        json.dump(runs, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
