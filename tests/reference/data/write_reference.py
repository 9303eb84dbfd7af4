"""Writes what Accelerate's samplers, shards and dispatcher hand out. Run with accelerate 1.13 and torch 2.11.

Grids: length 0..60, batch size 1..8, 1..5 processes, drop_last, split_batches, even_batches. One line is one setting,
`batch_size processes drop_last split_batches even_batches`, with one entry for each length. An entry is the hash (64 bit,
FNV-1a) of a text: for each process its batches, each with ";" behind it, then "#" with the length that Python says the
loader has, then "|". "-" is an exception.

shard.txt       BatchSamplerShard over BatchSampler over SequentialSampler
iterable.txt    batches of a loader over IterableDatasetShard, without lengths: upstream's are wrong under split_batches
dispatcher.txt  DataLoaderDispatcher, each process in turn: what process 0 broadcasts is replayed to the others. Its
                remainder with the last batch follows the length, after ":"
remainder.txt   no hashes: the remainder that process 0 sees with its last batch
texts.txt       the texts themselves for some settings
samplers.json   what the samplers draw; above 64 indices the hash of their text

--show shard 7 2 3 0 0 1 writes nothing and prints the text of one case: the name of its grid, a length, a setting.
"""

import copy
import itertools
import json
import pathlib
import sys
from types import SimpleNamespace

