"""Python's side of support.h: the same timing."""
import os
import statistics
import time

from accelerate import Accelerator
from accelerate.utils import gather_object

accelerator = Accelerator(cpu=True)


def report(name, value, unit):
    if accelerator.is_main_process:
        print(f"{name}\t{value}\t{unit}", flush=True)


def microseconds(repeats, f):
    start = time.perf_counter()
    for _ in range(repeats):
        f()
    return (time.perf_counter() - start) / repeats * 1e6


def repeats_of(f, budget):
    """How often f fits into so many microseconds; the same number on all processes."""
    for _ in range(3):
        f()
    once = max(microseconds(3, f), 0.1)
    return gather_object([int(min(max(budget / once, 1), 5000))])[0]


def settle():
    """Until the system has found a place for each process."""
    end = time.perf_counter() + 0.5
    while gather_object([time.perf_counter() < end])[0]:
        pass


def slowest(times):
    """The time of each round is that of the process which took longest."""
    return [max(each) for each in zip(*gather_object([times]))]


def in_turns(variants, rounds=5, budget=20_000):
    """Microseconds per call, round by round, of each variant; they take turns."""
    repeats = [repeats_of(f, budget) for f in variants]
    times = [[] for _ in variants]
    for _ in range(rounds):
        for which, f in enumerate(variants):
            accelerator.wait_for_everyone()
            times[which].append(microseconds(repeats[which], f))
    return [slowest(each) for each in times]


def measure(name, f):
    report(name, statistics.median(in_turns([f])[0]), "us")


def finish():
    """The end. Torch's threads may end the interpreter with a signal as it clears up."""
    accelerator.end_training()
    os._exit(0)
