"""Writes what bitsandbytes (its CPU build) makes of 200 random tensors per format, and files of its layers.

`--show FORMAT I` writes nothing and prints the bytes of tensor I whose CRC-32 is stored, in hexadecimal.
"""
# needs: bitsandbytes==0.50.2
# codes.json: tensor i of a format is torch.manual_seed(i); torch.randn(rows, columns) in float64, whose rounded values do not
# depend on the processor, in the dtype of `case(i)`. For each tensor there are the CRC-32 of the codes and of the scales, and the places where bitsandbytes' CPU build has another code
# than the rule of its CUDA kernels, which is computed here with numpy: [place, byte]. It differs at exact midpoints, for
# values next to zero in fp4 (two codes mean zero), in a short last block (which it divides instead of multiplying by the
# reciprocal), in 8-bit codes of blocks (which it finds on a grid of 65536 steps) and of rows (1 / scale * 127 for 127 / scale).
import json
import os
import sys
import zlib

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import safetensors.torch
import torch

COUNT = 200
FP4_THRESHOLDS = np.array([0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333], dtype=np.float32)
FP4_CODES = np.array([0, 1, 6, 7, 4, 5, 2, 3], dtype=np.uint8)


def tolerance(case):
    """What layers compute, and their own numbers."""
    return 1e-6 if list(case)[0].startswith("fc.") else 1e-3


def case(i):
    dtype = [torch.float32, torch.float16, torch.bfloat16][i % 3]
    rows, columns = 1 + i % 7, 16 + 37 * i % 300
    return torch.manual_seed(i) and torch.randn(rows, columns, dtype=torch.float64).to(dtype)


def bytes_of(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def crc(tensor):
    return bytes_of(tensor).hex() if "--show" in sys.argv else zlib.crc32(bytes_of(tensor))


def differences(theirs, rule):
    theirs = theirs.contiguous().flatten().view(torch.uint8).numpy()
    places = np.nonzero(theirs != rule.view(np.uint8).reshape(-1))[0]
    return [[int(p), int(theirs[p])] for p in places]


def blocks(values, size):
    return [values[i : i + size] for i in range(0, len(values), size)]


def four_bit_rule(tensor, quant_type, code):
    codes = []
    for block in blocks(tensor.float().flatten().numpy(), 64):
        scaled = block * (np.float32(1) / np.abs(block).max())
        if quant_type == "nf4":
            codes.append((scaled[:, None] > ((code[:-1] + code[1:]) / np.float32(2))[None]).sum(1))
        else:
            steps = (np.abs(scaled)[:, None] > FP4_THRESHOLDS[None]).sum(1)
            codes.append(FP4_CODES[steps] + 8 * (scaled < 0))
    codes = np.concatenate(codes).astype(np.uint8)
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(7 if quant_type == "nf4" else 0))
    return codes[::2] << 4 | codes[1::2]


def eight_bit_rule(values, size, code):
    codes = []
    for block in blocks(values, size):
        most = np.abs(block).max()
        scaled = block * (np.float32(1) / most) if most else np.full_like(block, -1)
        codes.append((scaled[:, None] > ((code[:-1] + code[1:]) / np.float32(2))[None]).sum(1))
    return np.concatenate(codes).astype(np.uint8)


def values_of(packed, state):
    """F.dequantize_4bit, whose CPU kernel takes wrong scales where a row is not whole blocks."""
    scales = state.absmax
    if state.nested:
        scales = F.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return default_ops._dequantize_4bit_compute(
        packed.reshape(-1), scales, state.code, state.blocksize, state.shape, state.dtype
    )


def int8_rule(tensor, threshold):
    values = tensor.float().numpy()
    outliers = np.abs(values) >= (threshold or np.inf)
    values = np.where(outliers, np.float32(0), values)
    codes = np.rint(values * (np.float32(127) / np.abs(values).max(1, keepdims=True))).astype(np.int8)
    if len(values) > 1:
        codes[:, outliers.any(0)] = 0
    return codes


