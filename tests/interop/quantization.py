"""quantization.py PROGRAM: layers of bitsandbytes and of interop_quantization, each with the files of the other."""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import bitsandbytes as bnb
import safetensors.torch
import torch

program = sys.argv[1]
IN, OUT, ROWS = 192, 320, 6
FORMATS = {"nf4": ("nf4", False), "nf4_double": ("nf4", True), "fp4": ("fp4", False), "fp4_double": ("fp4", True), "int8": None}


def layer(name):
    if name == "int8":
        return bnb.nn.Linear8bitLt(IN, OUT, has_fp16_weights=False, threshold=6.0)
    quant_type, double = FORMATS[name]
    return bnb.nn.Linear4bit(IN, OUT, compute_dtype=torch.float32, compress_statistics=double, quant_type=quant_type)


def quantized(name, weight, bias):
    made = layer(name)
    made.weight.data.copy_(weight)
    made.bias.data.copy_(bias)
    return torch.nn.ModuleDict({"fc": made}).to("cpu")


def read(name, file):
    """Our file in a layer of theirs."""
    state = safetensors.torch.load_file(file)
    made = layer(name)
    made.bias.data.copy_(state["fc.bias"])
    if name == "int8":
        made.weight = bnb.nn.Int8Params(
            state["fc.weight"], requires_grad=False, has_fp16_weights=False, CB=state["fc.weight"], SCB=state["fc.SCB"]
        )
    else:
        stats = {key.removeprefix("fc.weight."): value for key, value in state.items() if key.startswith("fc.weight.")}
        made.weight = bnb.nn.Params4bit.from_prequantized(state["fc.weight"], stats, device="cpu", module=made)
    return made


def outputs(made, name, x):
    made.train(name != "int8")
    return made(x if name == "int8" else x.clone().requires_grad_()).detach()


def differences(ours, theirs):
    assert list(ours) == list(theirs) or set(ours) == set(theirs), (list(ours), list(theirs))
    return {key: int((ours[key] != theirs[key]).sum()) for key in theirs if not torch.equal(ours[key], theirs[key])}


def main():
    torch.manual_seed(int(os.environ.get("ACCELERATE_TEST_SEED", 1)))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        weight, bias, x = torch.randn(OUT, IN) * 0.05, torch.randn(OUT), torch.randn(ROWS, IN)
        x[2, 5] = 15
        x = x.half().float()
        safetensors.torch.save_file({"fc.weight": weight, "fc.bias": bias}, folder / "plain.safetensors")
        safetensors.torch.save_file({"x": x}, folder / "x.safetensors")
        for format_name in FORMATS:
            theirs = quantized(format_name, weight, bias)
            state = {key: value.clone() for key, value in theirs.state_dict().items()}
            safetensors.torch.save_file(state, folder / "theirs.safetensors")
            subprocess.run([program, format_name, folder], check=True)
            ours = safetensors.torch.load_file(folder / "ours.safetensors")
            counted = differences(ours, state)
            # Codes next to midpoints, and the second zero of fp4: see tests/reference/quantization.
            limit = OUT * IN if format_name.startswith("fp4") else 40
            assert all(count <= limit for count in counted.values()), (format_name, counted)
            assert not (format_name.startswith("nf4") and "fc.weight" in counted), counted
            again = safetensors.torch.load_file(folder / "theirs_again.safetensors")
            assert not differences(again, state), (format_name, "their file, read and written again")
            results = safetensors.torch.load_file(folder / "outputs.safetensors")
            expected = outputs(theirs["fc"], format_name, x)
            tolerance = 1e-2 if format_name == "int8" else 1e-4
            torch.testing.assert_close(results["theirs"], expected, rtol=tolerance, atol=tolerance)
            mine = outputs(read(format_name, folder / "ours.safetensors"), format_name, x)
            torch.testing.assert_close(results["ours"], mine, rtol=tolerance, atol=tolerance)
            print(f"{format_name}: files both ways, {counted or 'all bytes equal'}")


main()
