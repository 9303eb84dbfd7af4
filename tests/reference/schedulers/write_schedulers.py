"""Writes what torch.optim.lr_scheduler does in 200 steps. Run with torch 2.11.

schedulers.json: for each case `lr`, the learning rates of two parameter groups from construction on, a list for each
group; `momentum`, where it is cycled, likewise; `state`, the state_dict() after 7 steps. Dicts whose keys are no texts are
written as {"pairs": [[key, value], ...]}, infinity as {"infinity": sign}. A number that comes several times in a row is
written once, as [number, how often]. tests/training/scheduler_cases.cpp builds the same schedulers.
"""

import copy
import json
import math
import pathlib
import warnings

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

warnings.simplefilter("ignore")  # schedulers are stepped without their optimizers

STEPS = 200
STATE_AFTER = 7


def optimizer(name):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.003)]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=0.1, momentum=0.5)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups, lr=0.1, betas=(0.9, 0.999))


# The formulas of transformers.optimization.
def constant_with_warmup(warmup):
    return lambda step: float(step) / float(max(1.0, warmup)) if step < warmup else 1.0


def linear_with_warmup(warmup, steps):
    def factor(step):
        if step < warmup:
            return float(step) / float(max(1, warmup))
        return max(0.0, float(steps - step) / float(max(1, steps - warmup)))

    return factor


def cosine_with_warmup(warmup, steps, cycles=0.5):
    def factor(step):
        if step < warmup:
            return float(step) / float(max(1, warmup))
        progress = float(step - warmup) / float(max(1, steps - warmup))
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * progress)))

    return factor


def by_hand(step, groups):
    """What a user does between steps in the cases whose names end with by_hand."""
    if step == 20:
        groups[0]["lr"] = 0.5
    if step == 60:
        groups[1]["lr"] *= 2


