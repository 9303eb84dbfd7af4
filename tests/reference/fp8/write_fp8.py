"""Stores what torchao computes for linear layers in 8 bits, without 8-bit hardware, and a loop that follows Transformer
Engine's delayed scaling. Run with torch 2.11 and torchao 0.16:

    python -m pip install torch==2.11.0 torchao==0.16.0 safetensors numpy
    python write_fp8.py

`layers.safetensors`: for each case the operands (x, weight, bias, gradient), the result and the gradients of a
Float8Linear with `emulate=True`. `casts.safetensors`: numbers of all magnitudes, their scales and their 8 bits.
`delayed.safetensors`: random maxima of 12 steps and the scales after each of them.
"""
# needs: torchao==0.16.0

import dataclasses
import math
import os
import pathlib

import torch
from safetensors.torch import save_file
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_utils import amax_to_scale, tensor_to_scale, to_fp8_saturated

os.chdir(pathlib.Path(__file__).parent)
torch.set_num_threads(1)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def tolerance(case):
    """Random numbers and products: in bfloat16 the last bit."""
    name = case[0]
    return 2**-7 if "bfloat16" in name or "three_dimensions" in name else 1e-6


def layer_cases():
    tensors = {}
    torch.manual_seed(0)
    for recipe in ["tensorwise", "rowwise", "rowwise_with_gw_hp", "tensorwise_power_of_2"]:
        config = Float8LinearConfig.from_recipe_name(recipe.removesuffix("_power_of_2"))
        config = dataclasses.replace(
            config, emulate=True,
            round_scales_to_power_of_2=config.round_scales_to_power_of_2 or recipe.endswith("power_of_2"))
        for name, dtype, shape in [("float32", torch.float32, (12, 32)), ("bfloat16", torch.bfloat16, (12, 32)),
                                   ("three_dimensions", torch.bfloat16, (2, 6, 32))]:
            linear = torch.nn.Linear(32, 16)
            layer = Float8Linear.from_float(linear, config)
            # The values of rows differ in size, so that scales by rows differ.
            x = (torch.randn(shape) * torch.logspace(-2, 2, 6).unsqueeze(-1).repeat(shape[0] // 6 or 1, 1).view(
                *([-1, 1] if len(shape) == 2 else [1, -1, 1]))[-shape[-2]:]).to(dtype).requires_grad_()
            result = layer(x)
            gradient = (torch.randn(result.shape) * 1e-3).to(result.dtype)
            result.backward(gradient)
            case = f"{recipe}.{name}."
            for key, value in {"x": x, "weight": linear.weight, "bias": linear.bias, "gradient": gradient,
                               "result": result, "x_gradient": x.grad, "weight_gradient": linear.weight.grad,
                               "bias_gradient": linear.bias.grad}.items():
                tensors[case + key] = value.detach().clone().contiguous()
    save_file(tensors, "layers.safetensors")


def cast_cases():
    tensors = {}
    torch.manual_seed(1)
    numbers = torch.randn(40, 16) * torch.logspace(-9, 9, 40).unsqueeze(1)
    numbers[0, 0] = 0
    tensors["numbers"] = numbers
    for name, dtype in [("e4m3", E4M3), ("e5m2", E5M2)]:
        scale = tensor_to_scale(numbers, dtype)
        tensors[name + ".scale"] = scale
        tensors[name + ".values"] = to_fp8_saturated(numbers * scale, dtype).view(torch.uint8)
        # Without a scale most of them are clamped or vanish.
        tensors[name + ".unscaled"] = to_fp8_saturated(numbers, dtype).view(torch.uint8)
        for power_of_2 in [False, True]:
            rows = amax_to_scale(numbers.abs().amax(-1, keepdim=True), dtype, power_of_2)
            tensors[f"{name}.rows.{int(power_of_2)}"] = rows
    save_file(tensors, "casts.safetensors")


def delayed_case(maxima, window, margin, algorithm, top):
    """One tensor. `history[0]` collects the maximum of the step that runs."""
    history, scale, scales = [0.0] * window, torch.tensor(1.0), []
    for amax in maxima:
        history[0] = float(amax)
        if history[0] != 0.0:
            used = history[0] if algorithm == "most_recent" else max(history[1:] + history[:1])
            history = history[1:] + [history[0]]
            history[0] = 0.0
            if math.isfinite(used) and used > 0:
                scale = torch.tensor(top / 2**margin, dtype=torch.float32) / torch.tensor(used, dtype=torch.float32)
                scale = torch.clamp(scale, max=torch.finfo(torch.float32).max)
        scales.append(scale)
    return torch.stack(scales)


def delayed_cases():
    tensors = {}
    torch.manual_seed(2)
    maxima = torch.rand(12) * torch.logspace(-3, 3, 12)[torch.randperm(12)]
    maxima[4] = 0.0  # a step that did not use the layer
    maxima[7] = float("inf")
    tensors["maxima"] = maxima
    for window in [1, 2, 4, 16]:
        for margin in [0, 2]:
            for algorithm in ["max", "most_recent"]:
                tensors[f"{window}.{margin}.{algorithm}"] = delayed_case(maxima, window, margin, algorithm, 448.0)
    save_file(tensors, "delayed.safetensors")


layer_cases()
cast_cases()
delayed_cases()
