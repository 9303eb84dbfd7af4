"""Python's side of model_parallel.cpp: the same step with torch's tensor parallelism, called directly, since Accelerate
takes models from a hub for it. Its context parallelism has no kernels for the CPU."""
import statistics

import torch
from gpt import Gpt
from support import accelerator, finish, in_turns, report, settle
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)


class SeparateAttention(nn.Module):
    """The block's attention with layers of its own for queries, keys and values: torch cuts a layer in one block only."""

    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        by_head = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2).flatten(2)


def make_net(cut):
    torch.manual_seed(1)
    net = Gpt()
    for block in net.blocks:
        block.attend = SeparateAttention(256, 4)
        block.attention = lambda x, block=block: block.attend_out(block.attend(x))
    if not cut:
        return net
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.attend_out": RowwiseParallel(),
        "blocks.*.expand": ColwiseParallel(),
        "blocks.*.expand_out": RowwiseParallel(),
    }
    plan |= {f"blocks.*.attend.{name}": ColwiseParallel() for name in "qkv"}
    return parallelize_module(net, mesh, plan)


def make_step(cut):
    net = make_net(cut)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=False)
    ids = torch.randint(256, (4, 129))
    data, target = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        loss = nn.functional.cross_entropy(net(data).flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


settle()
whole, cut = (statistics.median(rounds) / 1e3 for rounds in
              in_turns([make_step(False), make_step(True)], rounds=7, budget=400_000))
report("tp: step of one process", whole, "ms")
report("tp: step", cut, "ms")
finish()