# fmt: off
CASES = {
    "lambda": lambda o: LambdaLR(o, lambda epoch: 0.95**epoch),
    "lambda_list": lambda o: LambdaLR(o, [lambda epoch: 0.95**epoch, lambda epoch: 1.0 / (1 + epoch)]),
    "lambda_by_hand": lambda o: LambdaLR(o, lambda epoch: 0.95**epoch),
    "multiplicative": lambda o: MultiplicativeLR(o, lambda epoch: 0.95),
    "multiplicative_by_hand": lambda o: MultiplicativeLR(o, [lambda epoch: 0.95, lambda epoch: 1 - 0.001 * epoch]),
    "step": lambda o: StepLR(o, 30),
    "step_gamma": lambda o: StepLR(o, step_size=7, gamma=0.9),
    "step_by_hand": lambda o: StepLR(o, step_size=9, gamma=0.7),
    "multi_step": lambda o: MultiStepLR(o, [3, 30, 80]),
    "multi_step_twice": lambda o: MultiStepLR(o, [50, 5, 5, 20], gamma=0.3),
    "constant": lambda o: ConstantLR(o),
    "constant_long": lambda o: ConstantLR(o, factor=0.7, total_iters=40),
    "constant_by_hand": lambda o: ConstantLR(o, factor=0.7, total_iters=40),
    "linear": lambda o: LinearLR(o),
    "linear_long": lambda o: LinearLR(o, start_factor=0.9, end_factor=0.1, total_iters=150),
    "linear_none": lambda o: LinearLR(o, total_iters=0),
    "linear_by_hand": lambda o: LinearLR(o, start_factor=0.1, total_iters=100),
    "exponential": lambda o: ExponentialLR(o, 0.97),
    "exponential_by_hand": lambda o: ExponentialLR(o, gamma=0.97),
    "polynomial": lambda o: PolynomialLR(o),
    "polynomial_power": lambda o: PolynomialLR(o, total_iters=150, power=0.9),
    "polynomial_by_hand": lambda o: PolynomialLR(o, total_iters=150, power=2.0),
    "cosine": lambda o: CosineAnnealingLR(o, 100),
    "cosine_eta_min": lambda o: CosineAnnealingLR(o, T_max=37, eta_min=0.001),
    "cosine_one": lambda o: CosineAnnealingLR(o, T_max=1),
    "cosine_by_hand": lambda o: CosineAnnealingLR(o, T_max=45, eta_min=0.0001),
    "warm_restarts": lambda o: CosineAnnealingWarmRestarts(o, 20),
    "warm_restarts_longer": lambda o: CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2, eta_min=0.001),
    "one_cycle": lambda o: OneCycleLR(o, 0.2, total_steps=200),
    "one_cycle_adamw": lambda o: OneCycleLR(o, max_lr=[0.2, 0.01], epochs=10, steps_per_epoch=20),
    "one_cycle_three_phase": lambda o: OneCycleLR(
        o, max_lr=0.1, total_steps=203, pct_start=0.25, three_phase=True, div_factor=10.0, final_div_factor=100.0),
    "one_cycle_linear_adam": lambda o: OneCycleLR(
        o, max_lr=0.1, total_steps=211, anneal_strategy="linear", base_momentum=[0.8, 0.7], max_momentum=0.97),
    "one_cycle_plain": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=200, pct_start=0.0, cycle_momentum=False),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=13),
    "cyclic_adam": lambda o: CyclicLR(
        o, base_lr=[0.01, 0.001], max_lr=[0.1, 0.05], step_size_up=20, step_size_down=33, mode="triangular2"),
    "cyclic_rmsprop": lambda o: CyclicLR(
        o, base_lr=0.01, max_lr=0.1, step_size_up=17, mode="exp_range", gamma=0.99, base_momentum=0.6, max_momentum=0.95),
    "cyclic_scale": lambda o: CyclicLR(
        o, base_lr=0.01, max_lr=0.1, step_size_up=11, scale_fn=lambda x: 1 / (5 ** (x * 0.0001)), scale_mode="iterations"),
    "cyclic_scale_cycle": lambda o: CyclicLR(
        o, base_lr=0.01, max_lr=0.1, step_size_up=11, scale_fn=lambda x: 1 / x, cycle_momentum=False),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=20), CosineAnnealingLR(o, 180)], [20]),
    "sequential_three": lambda o: SequentialLR(
        o, [ConstantLR(o, 0.1, total_iters=10), ExponentialLR(o, 0.9), StepLR(o, 5, 0.5)], [5, 40]),
    "sequential_early": lambda o: SequentialLR(o, [MultiStepLR(o, [2]), PolynomialLR(o, 50, 2.0), LinearLR(o)], [3, 6]),
    "sequential_restarts": lambda o: SequentialLR(
        o, [LinearLR(o, 0.2, total_iters=4), CosineAnnealingWarmRestarts(o, 10, 2), LambdaLR(o, lambda e: 0.99**e)], [4, 90]),
    "sequential_cycles": lambda o: SequentialLR(
        o, [OneCycleLR(o, 0.2, total_steps=60), CyclicLR(o, 0.01, 0.1, step_size_up=13)], [50]),
    "sequential_by_hand": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=30), StepLR(o, 30, 0.5)], [40]),
    "sequential_nested": lambda o: SequentialLR(
        o, [ChainedScheduler([ConstantLR(o, 0.1, total_iters=10), ExponentialLR(o, 0.9)]), StepLR(o, 5, 0.5)], [25]),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.1, total_iters=20), ExponentialLR(o, 0.95)]),
    "chained_three": lambda o: ChainedScheduler(
        [LinearLR(o, 0.5, total_iters=11), StepLR(o, 25, 0.3), CosineAnnealingLR(o, 300)]),
    "chained_sequential": lambda o: ChainedScheduler(
        [SequentialLR(o, [LinearLR(o, 0.1, total_iters=20), ExponentialLR(o, 0.99)], [20]), MultiStepLR(o, [60, 90])]),
    "plateau": lambda o: ReduceLROnPlateau(o),
    "plateau_max": lambda o: ReduceLROnPlateau(
        o, mode="max", factor=0.5, patience=3, threshold=0.01, threshold_mode="abs", cooldown=2, min_lr=[0.001, 0.0005]),
    "plateau_rel": lambda o: ReduceLROnPlateau(o, mode="max", factor=0.8, patience=0, threshold=0.05, min_lr=1e-3),
    "plateau_abs": lambda o: ReduceLROnPlateau(
        o, factor=0.5, patience=1, threshold=0.2, threshold_mode="abs", cooldown=5, eps=1e-3),
    "plateau_by_hand": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=2),
    "constant_schedule": lambda o: LambdaLR(o, lambda _: 1.0),
    "constant_with_warmup": lambda o: LambdaLR(o, constant_with_warmup(30)),
    "linear_with_warmup": lambda o: LambdaLR(o, linear_with_warmup(20, 150)),
    "linear_without_warmup": lambda o: LambdaLR(o, linear_with_warmup(0, 200)),
    "cosine_with_warmup": lambda o: LambdaLR(o, cosine_with_warmup(20, 180)),
    "cosine_cycles": lambda o: LambdaLR(o, cosine_with_warmup(10, 190, 1.5)),
}
# fmt: on


