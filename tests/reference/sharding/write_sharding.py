"""Writes units.json and deepspeed.json: which modules Python makes units of, and what `prepare` makes of a DeepSpeed
configuration with "auto". Run with an interpreter that has accelerate==1.13.0 and torch==2.11.0:

    python write_sharding.py

Nothing is wrapped for real: the wrapper of version 1 only notes what it is given. DeepSpeed is not needed: a module of
that name stands in for it, and keeps the configuration that it is started with.
"""

import functools
import json
import math
import random
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator, PartialState, accelerator as accelerator_module
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.other import get_module_children_bottom_up
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy, transformer_auto_wrap_policy


# ---- units


class Block(nn.Module):
    pass


class Layer(nn.Module):
    pass


CLASSES = {"Block": Block, "Layer": Layer}


def random_tree(rng, depth):
    """A module as JSON: its class, the sizes of its own parameters and its children."""
    if depth == 0 or rng.random() < 0.2:
        if rng.random() < 0.15:
            return {"class": "MultiheadAttention", "width": rng.choice([4, 8])}
        return {"class": rng.choice(["Block", "Layer"]), "params": [rng.choice([10, 40, 90, 200, 500])]}
    kind = rng.choice(["Block", "Layer", "Layer", "ModuleList", "ModuleDict"])
    children = [random_tree(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    params = [] if kind.startswith("Module") else [rng.choice([10, 70, 300]) for _ in range(rng.randint(0, 2))]
    return {"class": kind, "params": params, "children": children}


def build(tree):
    if tree["class"] == "MultiheadAttention":
        return nn.MultiheadAttention(tree["width"], 1)
    children = [build(child) for child in tree.get("children", [])]
    if tree["class"] == "ModuleList":
        return nn.ModuleList(children)
    if tree["class"] == "ModuleDict":
        return nn.ModuleDict({f"c{i}": child for i, child in enumerate(children)})
    module = CLASSES[tree["class"]]()
    for i, size in enumerate(tree["params"]):
        module.register_parameter(f"p{i}", nn.Parameter(torch.zeros(size)))
    for i, child in enumerate(children):
        module.add_module(f"c{i}", child)
    return module


class Wrapped(nn.Module):
    """What FSDP would be."""

    def __init__(self, module, seen):
        super().__init__()
        seen.append(module)
        self.module = module


def units_v1(tree, policy, ignored=()):
    model = build(tree)
    names = {module: name for name, module in model.named_modules()}
    modules = {module for name, module in model.named_modules() if name in ignored}
    parameters = {p for module in modules for p in module.parameters()}
    seen = []
    _recursive_wrap(
        model,
        auto_wrap_policy=policy,
        wrapper_cls=Wrapped,
        ignored_modules={m for module in modules for m in module.modules()},
        ignored_params=parameters,
        only_wrap_children=True,
        seen=seen,
    )
    return sorted(names[module] for module in seen)


def units_v2(tree, policy, **fields):
    model = build(tree)
    names = {module: name for name, module in model.named_modules()}
    plugin = SimpleNamespace(auto_wrap_policy=policy, transformer_cls_names_to_wrap=None, min_num_params=0)
    plugin.__dict__.update(fields)
    chosen = fsdp2_prepare_auto_wrap_policy(plugin, model)
    return [names[m] for m in get_module_children_bottom_up(model)[:-1] if chosen(m)]


def write_units():
    rng = random.Random(20)
    cases = []
    for _ in range(30):
        tree = {"class": "Block", "params": [], "children": [random_tree(rng, 3) for _ in range(rng.randint(1, 4))]}
        names = [name for name, _ in build(tree).named_modules() if name]
        case = {"tree": tree, "by_size": []}
        for least in (50, 150, 400):
            ignored = [rng.choice(names)] if rng.random() < 0.3 else []
            by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=least)
            case["by_size"].append(
                {
                    "min": least,
                    "ignored": ignored,
                    "v1": units_v1(tree, by_size, ignored),
                    "v2": units_v2(tree, by_size, min_num_params=least),
                }
            )
        classes = {type(m).__name__ for m in build(tree).modules()} & set(CLASSES)
        name = "Layer" if "Layer" in classes else "Block"
        by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={CLASSES[name]})
        case["by_class"] = {
            "name": name,
            "v1": units_v1(tree, by_class),
            "v2": units_v2(tree, by_class, transformer_cls_names_to_wrap=[name]),
        }
        cases.append(case)
    return cases


# ---- DeepSpeed

stand_in = types.ModuleType("deepspeed")
stand_in.runtime = SimpleNamespace(lr_schedules=SimpleNamespace(VALID_LR_SCHEDULES=[]))
started = {}


def initialize(**kwargs):
    started.update(kwargs)
    raise StopIteration


stand_in.initialize = initialize
sys.modules["deepspeed"] = stand_in
# Imported there only if DeepSpeed is installed.
accelerator_module.DummyOptim = DummyOptim
accelerator_module.DummyScheduler = DummyScheduler


