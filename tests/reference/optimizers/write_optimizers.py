"""Writes optimizers.json: parameters after steps 1, 2, 10 and 50 of each optimizer. Run with torch 2.11.

Nothing is drawn: parameter p has value[i] = cos(0.7 i + p) * (1 + p), its gradient at step s (from 1) is
grad[i] = sin(0.3 i + s + 2 p) * (0.5 + 0.1 p), both computed in float64 and then rounded. Parameters 0 and 1 are the first
group, 2 and 3 the second, whose options are in `second`. Parameter 1 has no gradient in steps divisible by 3, parameter 3
none before step 4. Lion is not in PyTorch: its rule is written down here, from the paper.
"""

import json
import pathlib

import torch

SHAPES = ([3, 4], [5], [2, 3, 2], [])
STEPS = (1, 2, 10, 50)


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = -p.grad if group["maximize"] else p.grad
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * g)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                m.copy_(beta2 * m + (1 - beta2) * g)


def values(shape, dtype, f):
    size = 1
    for n in shape:
        size *= n
    index = torch.arange(size, dtype=torch.float64)
    return f(index).to(dtype).reshape(shape)


def parameter(p, dtype):
    return values(SHAPES[p], dtype, lambda i: torch.cos(0.7 * i + p) * (1 + p)).requires_grad_()


def gradient(p, step, dtype):
    if (p == 1 and step % 3 == 0) or (p == 3 and step < 4):
        return None
    return values(SHAPES[p], dtype, lambda i: torch.sin(0.3 * i + step + 2 * p) * (0.5 + 0.1 * p))


def run(name, options, second, dtype):
    params = [parameter(p, dtype) for p in range(len(SHAPES))]
    make = Lion if name == "Lion" else getattr(torch.optim, name)
    # One tensor at a time: the plainest of PyTorch's ways.
    plain = {} if name == "Lion" else {"foreach": False}
    if name in ("Adam", "AdamW", "SGD", "Adagrad"):
        plain["fused"] = False
    optimizer = make([{"params": params[:2]}, {"params": params[2:], **second}], **options, **plain)
    after, states = {}, []
    for step in range(1, STEPS[-1] + 1):
        for p, tensor in enumerate(params):
            tensor.grad = gradient(p, step, dtype)
        optimizer.step()
        if step in STEPS:
            after[str(step)] = [tensor.detach().flatten().tolist() for tensor in params]
    for tensor in params:
        state = optimizer.state.get(tensor, {})
        states.append({k: v.flatten().tolist() for k, v in state.items() if isinstance(v, torch.Tensor)})
    return {"params": after, "state": states}


def tolerance(case):
    """How far two processors may differ after 50 steps: some fuse a product and a sum into one rounding."""
    return 1e-14 if case["dtype"] == "float64" else 1e-6


CASES = [
    ("AdamW", {}, {"lr": 5e-3, "weight_decay": 0.1}),
    ("AdamW", {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "amsgrad": True}, {"weight_decay": 0.0}),
    ("AdamW", {"lr": 1e-2, "maximize": True}, {"amsgrad": True}),
    ("Adam", {}, {"lr": 5e-3, "weight_decay": 0.1}),
    ("Adam", {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "amsgrad": True, "weight_decay": 0.05}, {"lr": 2e-2}),
    ("Adam", {"lr": 1e-2, "maximize": True, "weight_decay": 0.02, "decoupled_weight_decay": True}, {"lr": 3e-2}),
    ("SGD", {"lr": 1e-2}, {"lr": 5e-2, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9}, {"dampening": 0.5}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, {"momentum": 0.8}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "maximize": True}, {"momentum": 0.0}),
    ("Adagrad", {}, {"lr": 5e-2, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 5e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-6}, {"lr_decay": 0.01}),
    ("Adagrad", {"maximize": True, "lr": 3e-2}, {"weight_decay": 0.01}),
    ("RMSprop", {}, {"lr": 5e-3, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 1e-3, "alpha": 0.9, "momentum": 0.9, "centered": True, "eps": 1e-4}, {"momentum": 0.0}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.5, "maximize": True}, {"centered": True, "eps": 1e-3}),
    ("NAdam", {}, {"lr": 5e-3, "weight_decay": 0.1}),
    ("NAdam", {"lr": 1e-2, "momentum_decay": 1e-2, "weight_decay": 0.05, "decoupled_weight_decay": True}, {"lr": 2e-2}),
    ("NAdam", {"betas": (0.8, 0.95), "eps": 1e-6, "maximize": True}, {"momentum_decay": 0.0}),
    ("RAdam", {}, {"lr": 5e-3, "weight_decay": 0.1}),
    ("RAdam", {"lr": 1e-2, "weight_decay": 0.05, "decoupled_weight_decay": True}, {"betas": (0.8, 0.95)}),
    ("RAdam", {"betas": (0.8, 0.9), "eps": 1e-6, "maximize": True}, {"lr": 2e-2}),
    ("Adamax", {}, {"lr": 5e-3, "weight_decay": 0.1}),
    ("Adamax", {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "maximize": True}, {"lr": 2e-2}),
    ("Lion", {}, {"lr": 1e-3, "weight_decay": 0.1}),
    ("Lion", {"lr": 1e-3, "betas": (0.8, 0.95), "maximize": True}, {"weight_decay": 0.3}),
    ("Adafactor", {}, {"lr": 5e-2, "weight_decay": 0.1}),
    ("Adafactor", {"lr": 0.3, "beta2_decay": -0.5, "eps": (1e-3, 1e-2), "d": 2.0, "maximize": True}, {"d": 1.0}),
]

if __name__ == "__main__":
    result = []
    for name, options, second in CASES:
        for dtype in (torch.float32, torch.float64):
            case = {"optimizer": name, "options": options, "second": second, "dtype": str(dtype).split(".")[1]}
            result.append(case | run(name, options, second, dtype))
    path = pathlib.Path(__file__).with_name("optimizers.json")
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in result) + "\n]\n")
