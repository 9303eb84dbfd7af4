"""Python's side of training.cpp: the same steps with Accelerate."""
import statistics

import torch
from accelerate.utils import set_seed
from gpt import Gpt
from support import accelerator, finish, in_turns, report, settle
from torch import nn

torch.set_num_threads(1)
set_seed(0)


def make_mlp(widths):
    layers = []
    for i in range(1, len(widths)):
        if i > 1:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(widths[i - 1], widths[i]))
    return nn.Sequential(*layers)


def prepared_step(net, optimizer, data, target):
    model, optimizer = accelerator.prepare(net, optimizer)

    def step():
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(data).flatten(0, -2), target.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return step


if accelerator.num_processes > 1:
    settle()
for widths in ((784, 128, 10), (784, 1024, 1024, 10)):
    net = make_mlp(widths)
    step = prepared_step(net, torch.optim.SGD(net.parameters(), lr=0.01),
                         torch.randn(64, widths[0]), torch.randint(widths[-1], (64,)))
    name = "MLP " + "-".join(map(str, widths))
    report(f"{name}: step", statistics.median(in_turns([step], rounds=11, budget=60_000)[0]), "us")
    accelerator.free_memory()

net = Gpt()
ids = torch.randint(net.vocab, (2, net.block + 1))
step = prepared_step(net, torch.optim.AdamW(net.parameters(), lr=1e-4), ids[:, :-1], ids[:, 1:].contiguous())
report("GPT 3.3 M: step", statistics.median(in_turns([step], rounds=5, budget=500_000)[0]), "us")
finish()
