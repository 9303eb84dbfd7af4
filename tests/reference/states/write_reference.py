"""Writes states of optimizers, schedulers and the scaler with torch.save, and what follows them. Run with torch 2.11.

optimizers.pt: for each case `params` and `state`, the state_dict(), after 5 steps, and `next`, the parameters after 5 more;
parameters and gradients are those of ../optimizers. schedulers.pt: for each case of ../schedulers `optimizer` and `state`,
the two state_dict()s, after 7 steps, and `lr`, the learning rates of two groups in the 20 steps that follow.
"""

import pathlib
import sys
import warnings

import torch

HERE = pathlib.Path(__file__).parent
for folder in ("optimizers", "schedulers"):
    sys.path.insert(0, str(HERE.parent / folder))
sys.dont_write_bytecode = True

from write_optimizers import SHAPES, gradient, parameter  # noqa: E402
from write_schedulers import CASES, STATE_AFTER, advance, optimizer, optimizer_of  # noqa: E402

warnings.simplefilter("ignore")

# By name, as in tests/checkpoint/state_cases.cpp.
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD_plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}
BEFORE, AFTER = 5, 5
LRS = 20


def step(opt, params, number):
    for p, tensor in enumerate(params):
        tensor.grad = gradient(p, number, torch.float64)
    opt.step()


def copies(params):
    return [tensor.detach().clone() for tensor in params]


def groups(params):
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]


def optimizer_case(build):
    params = [parameter(p, torch.float64) for p in range(len(SHAPES))]
    opt = build(groups(params))
    for number in range(1, BEFORE + 1):
        step(opt, params, number)
    state = opt.state_dict()
    state["state"] = {i: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for i, s in state["state"].items()}
    case = {"params": copies(params), "state": state}
    for number in range(BEFORE + 1, BEFORE + AFTER + 1):
        step(opt, params, number)
    return case | {"next": copies(params)}


def scheduler_case(name, build):
    opt = optimizer(optimizer_of(name))
    scheduler = build(opt)
    for number in range(1, STATE_AFTER + 1):
        advance(name, scheduler, opt, number)
    # Through a file, so that the dicts are those of this moment.
    torch.save({"optimizer": opt.state_dict(), "state": scheduler.state_dict()}, HERE / "case.pt")
    case = torch.load(HERE / "case.pt", weights_only=True)
    lrs = []
    for number in range(STATE_AFTER + 1, STATE_AFTER + LRS + 1):
        advance(name, scheduler, opt, number)
        lrs.append([group["lr"] for group in opt.param_groups])
    return case | {"lr": lrs}


def tolerance(case):
    """How far two processors may differ after 10 steps in float64."""
    return 1e-14


def main():
    torch.save({name: optimizer_case(build) for name, build in OPTIMIZERS.items()}, HERE / "optimizers.pt")
    # Nobody interferes here: the cases by_hand test that in ../schedulers.
    cases = {name: build for name, build in CASES.items() if not name.endswith("by_hand")}
    torch.save({name: scheduler_case(name, build) for name, build in cases.items()}, HERE / "schedulers.pt")
    (HERE / "case.pt").unlink()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5)
    scaler.scale(torch.ones(1))
    torch.save(scaler.state_dict(), HERE / "scaler.pt")


if __name__ == "__main__":
    main()