def optimizer_of(case):
    return next((name for name in ("adamw", "adam", "rmsprop") if case.endswith("_" + name)), "sgd")


def metric(step):
    """Falls, then swings: a plateau in either mode."""
    return math.floor(1000 * (math.exp(-step / 15) + 0.1 * ((step * 7) % 5))) / 1000


def plain(value):
    """As JSON can say it."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        return {"pairs": [[key, plain(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return {"infinity": math.copysign(1, value)}
    return value


def runs(numbers):
    out = []
    for number in numbers:
        if out and isinstance(out[-1], list) and out[-1][0] == number:
            out[-1][1] += 1
        elif out and out[-1] == number:
            out[-1] = [number, 2]
        else:
            out.append(number)
    return out


def momentum(group):
    return group["betas"][0] if "betas" in group else group["momentum"]


def advance(name, scheduler, opt, step):
    if name.endswith("by_hand"):
        by_hand(step, opt.param_groups)
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(metric(step))
    else:
        scheduler.step()


def write_case(name, build):
    opt = optimizer(optimizer_of(name))
    scheduler = build(opt)
    rows, momentums = [], []
    for step in range(STEPS + 1):
        if step:
            advance(name, scheduler, opt, step)
        assert scheduler.get_last_lr() == [group["lr"] for group in opt.param_groups]
        rows.append(scheduler.get_last_lr())
        momentums.append([momentum(group) for group in opt.param_groups])
        if step == STATE_AFTER:
            state = plain(scheduler.state_dict())
            scheduler_state, optimizer_state = copy.deepcopy((scheduler.state_dict(), opt.state_dict()))

    resumed_opt = optimizer(optimizer_of(name))
    resumed = build(resumed_opt)
    resumed_opt.load_state_dict(optimizer_state)
    resumed.load_state_dict(scheduler_state)
    for step in range(STATE_AFTER + 1, STEPS + 1):
        advance(name, resumed, resumed_opt, step)
        assert resumed.get_last_lr() == rows[step], (name, step)

    case = {"lr": [runs(column) for column in zip(*rows)], "state": state}
    if len({tuple(row) for row in momentums}) > 1:
        case["momentum"] = [runs(column) for column in zip(*momentums)]
    return case


def restarts_at_epochs():
    """CosineAnnealingWarmRestarts.step(epoch) with epochs between two, and plain steps after it."""
    epochs = [0.0, 0.5, 4.9, 5.0, 5.25, 14.99, 15.0, 34.5, 35.0, 80.125, 3.0]
    out = {"epochs": epochs, "lr": {}}
    for mult in (1, 2, 3):
        opt = optimizer("sgd")
        scheduler = CosineAnnealingWarmRestarts(opt, T_0=5, T_mult=mult, eta_min=0.0001)
        lrs = []
        for epoch in epochs:
            scheduler.step(epoch)
            lrs.append(scheduler.get_last_lr())
            scheduler.step()
            lrs.append(scheduler.get_last_lr())
        out["lr"][str(mult)] = lrs
    return out


def main():
    written = {"cases": {name: write_case(name, build) for name, build in CASES.items()}}
    written["metrics"] = [metric(step) for step in range(STEPS + 1)]
    written["restarts_at_epochs"] = restarts_at_epochs()
    parts = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in written.pop("cases").items()]
    rest = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in written.items()]
    text = '{"cases": {\n' + ",\n".join(parts) + "},\n" + ",\n".join(rest) + "}\n"
    (pathlib.Path(__file__).parent / "schedulers.json").write_text(text)


if __name__ == "__main__":
    main()
