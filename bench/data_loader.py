"""Python's side of data_loader.cpp: the same work with DataLoader, prepared by Accelerate."""
import os
import tempfile
import time

import torch
from support import accelerator, report
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


class Indexed(Dataset):
    """Sample i is f(i)."""

    def __init__(self, size, f):
        self.size, self.f = size, f

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.f(i)


class Columns(Indexed):
    """Reads a whole batch at once, which most datasets do not."""

    def __getitems__(self, indices):
        return self.f(indices)


def rate(loader):
    """Thousands of samples per second of a pass, or of its first second."""
    seen = 0
    start = time.perf_counter()
    for batch in loader:
        seen += len(batch if isinstance(batch, torch.Tensor) else batch[0])
        if time.perf_counter() - start > 1:
            break
    return seen / (time.perf_counter() - start) / 1e3


def measure(names, dataset, batch_size, collate=None):
    best = 0
    for workers in (0, 2, 4):
        loader = accelerator.prepare(DataLoader(dataset, batch_size, shuffle=True, num_workers=workers,
                                                persistent_workers=workers > 0, collate_fn=collate))
        next(iter(loader))  # the workers are started, which is not counted
        now = rate(loader)
        for name in names:
            report(f"{name}, {workers} workers", now, "k/s")
        best = max(best, now)
    for name in names:
        report(f"{name}, best", best, "k/s")


x, y = torch.rand(400_000, 32), torch.arange(400_000)
measure(["rows in memory"], TensorDataset(x, y), 256)
measure(["rows, against __getitems__"], Columns(len(x), lambda i: (x[i], y[i])), 256, lambda batch: batch)

images, labels = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (50_000,))
scale, shift = torch.full((3, 1, 1), 1 / (255 * 0.25)), torch.full((3, 1, 1), 0.5 / 0.25)
classes = labels.tolist()
transformed = Indexed(len(images), lambda i: (images[i].to(torch.float).mul_(scale).sub_(shift), classes[i]))
measure(["images, tensor operations", "images, a plain loop"], transformed, 256)  # a loop in Python is no match

sequences = [torch.full((16 + i * 7919 % 497,), i) for i in range(50_000)]
measure(["sequences padded"], sequences, 64, lambda batch: torch.nn.utils.rnn.pad_sequence(batch, batch_first=True))

with tempfile.TemporaryFile() as file:
    file.write(bytes([1]) * 256 * 100_000)
    file.flush()
    descriptor = file.fileno()
    read = Indexed(100_000, lambda i: torch.frombuffer(bytearray(os.pread(descriptor, 256, i * 256)), dtype=torch.float))
    measure(["records of a file"], read, 256)

large = torch.rand(131_072, 1024)
measure(["rows of 4 KiB, batches of 16 MiB"], Indexed(len(large), lambda i: large[i]), 4096)
accelerator.end_training()
