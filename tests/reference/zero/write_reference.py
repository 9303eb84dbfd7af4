"""Writes folders in the layout of DeepSpeed's checkpoints, which cannot be installed here. Run with torch 2.11:

    python write_reference.py

The layout is that of DeepSpeed 0.16: `param_shapes` with the names in the file of the model, and the float32 weights of
each process, flat, in the file of its optimizer. Stages 1 and 2: the parameters of a group one behind the other, padded
to a multiple of 2 * processes, cut into equal parts. Stage 3: each parameter cut into equal parts, the last ones
padded; a process has its parts one behind the other. Element i of a tensor is i + 100 * its place in WEIGHTS.
"""

import collections
import math
import os
import pathlib
import shutil

import torch

os.chdir(pathlib.Path(__file__).parent)

# Two groups, as with and without weight decay; `frozen` is not trained, `tied` is another name of the first.
WEIGHTS = {"first.weight": (5, 3), "first.bias": (5,), "second.weight": (2, 5), "scale": (), "frozen": (3, 2)}
GROUPS = [["first.weight", "second.weight"], ["first.bias", "scale"]]
BUFFERS = {"mean": torch.tensor([0.5, 1.5]), "count": torch.tensor(7)}
SHARED = {"tied": "first.weight"}


def whole(name):
    shape = WEIGHTS[name]
    place = list(WEIGHTS).index(name)
    return (torch.arange(math.prod(shape), dtype=torch.float32) + 100 * place).reshape(shape)


def padded(flat, multiple):
    return torch.cat([flat, torch.zeros(-len(flat) % multiple)])


class LossScaler:
    """Stands for objects of DeepSpeed's own classes in the files: nothing of them is needed."""

    def __init__(self):
        self.cur_scale = 1.0


LossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"


def save(value, path):
    """torch.save, with objects whose class Python cannot import."""
    import pickle
    import sys
    import types

    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.fp16.loss_scaler"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["deepspeed.runtime.fp16.loss_scaler"].LossScaler = LossScaler
    torch.save(value, path, pickle_module=pickle)


def model_states(stage, rank, world):
    module = collections.OrderedDict()
    for name in WEIGHTS:
        # In stage 3 a process has no whole parameters.
        module[name] = whole(name).to(torch.bfloat16) if stage < 3 else torch.empty(0, dtype=torch.bfloat16)
    for alias, name in SHARED.items():
        module[alias] = module[name]
    module.update(BUFFERS)
    frozen = whole("frozen").to(torch.bfloat16)
    if stage == 3:
        part = math.ceil(frozen.numel() / world)
        frozen = padded(frozen.float().reshape(-1), world).to(torch.bfloat16)[rank * part : (rank + 1) * part].clone()
    shapes = [collections.OrderedDict((name, torch.Size(WEIGHTS[name])) for name in group) for group in GROUPS]
    return {
        "module": module,
        "buffer_names": list(BUFFERS),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": {"frozen": torch.Size(WEIGHTS["frozen"])},
        "frozen_param_fragments": {"frozen": frozen},
        "shared_params": SHARED,
        "lr_scheduler": {"last_batch_iteration": 3},
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_version": "0.16.0",
        "global_steps": 4,
    }


def optimizer_states(stage, rank, world):
    if stage < 3:
        key, groups = "single_partition_of_fp32_groups", []
        for names in GROUPS:
            flat = padded(torch.cat([whole(name).reshape(-1) for name in names]), 2 * world)
            groups.append(flat.chunk(world)[rank].clone())
        count = [world] * len(GROUPS)
    else:
        key, groups, count = "fp32_flat_groups", [], world
        for names in GROUPS:
            parts = [padded(whole(name).reshape(-1), world).chunk(world)[rank] for name in names]
            groups.append(torch.cat(parts))
    state = {"loss_scaler": LossScaler(), "zero_stage": stage, "partition_count": count, key: groups}
    return {"optimizer_state_dict": state, "ds_config": {"zero_optimization": {"stage": stage}}, "ds_version": "0.16.0"}


def main():
    for stage, world in ((0, 2), (1, 2), (2, 3), (3, 1), (3, 4)):
        folder = pathlib.Path(f"stage{stage}_{world}")
        shutil.rmtree(folder, ignore_errors=True)
        tag = folder / "pytorch_model"
        tag.mkdir(parents=True)
        (folder / "latest").write_text("pytorch_model")
        for rank in range(world):
            if stage == 3:
                save(model_states(stage, rank, world), tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            elif rank == 0:
                save(model_states(stage, rank, world), tag / "mp_rank_00_model_states.pt")
            if stage > 0:
                prefix = "bf16_" if stage == 1 else ""
                save(optimizer_states(stage, rank, world), tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


if __name__ == "__main__":
    main()