def four_bits(quant_type, double, i):
    tensor = case(i)
    packed, state = F.quantize_4bit(tensor, quant_type=quant_type, compress_statistics=double)
    rule = four_bit_rule(tensor, quant_type, state.code.numpy())
    members = state.as_dict(packed=True)
    entry = {"packed": crc(packed), "differences": differences(packed, rule)}
    if double:
        plain = F.quantize_4bit(tensor, quant_type=quant_type)[1].absmax
        nested = eight_bit_rule((plain - state.offset).numpy(), 256, state.state2.code.numpy())
        entry["scales"] = crc(members["absmax"])
        entry["scale_differences"] = differences(members["absmax"], nested)
        entry["nested_absmax"] = crc(members["nested_absmax"])
    else:
        entry["scales"] = crc(members["absmax"])
    if double or i < 3:
        entry["text"] = bytes(members[f"quant_state.bitsandbytes__{quant_type}"].numpy()).decode()
    entry["values"] = crc(values_of(packed, state))
    return entry


def blockwise(i):
    tensor = case(i)
    codes, state = F.quantize_blockwise(tensor, blocksize=256)
    rule = eight_bit_rule(tensor.float().flatten().numpy(), 256, state.code.numpy())
    return {"codes": crc(codes), "differences": differences(codes, rule), "scales": crc(state.absmax)}


def int8(i):
    tensor = case(i).half()
    codes, scales, outliers = F.int8_vectorwise_quant(tensor.clone(), threshold=2.0 if i % 2 else 0.0)
    return {
        "codes": crc(codes),
        "differences": differences(codes, int8_rule(tensor, 2.0 if i % 2 else 0.0)),
        "scales": crc(scales),
        "outliers": None if outliers is None else outliers.tolist(),
    }


FORMATS = {
    "nf4": lambda i: four_bits("nf4", False, i),
    "fp4": lambda i: four_bits("fp4", False, i),
    "nf4_double": lambda i: four_bits("nf4", True, i),
    "fp4_double": lambda i: four_bits("fp4", True, i),
    "blockwise": blockwise,
    "int8": int8,
}


def layer_files():
    """Layers of bitsandbytes with fixed weights, as files and with what they compute."""
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 128) * 0.1, torch.randn(48)
    inputs = torch.randn(3, 5, 128)
    inputs[0, 0, 7] = 20  # an outlier of LLM.int8
    outputs = {"weight": weight, "bias": bias, "inputs": inputs}
    layers = {
        "nf4": bnb.nn.Linear4bit(128, 48, compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4"),
        "nf4_double": bnb.nn.Linear4bit(128, 48, compute_dtype=torch.float32, compress_statistics=True, quant_type="nf4"),
        "fp4": bnb.nn.Linear4bit(128, 48, compute_dtype=torch.float32, compress_statistics=False, quant_type="fp4"),
        "int8": bnb.nn.Linear8bitLt(128, 48, has_fp16_weights=False, threshold=6.0),
    }
    for name, layer in layers.items():
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
        model = torch.nn.ModuleDict({"fc": layer}).to("cpu")
        state = {key: value.clone() for key, value in model.state_dict().items()}
        safetensors.torch.save_file(state, f"{name}.safetensors")
        model.train(name != "int8")  # in evaluation 4-bit weights are packed again for some processors
        x = inputs.clone().requires_grad_(name != "int8")
        y = model["fc"](x.half().float() if name == "int8" else x)
        outputs[name] = y.detach()
        if name != "int8":
            y.square().sum().backward()
            outputs[f"{name}_gradient"] = x.grad
    torch.save({key: value.contiguous() for key, value in outputs.items()}, "outputs.pt")


def main():
    # Here, because `tolerance` is asked for where the package is not.
    global F, bnb, default_ops
    import bitsandbytes as bnb
    import bitsandbytes.backends.default.ops as default_ops
    import bitsandbytes.functional as F

    if "--show" in sys.argv:
        name, i = sys.argv[2:]
        for key, value in FORMATS[name](int(i)).items():
            print(f"{key}: {value}")
        return
    codes = {name: [entry(i) for i in range(COUNT)] for name, entry in FORMATS.items()}
    codes["dynamic_map"] = crc(F.create_dynamic_map())
    with open("codes.json", "w") as file:
        file.write("{\n")
        for n, (name, entries) in enumerate(codes.items()):
            end = "\n" if n + 1 == len(codes) else ",\n"
            if isinstance(entries, int):
                file.write(f'"{name}": {entries}{end}')
                continue
            lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
            file.write(f'"{name}": [\n{lines}\n]{end}')
        file.write("}\n")
    layer_files()


if __name__ == "__main__":
    main()
