"""Trains what cases.json says with Python Accelerate and writes a line for each case and number of processes:

    interop_trace data cases.json data.pt          # our program: inputs, targets and first weights
    python write_traces.py data.pt [traces.json]   # without a path: traces.json beside the script

One thread for each process, Gloo, accelerate 1.13.0, torch 2.11. Of each batch: the loss, averaged over processes, and whether
gradients were complete. Of each step: the learning rate after it, and the norm that clip_grad_norm_ returned. And the number of
batches in a pass.

In cases.json `adamw` and `sgd` are optimizers of ours, `torch_adamw` and `torch_sgd` those of LibTorch, all of them torch.optim
here; `test` marks the cases that `make test` compares with the stored traces, which no order of additions moves much. What fp16 and bf16
hooks round away moves losses by less than float32 runs are allowed to differ: the float64 runs tell whether the hook was there.

`fsdp` shards the model by torch's fully_shard, called directly: Accelerate leaves FSDP off on the CPU. Ours gets a plugin.
"""

import json
import math
import os
import pathlib
import socket
import sys

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DDPCommunicationHookType, DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

here = pathlib.Path(__file__).parent.resolve()
sys.path.insert(0, str(here.parents[2] / "bench"))
from gpt import Gpt  # noqa: E402

GRID = json.loads((here / "cases.json").read_text())


class DigitNet(nn.Module):
    """The model of examples/digits_model.h."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 7 * 7, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def make_net(case, data):
    if case["model"] == "digits":
        net = DigitNet()
    else:
        config = GRID["gpt"]
        net = Gpt(**{name: config[name] for name in ("vocab", "block", "layers", "heads", "width")})
    net.load_state_dict(data["weights"])
    return net


def shard(case, net):
    """The blocks are units, as in ours. Gloo sums only."""
    bf16 = torch.bfloat16 if case.get("precision") == "bf16" else None
    for module in (*net.blocks, net):
        fully_shard(module, reshard_after_forward=case["fsdp"]["reshard"],
                    mp_policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=bf16))
        module.set_force_sum_reduction_for_comms(True)


def make_optimizer(case, parameters):
    if case["optimizer"].endswith("adamw"):
        return torch.optim.AdamW(parameters, lr=case["lr"], weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=case["lr"], momentum=0.9, nesterov=case["optimizer"] == "sgd")


def make_scheduler(case, optimizer, moves):
    kind = case.get("schedule", "cosine")
    if kind == "one_cycle":
        return OneCycleLR(optimizer, max_lr=case["lr"], total_steps=moves)
    if kind == "linear":
        return LambdaLR(optimizer, lambda k: max(0.0, 1 - k / moves))
    warmup = moves // 10

    def cosine(k):
        if k < warmup:
            return k / warmup
        return max(0.0, 0.5 * (1 + math.cos(math.pi * (k - warmup) / (moves - warmup))))

    return LambdaLR(optimizer, cosine)


def train(case, data):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    split, seedable = case.get("split_batches", False), case.get("seedable", True)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="no" if "fsdp" in case else case.get("precision", "no"),
        gradient_accumulation_steps=case.get("accumulation", 1),
        dataloader_config=DataLoaderConfiguration(
            split_batches=split, use_seedable_sampler=seedable, data_seed=GRID["seed"] if seedable else None
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                comm_hook=DDPCommunicationHookType(case.get("hook", "no")), comm_state_option=case.get("hook_options", {})
            )
        ],
    )
    net = make_net(case, data)
    if case.get("dtype") == "float64":
        net = net.double()
    if "fsdp" in case:
        shard(case, net)
    inputs = data["inputs"].to(net.fc1.weight.dtype) if case["model"] == "digits" else data["inputs"]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, data["targets"]), batch_size=GRID[case["model"]]["batch_size"], shuffle=True
    )
    optimizer = make_optimizer(case, net.parameters())
    scheduler = make_scheduler(case, optimizer, GRID["steps"] * (1 if split else accelerator.num_processes))
    set_seed(GRID["seed"])
    model = net if "fsdp" in case else accelerator.prepare(net)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)

    losses, rates, norms, synced = [], [], [], ""
    steps = 0
    while steps < GRID["steps"]:
        for x, y in loader:
            with accelerator.accumulate(model):
                if "fsdp" in case:
                    model.set_requires_gradient_sync(accelerator.sync_gradients)
                scores = model(x).flatten(0, -2)
                if scores.dtype == torch.bfloat16:
                    scores = scores.float()  # of FSDP2; Accelerate's autocast has done it
                loss = F.cross_entropy(scores, y.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    steps += 1
                    if "clip_norm" in case:
                        norm = accelerator.clip_grad_norm_(model.parameters(), case["clip_norm"])
                        norms.append((norm.full_tensor() if "fsdp" in case else norm).item())
                    if "clip_value" in case:
                        accelerator.clip_grad_value_(model.parameters(), case["clip_value"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
            synced += "01"[accelerator.sync_gradients]
            if steps == GRID["steps"]:
                break
    return {"batches": len(loader), "synced": synced, "losses": losses, "rates": rates, "norms": norms}


def write(rank, ranks, port, data_path, out):
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(ACCELERATE_USE_CPU="1", OMP_NUM_THREADS="1")
    data = torch.load(data_path, weights_only=False)  # dicts of LibTorch carry their types
    traces = {}
    for case in GRID["cases"]:
        if ranks in case.get("ranks", [1, 2]):
            traces[case["name"]] = train(case, data[case["model"]])
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(traces))
    if ranks > 1:
        torch.distributed.barrier()
        os._exit(0)  # threads that still hold tensors would abort an ordinary end


def short(trace, exact):
    """Nine digits tell float32 numbers apart."""
    digits = {"losses": 17 if exact else 9, "norms": 17 if exact else 9, "rates": 12}
    return {key: [float(f"{x:.{digits[key]}g}") for x in value] if key in digits else value for key, value in trace.items()}


def main():
    data_path = sys.argv[1]
    out = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else here / "traces.json"
    exact = {case["name"]: case.get("dtype") == "float64" for case in GRID["cases"]}
    lines = []
    for ranks in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        part = f"{out}.{ranks}"
        mp.spawn(write, args=(ranks, port, data_path, part), nprocs=ranks)
        for name, trace in json.loads(pathlib.Path(part).read_text()).items():
            lines.append(json.dumps({"name": name, "ranks": ranks} | short(trace, exact[name])))
        os.remove(part)
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
