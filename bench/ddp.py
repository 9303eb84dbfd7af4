"""Python's side of ddp.cpp: the same steps with torch's DistributedDataParallel."""
import statistics

import torch
from support import finish, in_turns, report, settle
from torch import nn

torch.set_num_threads(1)
batch = 64


def make_mlp(widths):
    layers = []
    for i in range(1, len(widths)):
        if i > 1:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(widths[i - 1], widths[i]))
    return nn.Sequential(*layers)


class Training:
    def __init__(self, widths, distributed):
        self.net = make_mlp(widths)
        if distributed:
            self.net = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.input = torch.randn(batch, widths[0])
        self.target = torch.randint(widths[-1], (batch,))

    def step(self):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(self.input), self.target)
        loss.backward()
        self.optimizer.step()


settle()
for widths in ((784, 128, 10), (784, 1024, 1024, 10)):
    name = "MLP " + "-".join(map(str, widths))
    alone, distributed = Training(widths, False), Training(widths, True)
    times = in_turns([alone.step, distributed.step], rounds=11, budget=60_000)
    report(f"{name}: local step", statistics.median(times[0]), "us")
    report(f"{name}: DDP step", statistics.median(times[1]), "us")
    report(f"{name}: above the local step", statistics.median(b - a for a, b in zip(*times)), "us")
finish()