import accelerate.data_loader as data_loader
import torch
from accelerate import PartialState
from accelerate.data_loader import (
    BatchSamplerShard,
    SeedableRandomSampler,
    prepare_data_loader,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

HERE = pathlib.Path(__file__).parent
LENGTHS = range(61)
BATCH_SIZES = range(1, 9)
PROCESSES = range(1, 6)
NO_YES = (False, True)
ERRORS = (ValueError, TypeError, RuntimeError, ZeroDivisionError)


def fnv(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def batches_text(batches):
    return "".join(",".join(map(str, batch)) + ";" for batch in batches)


class Count(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def shard_text(length, batch_size, processes, drop_last, split, even):
    text = ""
    for process in range(processes):
        batches = BatchSampler(SequentialSampler(range(length)), batch_size, drop_last)
        shard = BatchSamplerShard(batches, processes, process, split, even)
        text += batches_text(shard) + f"#{len(shard)}|"
    return text


def iterable_text(length, batch_size, processes, drop_last, split):
    text = ""
    for process in range(processes):
        loader = prepare_data_loader(
            DataLoader(Count(length), batch_size=batch_size, drop_last=drop_last, collate_fn=list),
            num_processes=processes,
            process_index=process,
            split_batches=split,
            dispatch_batches=False,
        )
        text += batches_text(loader) + "|"
    return text


def dispatcher_text(dataset, batch_size, processes, drop_last, split):
    sent, text = [], ""
    for process in range(processes):
        replay = iter(sent)

        def broadcast_object_list(values, from_process=0):
            if process == 0:
                sent.append(copy.copy(values))
            else:
                values[:] = next(replay)
            return values

        def broadcast(tensors, from_process=0):
            if process == 0:
                sent.append(tensors)
                return tensors
            return next(replay)

        data_loader.broadcast_object_list, data_loader.broadcast = broadcast_object_list, broadcast
        loader = prepare_data_loader(
            DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=torch.tensor),
            device=torch.device("cpu"),
            num_processes=processes,
            process_index=process,
            split_batches=split,
            put_on_device=True,
            dispatch_batches=True,
        )
        loader.state = SimpleNamespace(process_index=process, num_processes=processes, device=torch.device("cpu"))
        batches, remainder = [], None
        for batch in loader:
            batches.append(batch.tolist())
            assert remainder is None, "nothing may follow the last batch"
            if loader.end_of_dataloader:
                remainder = loader.remainder
        size = len(loader) if hasattr(dataset, "__len__") else -1
        text += batches_text(batches) + f"#{size}:{remainder}|"
    return text


def remainder(length, batch_size, processes, drop_last, split, even):
    loader = prepare_data_loader(
        DataLoader(range(length), batch_size=batch_size, drop_last=drop_last, collate_fn=list),
        num_processes=processes,
        process_index=0,
        split_batches=split,
        even_batches=even,
        dispatch_batches=False,
    )
    seen = None
    for _ in loader:
        assert seen is None, "nothing may follow the last batch"
        if loader.end_of_dataloader:
            seen = loader.remainder
    return "none" if seen is None else str(seen)


def attempt(function, *arguments):
    try:
        return function(*arguments)
    except ERRORS:
        return None


def write_grid(name, settings, entry):
    lines = []
    for setting in settings:
        entries = (attempt(entry, length, *setting) for length in LENGTHS)
        entries = ["-" if found is None else found for found in entries]
        if set(entries) == {"-"}:
            entries = ["-"]
        lines.append(" ".join([*(str(int(value)) for value in setting), *entries]) + "\n")
    (HERE / name).write_text("".join(lines))


with_even = list(itertools.product(BATCH_SIZES, PROCESSES, NO_YES, NO_YES, NO_YES))
without_even = list(itertools.product(BATCH_SIZES, PROCESSES, NO_YES, NO_YES))

PartialState(cpu=True)  # prepare_data_loader wants one, though it is told the number of processes
send, send_objects = data_loader.broadcast, data_loader.broadcast_object_list

if sys.argv[1:2] == ["--show"]:
    name, length, *setting = sys.argv[2:3] + [int(number) for number in sys.argv[3:]]
    function = {"shard": shard_text, "iterable": iterable_text, "dispatcher": dispatcher_text}[name]
    setting = [*setting[:2], *map(bool, setting[2:])]
    print(attempt(function, torch.arange(length).tolist() if name == "dispatcher" else length, *setting))
    sys.exit()

write_grid("shard.txt", with_even, lambda *case: fnv(shard_text(*case)))
write_grid("remainder.txt", with_even, remainder)
write_grid("iterable.txt", without_even, lambda *case: fnv(iterable_text(*case)))


def dispatched(length, *setting):
    return fnv(dispatcher_text(torch.arange(length).tolist(), *setting))


write_grid("dispatcher.txt", without_even, dispatched)

texts = []
for length, batch_size, processes in itertools.product((0, 1, 3, 7, 8, 10, 12, 15, 16), (2, 4), (1, 2, 3)):
    for drop_last, split in itertools.product(NO_YES, NO_YES):
        setting = (batch_size, processes, drop_last, split)
        named = [
            ("shard", (*setting, False), attempt(shard_text, length, *setting, False)),
            ("shard", (*setting, True), attempt(shard_text, length, *setting, True)),
            ("iterable", setting, attempt(iterable_text, length, *setting)),
            ("dispatcher", setting, attempt(dispatcher_text, list(range(length)), *setting)),
        ]
        for name, values, text in named:
            numbers = " ".join(str(int(value)) for value in values)
            texts.append(f"{name} {length} {numbers} {'-' if text is None else text}\n")
        # A stream is dispatched like a list.
        stream = attempt(dispatcher_text, Count(length), *setting)
        if stream is not None:
            size = len(DataLoader(range(length), batch_size=batch_size, drop_last=drop_last))
            if not split:
                size = size // processes if drop_last else -(-size // processes)
            assert stream.replace("#-1:", f"#{size}:") == named[-1][2]
(HERE / "texts.txt").write_text("".join(texts))
data_loader.broadcast, data_loader.broadcast_object_list = send, send_objects


def shown(indices):
    indices = [int(index) for index in indices]
    return indices if len(indices) <= 64 else fnv(",".join(map(str, indices)))


def drawn(sampler, generator, passes=3):
    """Complete passes, one that is left after five indices, one more, and where the generator stands then."""
    found = [shown(sampler) for _ in range(passes)]
    list(itertools.islice(sampler, 5))
    found.append(shown(sampler))
    following = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
    return {"passes": found, "then": str(following)}


VARIANTS = ((False, None), (False, 5), (False, 137), (True, None), (True, 32), (True, 75))
cases = {"seedable": [], "random": [], "subset": [], "weighted": [], "loader": []}
for seed, length, (replacement, num_samples) in itertools.product(
    (0, 1, 42, 1234, 2**40 + 3, -3), (1, 2, 10, 33, 1000, 70000), VARIANTS
):
    if length > 1000 and num_samples is not None:
        continue
    sampler = SeedableRandomSampler(
        range(length), replacement=replacement, num_samples=num_samples, data_seed=seed
    )
    settings = {"length": length, "replacement": replacement, "num_samples": num_samples or length}
    cases["seedable"].append({"seed": seed, **settings, "epochs": [shown(sampler) for _ in range(4)]})

for own, seed, length in itertools.product(NO_YES, (0, 42), (1, 5, 10, 33, 1000)):

    def start():
        """A generator of the sampler's own, or the default one."""
        generator = torch.Generator().manual_seed(seed) if own else None
        torch.manual_seed(seed)
        return generator

    about = {"own": own, "seed": seed, "length": length}
    for replacement, num_samples in VARIANTS:
        generator = start()
        sampler = RandomSampler(range(length), replacement, num_samples, generator)
        settings = {"replacement": replacement, "num_samples": num_samples or length}
        cases["random"].append({**about, **settings, **drawn(sampler, generator)})
    generator = start()
    sampler = SubsetRandomSampler([3 * index + 1 for index in range(length)], generator)
    cases["subset"].append({**about, **drawn(sampler, generator)})
    for replacement in NO_YES:
        generator = start()
        weights = [1.0 / (1 + index % 7) for index in range(length)]
        sampler = WeightedRandomSampler(weights, length if not replacement else 40, replacement, generator)
        settings = {"replacement": replacement, "num_samples": sampler.num_samples}
        cases["weighted"].append({**about, **settings, **drawn(sampler, generator)})
    generator = start()
    loader = DataLoader(range(length), batch_size=4, shuffle=True, generator=generator, collate_fn=list)
    epochs = [shown(itertools.chain(*loader)) for _ in range(3)]
    following = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
    cases["loader"].append({**about, "epochs": epochs, "then": str(following)})

# Without data_seed the seed is that of the default generator, not of the sampler's own.
torch.manual_seed(7)
inherited = SeedableRandomSampler(range(10), generator=torch.Generator().manual_seed(99))
cases["inherited"] = {"initial_seed": inherited.initial_seed, "epochs": [shown(inherited) for _ in range(2)]}
text = json.dumps(cases, separators=(",", ":")).replace("},{", "},\n{").replace("]},", "]},\n")
(HERE / "samplers.json").write_text(text + "\n")
