"""Writes splits.json: how huggingface_hub (1.21 or newer) splits 200 random state dicts with shared storages, with the
index file that Accelerate writes for each, and 20 with many of them that fit into one file; and sizes.json: what it
reads as a size.

    python tests/reference/shards/write_reference.py
"""

import json
import pathlib
import random

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.serialization._base import parse_size_to_int

here = pathlib.Path(__file__).parent
choose = random.Random(16)
WORDS = ["weight", "bias", "layers", "0", "10", "attn", "norm", "größe", "権重", "a b", 'q"x', "back\\slash", "emb"]


def name_of(used):
    while True:
        name = ".".join(choose.choice(WORDS) for _ in range(choose.randint(1, 3)))
        if name not in used:
            return name


def case(number):
    """Tensors as [name, number of the storage, bytes of the storage], and what becomes of them."""
    state, items, storages = {}, [], []
    one_file = number >= 200
    limit = 10_000 if one_file else choose.choice([1, 7, 64, 100, 128])
    for _ in range(choose.choice([5, 9, 14] if one_file else [0, 1, 2, 5, 9, 14])):
        name = name_of(state)
        if storages and choose.random() < (0.5 if one_file else 0.3):
            storage = choose.randrange(len(storages))
        else:
            storage = len(storages)
            # Exactly the limit, just beside it, and anything.
            size = choose.choice([limit, limit - 1, limit + 1, choose.randint(1, 2 * limit), choose.randint(1, limit)])
            if one_file:
                size = choose.randint(1, 100)
            storages.append(torch.zeros(max(size, 1), dtype=torch.uint8))
        whole = storages[storage]
        state[name] = whole if choose.random() < 0.5 else whole[: choose.randint(1, len(whole))]
        items.append([name, storage, whole.untyped_storage().nbytes()])
    pattern = choose.choice(["model{suffix}.safetensors", "pytorch_model{suffix}.bin"])
    split = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=limit)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    return {
        "items": items,
        "limit": limit,
        "pattern": pattern,
        "is_sharded": split.is_sharded,
        "files": list(split.filename_to_tensors.items()),
        "tensors": list(split.tensor_to_filename.items()),
        "index": json.dumps(index, indent=2, sort_keys=True) + "\n" if number % 4 == 0 else None,
    }


def size_of(text):
    """None for what is refused, or is beyond 64 bits."""
    try:
        size = parse_size_to_int(text)
        return size if size < 2**63 else None
    except (ValueError, OverflowError):
        return None


SIZES = ["3MB", "0.5 gb", "7", "1MiB", "", "B", "KB", " 10 kb ", "1e3KB", "1_000KB", "-1GB", "0KB", "nanGB", "infTB", "1.9999KB", "2TB",
         "5Gb", "5 GB", "5G", "1,5GB", "0.0001KB", "+2MB", ".5KB", "1.KB", "0x1KB", "1 0KB", "999999999TB"]  # fmt: skip

if __name__ == "__main__":
    cases = ",\n".join(json.dumps(case(number), separators=(",", ":")) for number in range(220))
    (here / "splits.json").write_text(f"[{cases}]\n")
    (here / "sizes.json").write_text(json.dumps([[text, size_of(text)] for text in SIZES]) + "\n")
