"""Python's side of checkpoints.sh: `run RANKS CASES WORK CHAIN FROM BEGIN END` trains, `compare CASES WORK` compares the chains.

A chain has one letter for each 20 steps, P for Python and C for ours; P and C alone are unbroken runs of 60 steps. Losses and
parameters of a chain must be those of the unbroken run of the language that began, and numbers drawn after loading those that were
drawn after saving.
"""

import json
import os
import pathlib
import random
import socket
import sys

import numpy as np
import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, skip_first_batches
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)  # behind a norm its gradient would be noise, which Adam blows up
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(8, 1)

    def forward(self, x):
        return self.second(self.drop(torch.relu(self.norm(self.first(x))))).flatten()


def wave(count, begin):
    """Values that any program can make, between -1 and 1."""
    return torch.sin(torch.arange(count, dtype=torch.float64) * 0.7 + begin)


def make_net(dropout, number):
    net = Net(dropout)
    with torch.no_grad():
        for index, (name, tensor) in enumerate(net.named_parameters(), start=10 * number):
            tensor.copy_((wave(tensor.numel(), index) * 0.3 + (name == "norm.weight")).view(tensor.shape))
    return net


class Progress:
    def __init__(self):
        self.batches = self.steps = 0

    def state_dict(self):
        return {"batches": self.batches, "steps": self.steps, "note": "where it is"}

    def load_state_dict(self, state):
        assert state["note"] == "where it is"
        self.batches, self.steps = state["batches"], state["steps"]


class History:
    """A tensor and a list."""

    def __init__(self):
        self.mean, self.last = torch.zeros(1, dtype=torch.float64), []

    def state_dict(self):
        return {"mean": self.mean, "last": self.last}

    def load_state_dict(self, state):
        self.mean, self.last = state["mean"], state["last"]

    def add(self, loss):
        self.mean = self.mean * 0.9 + loss * 0.1
        self.last = (self.last + [loss])[-3:]


def make_optimizer(kind, lr, parameters):
    return torch.optim.AdamW(parameters, lr=lr) if "adamw" in kind else torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def make_scheduler(kind, optimizer):
    return CosineAnnealingLR(optimizer, T_max=150) if kind == "cosine" else StepLR(optimizer, step_size=15, gamma=0.7)


def draw(accelerator):
    """Numbers of the three generators, of all processes."""
    drawn = [random.getrandbits(32) for _ in range(2)] + [int(n) for n in np.random.randint(0, 2**32, 2, dtype=np.uint32)]
    return accelerator.gather(torch.cat([torch.tensor(drawn), torch.randint(0, 2**31, (2,))])).tolist()


