"""Writes state.json beside it: what Python Accelerate 1.13.0 prints for its states and how it splits."""

import json
import os
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin, TorchDynamoPlugin

os.environ["ACCELERATE_USE_CPU"] = "1"
result = {"printed": {}, "gradient": [], "split": []}

state = PartialState(cpu=True)
result["printed"]["partial_alone"] = repr(state)
AcceleratorState(mixed_precision="bf16", cpu=True, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)
result["printed"]["accelerator_alone"] = repr(AcceleratorState())

# What a rank of two prints: the numbers are put in by hand, the text is Python's.
shared = PartialState._shared_state
from accelerate.utils import DistributedType

shared.update(
    distributed_type=DistributedType.MULTI_CPU,
    backend="gloo",
    num_processes=2,
    process_index=1,
    local_process_index=1,
    device=torch.device("cpu", 0),
)
result["printed"]["partial_rank_1_of_2"] = repr(PartialState())

for arguments in ({}, {"num_steps": 4}, {"num_steps": 2, "sync_with_dataloader": False, "sync_each_batch": True}):
    GradientState._reset_state()
    state = GradientState(GradientAccumulationPlugin(**arguments)) if arguments else GradientState()
    result["gradient"].append({"arguments": arguments, "printed": repr(state)})

state = PartialState()
for length in (1, 2, 7, 8, 17):
    for processes in (2, 3, 4, 8):
        for padding in (False, True):
            parts = []
            for index in range(processes):
                shared.update(num_processes=processes, process_index=index)
                with state.split_between_processes(list(range(length)), apply_padding=padding) as part:
                    parts.append(part)
            result["split"].append({"length": length, "processes": processes, "padding": padding, "parts": parts})

Path(__file__).with_name("state.json").write_text(json.dumps(result) + "\n")