def prepared(case):
    """What Python's `prepare` makes of a case: the configuration, or the error."""
    plugin = DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(case["config"])))
    plugin.is_train_batch_min = case.get("is_train_batch_min", True)
    given = case["objects"]
    accelerator = SimpleNamespace(
        fp8_backend=None,
        deepspeed_plugin=plugin,
        parallelism_config=None,
        split_batches=given.get("split_batches", False),
        num_processes=given.get("num_processes", 1),
        gradient_accumulation_steps=given.get("gradient_accumulation_steps", 1),
        device=torch.device("cpu"),
        _prepare_one=lambda obj, first_pass: obj,
    )
    objects = []
    model = nn.Linear(2, 2)
    if "hidden_sizes" in given:
        sizes = given["hidden_sizes"]
        model.config = SimpleNamespace(**({} if not sizes else {"hidden_sizes": sizes}))
    if given.get("has_model", True):
        objects.append(model)
    for size in given.get("batch_sizes", []):
        data = torch.utils.data.TensorDataset(torch.zeros(64, 2))
        if size is None:
            sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), 4, False)
            objects.append(torch.utils.data.DataLoader(data, batch_sampler=sampler))
        else:
            objects.append(torch.utils.data.DataLoader(data, batch_size=size))
    optimizer = None
    if given.get("optimizer") == "real":
        optimizer = torch.optim.AdamW(model.parameters(), lr=given.get("lr", 0.001))
    elif given.get("optimizer") == "dummy":
        optimizer = DummyOptim(model.parameters(), lr=given.get("lr", 0.001), weight_decay=given.get("weight_decay", 0))
    if optimizer is not None:
        objects.append(optimizer)
    if given.get("scheduler") == "real":
        objects.append(torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters())))
    elif given.get("scheduler") == "dummy":
        objects.append(
            DummyScheduler(
                optimizer,
                total_num_steps=given.get("total_num_steps"),
                warmup_num_steps=given.get("warmup_num_steps", 0),
                lr_scheduler_callable=(lambda o: o) if given.get("callable") else None,
            )
        )
    try:
        Accelerator._prepare_deepspeed(accelerator, *objects)
    except StopIteration:
        pass
    except ValueError as error:
        return {"error": str(error)}
    config = {k: v for k, v in plugin.deepspeed_config.items() if not (isinstance(v, float) and math.isinf(v))}
    return {"config": config, "gradient_accumulation_steps": accelerator.gradient_accumulation_steps}


def auto(**more):
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, **more.pop("zero", {})},
        **more,
    }


SIZES = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_gather_16bit_weights_on_model_save": "auto",
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.95]}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}


def write_deepspeed():
    one = {"batch_sizes": [8]}
    cases = {
        "batch sizes": (auto(), {"batch_sizes": [8, 16], "num_processes": 4, "gradient_accumulation_steps": 2}),
        "largest batch": (auto(), {"batch_sizes": [8, 16], "num_processes": 2}),
        "split batches": (auto(), {"batch_sizes": [8, 16], "num_processes": 4, "split_batches": True}),
        "steps of the file": ({**auto(), "gradient_accumulation_steps": 5}, {**one, "gradient_accumulation_steps": 2}),
        "numbers of the file": (
            {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.5},
            {"num_processes": 2},
        ),
        "no loader": (auto(), {}),
        "loader without a size": (auto(), {"batch_sizes": [8, None]}),
        "sizes by width": (auto(zero=SIZES), {**one, "hidden_sizes": [768]}),
        "sizes by the largest width": (auto(zero=SIZES), {**one, "hidden_sizes": [64, 100, 50]}),
        "no model that tells": (auto(zero=SIZES), one),
        "no widths": (auto(zero=SIZES), {**one, "hidden_sizes": []}),
        "optimizer of the file": (
            auto(optimizer=OPTIMIZER),
            {**one, "optimizer": "dummy", "lr": 3e-5, "weight_decay": 0.1},
        ),
        "real optimizer": (auto(), {**one, "optimizer": "real"}),
        "two optimizers": (auto(optimizer=OPTIMIZER), {**one, "optimizer": "real"}),
        "no optimizer": (auto(), {**one, "optimizer": "dummy"}),
        "scheduler of the file": (
            auto(optimizer=OPTIMIZER, scheduler=SCHEDULER),
            {
                **one,
                "optimizer": "dummy",
                "lr": 0.01,
                "scheduler": "dummy",
                "total_num_steps": 103,
                "warmup_num_steps": 7,
                "num_processes": 4,
            },
        ),
        "steps with split batches": (
            auto(optimizer=OPTIMIZER, scheduler=SCHEDULER),
            {
                **one,
                "optimizer": "dummy",
                "scheduler": "dummy",
                "total_num_steps": 103,
                "num_processes": 4,
                "split_batches": True,
            },
        ),
        "scheduler of a real optimizer": (
            auto(scheduler=SCHEDULER),
            {**one, "optimizer": "real", "lr": 0.02, "scheduler": "dummy", "total_num_steps": 9},
        ),
        "no total": (
            auto(optimizer=OPTIMIZER, scheduler=SCHEDULER),
            {**one, "optimizer": "dummy", "scheduler": "dummy"},
        ),
        "two schedulers": (auto(scheduler=SCHEDULER), {**one, "optimizer": "real", "scheduler": "real"}),
        "no scheduler": (auto(optimizer=OPTIMIZER), {**one, "optimizer": "dummy", "scheduler": "dummy"}),
        "callable": (
            auto(optimizer=OPTIMIZER),
            {**one, "optimizer": "dummy", "scheduler": "dummy", "callable": True},
        ),
        "real scheduler of a dummy": (auto(optimizer=OPTIMIZER), {**one, "optimizer": "dummy", "scheduler": "real"}),
        "nothing tells": (auto(communication_data_type="auto"), one),
    }
    result = {}
    for name, (config, objects) in cases.items():
        case = {"config": config, "objects": objects, "is_train_batch_min": name != "largest batch"}
        result[name] = {**case, "result": prepared(case)}
    return result


if __name__ == "__main__":
    PartialState(cpu=True)  # for Python's logger
    here = Path(__file__).parent
    (here / "units.json").write_text(json.dumps(write_units(), separators=(",", ":")) + "\n")
    (here / "deepspeed.json").write_text(json.dumps(write_deepspeed(), indent=1) + "\n")
