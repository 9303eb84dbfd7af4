"""Python's side of dcp.sh: `dcp.py interop_dcp accelerate work`."""

import pathlib
import pickle
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner, _load_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from accelerate.utils import merge_fsdp_weights

# As in dcp.cpp: every dtype in a tensor of odd sizes, and odd shapes.
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex128, torch.complex64, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
SHAPES = {"matrix": (5, 3), "deep": (2, 3, 5, 7), "vector": (11,), "scalar": (), "empty": (0, 2), "one": (1, 1), "wide": (3, 70)}


def counted(shape, dtype):
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    if dtype == torch.bool:
        numbers = numbers % 2
    return numbers.to(dtype).reshape(shape)


def all_tensors():
    tensors = {f"dtypes.{str(dtype).removeprefix('torch.')}": counted((5, 3), dtype) for dtype in DTYPES}
    return tensors | {name: counted(shape, torch.float32) for name, shape in SHAPES.items()}


def same(a, b):
    def as_bytes(tensor):
        return tensor.contiguous().view(-1).view(torch.uint8)

    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.numel() == 0 or as_bytes(a).equal(as_bytes(b))


def check(found, expected, what):
    assert list(sorted(found)) == list(sorted(expected)), f"{what}: other names"
    for name, tensor in expected.items():
        assert same(found[name], tensor), f"{what}: {name} differs"


def whole(folder):
    """Everything in a folder, as Accelerate's merge does it."""
    state = {}
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def ours(processes, *arguments):
    start = [accelerate, "launch", "--cpu", "--num_processes", str(processes), "--main_process_port", "0"]
    subprocess.run([*(start if processes > 1 else []), program, *map(str, arguments)], check=True)


def python_loads_ours(work):
    expected = all_tensors()
    for processes in (1, 2, 3, 4):
        folder = work / f"ours_{processes}"
        ours(processes, "save", folder)
        model, optimizer = folder / "pytorch_model_fsdp_0", folder / "optimizer_0"
        target = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        dcp.load({"model": target}, storage_reader=dcp.FileSystemReader(model), no_dist=True)
        check(target, expected, f"dcp.load of {processes} of our processes")
        check(whole(model)["model"], expected, f"everything of {processes} of our processes")
        with open(model / ".metadata", "rb") as file:
            metadata = pickle.load(file)
        assert metadata.version == "1.0.0" and metadata.storage_meta.save_id and len(metadata.planner_data) == len(expected)

        state = whole(optimizer)["optimizer"]
        assert state["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.999), "fused": None, "params": list(SHAPES)}]
        for name, shape in SHAPES.items():
            assert same(state["state"][name]["exp_avg"], counted(shape, torch.float32) * 2), name
            assert same(state["state"][name]["step"], torch.tensor(3.0)), name
        merge_fsdp_weights(str(model), str(folder / "merged"), safe_serialization=False)
        check(torch.load(folder / "merged" / "pytorch_model.bin", weights_only=True), expected, "merge_fsdp_weights")
    spawned(4, load_shards, work / "ours_3" / "pytorch_model_fsdp_0")
    print(f"{len(expected)} tensors and an optimizer that 1, 2, 3 and 4 of our processes have saved load in Python, also as 4 shards")


def in_rows(tensor, mesh):
    """The rows of this process. Collectives of Gloo, which distribute_tensor uses, do not have all dtypes."""
    rows = list(tensor.chunk(dist.get_world_size())) if tensor.numel() else [tensor]
    mine = rows[dist.get_rank()] if dist.get_rank() < len(rows) else tensor[:0]
    return DTensor.from_local(mine.clone(), mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride())


def load_shards(rank, folder):
    """Rows of what 3 of our processes have saved."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = {name: tensor for name, tensor in all_tensors().items() if tensor.dim() > 0}
    target = {name: in_rows(torch.zeros_like(tensor), mesh) for name, tensor in expected.items()}
    dcp.load({"model": target}, storage_reader=dcp.FileSystemReader(folder))
    for name, tensor in expected.items():
        assert same(target[name].to_local(), in_rows(tensor, mesh).to_local()), name


def process(rank, processes, store, function, arguments):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def spawned(processes, function, *arguments):
    store = pathlib.Path(sys.argv[3]) / "store"
    store.unlink(missing_ok=True)
    torch.multiprocessing.spawn(process, (processes, store, function, arguments), nprocs=processes)


def trained(seed):
    """A model under fully_shard and its optimizer after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.1
    optimizer.step()
    return model, optimizer


def save_fully_sharded(rank, folder):
    model, optimizer = trained(1)
    dcp.save({"model": get_model_state_dict(model)}, storage_writer=dcp.FileSystemWriter(folder / "pytorch_model_fsdp_0"))
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, storage_writer=dcp.FileSystemWriter(folder / "optimizer_0"))


def load_fully_sharded(rank, folder):
    """What Accelerate's load_fsdp_model and load_fsdp_optimizer do for version 2."""
    expected, expected_optimizer = trained(1)
    model, optimizer = trained(2)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "pytorch_model_fsdp_0"))
    set_model_state_dict(model, state["model"])
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "optimizer_0"))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    for (name, one), other in zip(model.state_dict().items(), expected.state_dict().values()):
        assert same(local(one), local(other)), name
    assert optimizer.param_groups[0]["lr"] == expected_optimizer.param_groups[0]["lr"] == 0.01
    states = zip(optimizer.state.values(), expected_optimizer.state.values())
    for one, other in states:
        for key in other:
            assert same(local(one[key]), local(other[key])), key


def save_tensors(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: in_rows(tensor, mesh) if tensor.dim() > 0 else tensor for name, tensor in all_tensors().items()}
    dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(folder / "pytorch_model_fsdp_0"))


def we_load_python(work):
    expected = all_tensors()
    for processes in (1, 2, 4):
        folder = work / f"python_{processes}"
        spawned(processes, save_tensors, folder)
        for loaded_by in (1, 2, 3):
            out = work / f"copy_{processes}_{loaded_by}"
            ours(loaded_by, "copy", folder, out, "FULL_STATE_DICT")
            check(torch.load(out / "pytorch_model_fsdp.bin", weights_only=True), expected, out.name)
    print(f"{len(expected)} tensors that 1, 2 and 4 processes of Python have saved load in 1, 2 and 3 of ours")
    for processes, copied_by, loaded_by in ((1, 3, 4), (2, 1, 2), (4, 2, 1)):
        folder, out = work / f"fsdp_{processes}", work / f"fsdp_{processes}_{copied_by}"
        spawned(processes, save_fully_sharded, folder)
        ours(copied_by, "copy", folder, out, "SHARDED_STATE_DICT")
        spawned(loaded_by, load_fully_sharded, out)
    print("a model under fully_shard and its AdamW of 1, 2 and 4 processes go through 3, 1 and 2 of ours and into 4, 2 and 1")


def main():
    work = pathlib.Path(sys.argv[3])
    python_loads_ours(work)
    we_load_python(work)


program, accelerate = sys.argv[1], sys.argv[2]
if __name__ == "__main__":
    main()
