"""Writes folders of torch.distributed.checkpoint, as Accelerate's FSDP does it with SHARDED_STATE_DICT. Run with torch 2.11:

    torchrun --nproc_per_node 2 write_reference.py

`model` is sharded over two processes along several dimensions, unevenly; value[i] of each tensor is i. `optimizer` has
values that are no tensors. `merged.bin` is what Accelerate's merge_fsdp_weights makes of `optimizer`.
"""

import os
import pathlib
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.filesystem as filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

os.chdir(pathlib.Path(__file__).parent)  # the metadata has the path
filesystem._generate_uuid = lambda: "00000000-0000-4000-8000-000000000000"


def counted(*shape, dtype=torch.float32):
    return torch.arange(int(torch.tensor(shape).prod()), dtype=torch.float32).to(dtype).reshape(shape)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def shard(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement])

    model = {
        "rows": shard(counted(5, 3), Shard(0)),
        "columns": shard(counted(2, 4, 3, dtype=torch.bfloat16), Shard(1)),
        "deep": shard(counted(2, 3, 4, dtype=torch.float64), Shard(2)),
        "one": shard(counted(1, 2), Shard(0)),
        "replicated": shard(counted(3), Replicate()),
        "plain": counted(2, 2, dtype=torch.int64),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 2),
        "float8": counted(4).to(torch.float8_e4m3fn),
    }
    optimizer = {
        "state": {"rows": {"step": torch.tensor(3.0), "exp_avg": shard(counted(5, 3), Shard(0))}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "params": ["rows"]}, {"lr": 0.2, "params": []}],
    }
    for name, state in (("model", {"model": model}), ("optimizer", {"optimizer": optimizer})):
        if dist.get_rank() == 0:
            shutil.rmtree(name, ignore_errors=True)
        dist.barrier()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(name))
    dist.barrier()
    if dist.get_rank() == 0:
        from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner, _load_state_dict

        merged = {}
        _load_state_dict(merged, storage_reader=dcp.FileSystemReader("optimizer"), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        torch.save(merged["optimizer"], "merged.bin")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
