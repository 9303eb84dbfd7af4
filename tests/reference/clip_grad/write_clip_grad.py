"""Writes clip_grad.json: what torch.nn.utils.clip_grad_norm_ and clip_grad_value_ make of gradients.

    python write_clip_grad.py        (torch 2.11.0)

Each case has the dtypes and shapes of four gradients (null: the parameter has none), their values before and after, and either max_norm, norm_type
and the norm that came back with its dtype, or clip_value. Infinity and NaN are texts. Values are written in full, so that float64 reads back exactly.
"""
import json
import math
import os

import torch

SHAPES = [[3, 4], [5], [2, 3, 2], []]
KINDS = {
    "float64": ["float64"] * 4,
    "float32": ["float32"] * 4,
    "bfloat16": ["bfloat16"] * 4,
    "mixed": ["float32", "float64", "bfloat16", "float32"],
}


def numbers(values):
    return [x if math.isfinite(x) else str(x) for x in values]


def values_of(tensor):
    return numbers(tensor.double().flatten().tolist())


def parameters_of(dtypes, special):
    result = []
    for p, (shape, dtype) in enumerate(zip(SHAPES, dtypes)):
        parameter = torch.zeros(shape, dtype=getattr(torch, dtype), requires_grad=True)
        if p != 1 or special != "lacks one":
            index = torch.arange(parameter.numel(), dtype=torch.float64).reshape(shape)
            parameter.grad = (((7 * index + 3 * p) % 11 - 5) / 8 + 1 / 16).to(parameter.dtype)  # exact in all of them
        if p == 2 and special in ("inf", "nan"):
            parameter.grad[1, 2, 0] = float(special)
        if p == 0 and special == "zeros":
            parameter.grad.zero_()
        result.append(parameter)
    return result


def case(dtypes, special, clip):
    parameters = parameters_of(dtypes, special)
    found = {"dtypes": dtypes, "before": [None if p.grad is None else values_of(p.grad) for p in parameters]}
    found.update(clip(parameters))
    found["after"] = [None if p.grad is None else values_of(p.grad) for p in parameters]
    return found


def by_norm(max_norm, norm_type):
    def clip(parameters):
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type, foreach=True)
        assert norm.dim() == 0
        return {"max_norm": max_norm, "norm_type": numbers([norm_type])[0], "norm": values_of(norm)[0], "norm_dtype": str(norm.dtype)[len("torch."):]}

    return clip


def by_value(clip_value):
    def clip(parameters):
        torch.nn.utils.clip_grad_value_(parameters, clip_value, foreach=True)
        return {"clip_value": clip_value}

    return clip


def main():
    cases = []
    for kind, dtypes in KINDS.items():
        for norm_type in [2.0, 1.0, 3.0, math.inf, -math.inf, 0.0]:
            for max_norm in [0.7, 100.0]:
                cases.append(case(dtypes, "", by_norm(max_norm, norm_type)))
        for clip_value in [0.25, 10.0, 0.0]:
            cases.append(case(dtypes, "", by_value(clip_value)))
    for special in ["lacks one", "inf", "nan", "zeros"]:
        cases.append(case(KINDS["float32"], special, by_norm(0.7, 2.0)))
        cases.append(case(KINDS["float32"], special, by_value(0.25)))
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "clip_grad.json")
    with open(path, "w") as out:
        out.write("[\n" + ",\n".join(json.dumps(c, allow_nan=False) for c in cases) + "\n]\n")


if __name__ == "__main__":
    main()
