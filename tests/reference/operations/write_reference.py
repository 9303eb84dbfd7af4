"""Writes operations.json: what Python Accelerate gives for the inputs of the tests in tests/comm.

    torchrun --nproc_per_node 3 tests/reference/operations/write_reference.py
"""

import json
import pathlib

import torch
from accelerate import PartialState
from accelerate.utils import (
    broadcast,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    gather,
    gather_object,
    listify,
    pad_across_processes,
    pad_input_tensors,
    reduce,
    slice_tensors,
)

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


def sample(rank, dtype, size=37):
    """The same numbers as sample() in tests/comm/samples.h."""
    values = [((7 * i + 13 * rank) % 101) / 17.0 - 2.5 for i in range(size)]
    if not dtype.is_floating_point:
        values = [(7 * i + 13 * rank) % 51 for i in range(size)]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def numbers(tensor):
    return tensor.double().tolist()


state = PartialState(cpu=True)
rank = state.process_index
result = {"world": state.num_processes, "reduce": {}, "gather": {}}
for name, dtype in DTYPES.items():
    tensor = sample(rank, dtype)
    kinds = ["sum"] + (["mean"] if dtype.is_floating_point else [])
    result["reduce"][name] = {kind: numbers(reduce(tensor, kind)) for kind in kinds}
    # Accelerate 1.13 knows no maximum (it sums); later versions do this.
    maximum = tensor.clone()
    torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX)
    result["reduce"][name]["max"] = numbers(maximum)
    result["gather"][name] = numbers(gather(tensor))
result["gather_transposed"] = gather(sample(rank, torch.float32, 12).reshape(3, 4).t()).tolist()
result["gather_zero_dim"] = gather(torch.tensor(float(rank))).tolist()
result["broadcast_from_1"] = broadcast(sample(rank, torch.float32, 5), 1).tolist()
rows = torch.full((rank + 1, 2), float(rank + 1))
result["pad"] = gather(pad_across_processes(rows, pad_index=7)).tolist()
result["pad_first"] = gather(pad_across_processes(rows, pad_index=7, pad_first=True)).tolist()
columns = torch.full((2, rank + 1), rank + 1)
result["pad_dim_minus_1"] = gather(pad_across_processes(columns, dim=-1)).tolist()
result["gather_object"] = gather_object([f"rank {rank} item {i}" for i in range(rank)])

result["listify_bfloat16"] = listify(torch.tensor([0.2, -1.5], dtype=torch.bfloat16))
result["listify_nested"] = listify({"a": torch.arange(4).reshape(2, 2), "b": (torch.tensor(True), 3)})
result["convert_to_fp32_half"] = convert_to_fp32(torch.tensor([0.1, 3.3]).half()).tolist()
result["find_batch_size"] = find_batch_size([{"ids": torch.zeros(3, 7)}, torch.zeros(9)])
result["slice"] = slice_tensors(torch.arange(10), slice(-7, 100, 3)).tolist()
result["concatenate_dim_1"] = concatenate([torch.ones(2, 1), torch.zeros(2, 2)], dim=1).tolist()
result["pad_input_tensors"] = {
    f"{batch},{processes}": list(pad_input_tensors(torch.rand(batch, 3), batch, processes).shape)
    for batch, processes in [(5, 2), (5, 4), (2, 5)]  # upstream grows what is divisible already
}

if state.is_main_process:
    target = pathlib.Path(__file__).with_name("operations.json")
    target.write_text(json.dumps(result) + "\n")
state.wait_for_everyone()
state.destroy_process_group()
