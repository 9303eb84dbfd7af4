"""Python's side of activations.cpp: the same steps with torch.utils.checkpoint."""
import ctypes
import functools
import statistics

import torch
from accelerate.utils import set_seed
from gpt import Gpt
from support import finish, in_turns, report
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

libc = ctypes.CDLL(None)
torch.set_num_threads(1)
set_seed(0)


def kilobytes_of(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))


def megabytes(f):
    """The most memory during f above what there was before."""
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = kilobytes_of("VmRSS:")
    f()
    return (kilobytes_of("VmHWM:") - before) * 1024 / 1e6


plain, again = (Gpt(block=256, layers=8) for _ in range(2))
for block in again.blocks:
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def step(net, batch):
    ids = torch.randint(net.vocab, (batch, net.block + 1))
    F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()


libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
for net in (plain, again):
    step(net, 8)
report("checkpointed: memory of a step", megabytes(lambda: step(again, 8)), "MB")
report("plain: memory of a step", megabytes(lambda: step(plain, 8)), "MB")
libc.mallopt(-3, 32 << 20)
times = in_turns([lambda: step(again, 8), lambda: step(plain, 8)], rounds=3, budget=500_000)
report("checkpointed: step", statistics.median(times[0]) / 1e3, "ms")
report("plain: step", statistics.median(times[1]) / 1e3, "ms")

weight = torch.ones(8, requires_grad=True)
data = torch.ones(8)


def small(x):
    return (x * weight).sin()


times = in_turns([lambda: checkpoint(small, data, use_reentrant=False).sum().backward(),
                  lambda: small(data).sum().backward()])
report("checkpoint of a small function, added", statistics.median(times[0]) - statistics.median(times[1]), "us")
finish()
