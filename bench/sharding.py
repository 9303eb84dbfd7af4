"""Python's side of sharding.cpp: the same steps with DistributedDataParallel and torch's fully_shard, called directly,
since Accelerate leaves FSDP off on the CPU. Without reshard_after_forward whole weights are gathered once a step, as at
levels 1 and 2 of ours."""
import statistics

import torch
from gpt import Gpt
from support import finish, in_turns, report, settle
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)


def make_step(kind):
    net = Gpt()
    if kind == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    else:
        for module in (*net.blocks, net):
            fully_shard(module, reshard_after_forward=kind == "reshard")
            module.set_force_sum_reduction_for_comms(True)  # Gloo takes no means
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    ids = torch.randint(256, (4, 129))
    data, target = ids[:, :-1], ids[:, 1:].contiguous()

    def step():
        loss = nn.functional.cross_entropy(net(data).flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


settle()
steps = [make_step(kind) for kind in ("ddp", "keep", "reshard")]
ddp, keep, reshard = (statistics.median(rounds) / 1e3 for rounds in in_turns(steps, rounds=7, budget=400_000))
for name, time in (("data parallelism", ddp), ("level 1", keep), ("level 2", keep), ("level 3", reshard)):
    report(f"{name}: step", time, "ms")
finish()