class CaseRun:
    def __init__(self, grid, case):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        seedable = case.get("seedable", True)
        self.case, self.every = case, grid["every"]
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=case.get("accumulation", 1),
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=seedable,
                data_seed=grid["seed"] if seedable else None,
                use_stateful_dataloader=case.get("stateful", False),
            ),
        )
        self.models, self.optimizers, self.schedulers = [], [], []
        for number, kind in enumerate(case["optimizers"]):
            net = make_net(case.get("dropout", 0.0), number)
            optimizer = make_optimizer(kind, case["lr"], net.parameters())
            prepared = self.accelerator.prepare(net, optimizer, make_scheduler(case["schedule"], optimizer))
            for objects, one in zip((self.models, self.optimizers, self.schedulers), prepared):
                objects.append(one)
        rows = case["rows"]
        data = torch.utils.data.TensorDataset(wave(rows * 6, 0.3).view(rows, 6).float(), wave(rows, 0.9).float())
        set_seed(grid["seed"])
        self.loader = self.accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=grid["batch_size"], shuffle=True))
        self.progress, self.history = Progress(), History()
        self.accelerator.register_for_checkpointing(self.progress, self.history)
        set_seed(grid["seed"], device_specific=True)
        self.part, self.trace = {}, {}

    def load(self, folder):
        self.accelerator.load_state(folder)
        self.trace["drawn_after_load"] = draw(self.accelerator)
        self.trace["history_after_load"] = self.history.last

    def train(self, end, folder):
        in_epoch = len(self.loader)
        while self.progress.steps < end:
            epoch, seen = divmod(self.progress.batches, in_epoch)
            self.loader.set_epoch(epoch)
            batches = self.loader
            if not self.case.get("stateful") and seen:
                batches = skip_first_batches(self.loader, seen)
                batches.set_epoch(epoch)
            for x, y in batches:
                with self.accelerator.accumulate(*self.models):
                    self.train_batch(x, y)
                self.progress.batches += 1
                if not self.accelerator.sync_gradients:
                    continue
                self.progress.steps += 1
                if self.progress.steps % self.every == 0:
                    self.finish_part(folder)
                if self.progress.steps == end:
                    break
        return self.trace

    def train_batch(self, x, y):
        accelerator = self.accelerator
        loss = nn.functional.mse_loss(sum(model(x) for model in self.models), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients and "clip_norm" in self.case:
            accelerator.clip_grad_norm_(self.models[0].parameters(), self.case["clip_norm"])
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        self.history.add(mean)
        self.part.setdefault("losses", []).append(mean)
        if accelerator.sync_gradients:
            self.part.setdefault("rates", []).extend(scheduler.get_last_lr()[0] for scheduler in self.schedulers)

    def finish_part(self, folder):
        """Saves, and notes how it was and what is drawn next."""
        step = str(self.progress.steps)
        self.accelerator.save_state(folder / step, safe_serialization=self.case.get("safe_serialization", True))
        self.accelerator.wait_for_everyone()
        self.part["drawn_after_save"] = draw(self.accelerator)
        self.part["history"] = list(self.history.last)
        self.part["mean"] = self.history.mean.item()
        tensors = [t for model in self.models for t in self.accelerator.unwrap_model(model).state_dict().values()]
        self.part["parameters"] = [x for tensor in tensors for x in tensor.double().flatten().tolist()]
        self.trace[step], self.part = self.part, {}


def train_scaler(before, begin, end, folder):
    """A CPU has no scaler in a run, so that it is driven by hand; some gradients are infinite."""
    first = {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    scaler = torch.amp.GradScaler("cpu", **(first if begin == 0 else {"init_scale": 2.0}))
    if begin:
        load_accelerator_state(before, [], [], [], [], 0, scaler)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    scales = []
    for step in range(begin, end):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (float("inf") if step % 7 == 5 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    folder.mkdir(parents=True)
    save_accelerator_state(folder, [], [], [], [], 0, 0, scaler)
    return {str(end): {"losses": scales}}


def run(rank, ranks, port, grid, work, chain, before, begin, end):
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(ACCELERATE_USE_CPU="1", OMP_NUM_THREADS="1")
    work, traces = pathlib.Path(work), {}
    for case in grid["cases"]:
        if ranks not in case.get("ranks", [1, 2]):
            continue
        case_run = CaseRun(grid, case)
        if begin:
            case_run.load(work / f"{before}.{ranks}" / case["name"] / str(begin))
        traces[case["name"]] = case_run.train(end, work / f"{chain}.{ranks}" / case["name"])
    if rank == 0:
        traces["scaler"] = {}
        for step in range(begin, end, 20):
            last = before if step == begin else chain
            traces["scaler"] |= train_scaler(
                work / f"{last}.{ranks}/scaler/{step}", step, step + 20, work / f"{chain}.{ranks}/scaler/{step + 20}"
            )
        (work / f"{chain}.{ranks}.json").write_text(json.dumps(traces))
    if ranks > 1:
        torch.distributed.barrier()
        os._exit(0)  # threads that still hold tensors would abort an ordinary end


def largest(a, b):
    if len(a) != len(b):
        return float("inf")
    return max((d if d == d else float("inf") for d in (abs(x - y) for x, y in zip(a, b))), default=0.0)


def compare(grid, work):
    """Each part of a chain with the same part of the unbroken run, and what was loaded with what was saved."""
    allowed = {"losses": 1e-5, "parameters": 1e-5, "rates": 1e-12, "history": 1e-5}
    failures, parts = [], 0
    traces = {path.name.removesuffix(".json"): json.loads(path.read_text()) for path in work.glob("*.json")}
    print(f"{'case':30} ranks chain    steps  loss     parameters")
    for ranks in (1, 2):
        for chain, unbroken, before, step in (
            ("PC", "P", "P", 40), ("PCP", "P", "PC", 60), ("CP", "C", "C", 40), ("CPC", "C", "CP", 60), ("C", "P", None, 60),
        ):  # fmt: skip
            found, expected = traces[f"{chain}.{ranks}"], traces[f"{unbroken}.{ranks}"]
            if found.keys() != expected.keys():
                sys.exit(f"not the same cases: {sorted(found.keys() ^ expected.keys())}")
            for name in found:
                one, other = found[name][str(step)], expected[name][str(step)]
                differences = {key: largest(one[key], other[key]) for key in allowed if key in other}
                bad = [f"{key} differ by {value:.1e}" for key, value in differences.items() if not value <= allowed[key]]
                if before and name != "scaler":
                    saved = traces[f"{before}.{ranks}"][name][str(step - 20)]
                    if saved["drawn_after_save"] != found[name]["drawn_after_load"]:
                        bad.append("other random numbers are drawn after loading")
                    if saved["history"] != found[name]["history_after_load"]:
                        bad.append("the list of a registered object differs")
                parts += 1
                print(f"{name:30} {ranks:5} {chain:8} {step:5}  {differences['losses']:.1e}  {differences.get('parameters', 0):.1e}"
                      f"{'' if not bad else '  <- ' + '; '.join(bad)}")
                failures += bad
    if failures:
        sys.exit(f"{len(failures)} differences")
    print(f"{parts} parts of runs are the same")


def main():
    if sys.argv[1] == "compare":
        return compare(json.loads(pathlib.Path(sys.argv[2]).read_text()), pathlib.Path(sys.argv[3]))
    _, _, ranks, cases, work, chain, before, begin, end = sys.argv
    ranks, grid = int(ranks), json.loads(pathlib.Path(cases).read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, args=(ranks, port, grid, work, chain, before, int(begin), int(end)), nprocs=ranks)


if __name__ == "__main__":
    main()
