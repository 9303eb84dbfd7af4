"""Writes plans.json: random models as data, and what Python Accelerate says about their sizes, ties and device maps.

    python tests/reference/device_maps/write_reference.py

A model is a list of tensors (dtype, shape) and a list of modules, of which the first is the root. Modules refer to both
by number, so that tied parameters and shared modules are numbers that come twice. `plans` has the options of
infer_auto_device_map and its result; "error" where Python fails (ties to parameters that are no part of a child, budgets
with fractions), which ours must not.
"""

import json
import logging
import pathlib
import random
import re
import warnings

import torch
from accelerate.utils import modeling

here = pathlib.Path(__file__).parent
DTYPES = ["float32"] * 6 + ["float16", "bfloat16", "float64", "int64", "int8", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "int16"]
CLASSES = ["Block", "Attention", "Mlp", "Norm", "Encoder", "Head"]


def find_tied_parameters(model):
    """In the order of the model: Python's own order is that of a set."""
    order = {name: i for i, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return sorted(python_find_tied_parameters(model), key=lambda names: min(order[name] for name in names))


python_find_tied_parameters = modeling.find_tied_parameters
modeling.find_tied_parameters = find_tied_parameters


def random_model(rng):
    tensors, modules = [], []
    words = iter(f"{random.Random(i).choice('abcdefgh')}{i}" for i in range(10_000))  # no name is a part of another one

    def add_tensor():
        if tensors and rng.random() < 0.02:
            tensors.append((tensors[-1][0], [0, 3]))
        else:
            tensors.append((rng.choice(DTYPES), [rng.choice([1, 2, 3, 5, 8, 13, 32]) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3]))]))
        return len(tensors) - 1

    def add_module(depth):
        number = len(modules)
        module = {"class": rng.choice(CLASSES), "parameters": [], "buffers": [], "children": []}
        modules.append(module)
        inner = depth < 4 and rng.random() < (1.0, 0.75, 0.6, 0.3)[depth]
        for _ in range(rng.choice([0, 0, 0, 1]) if inner else rng.choice([0, 1, 1, 2, 2, 3])):
            module["parameters"].append((next(words), add_tensor()))
        for _ in range(rng.choice([0, 0, 0, 0, 0, 1]) if inner and depth else rng.choice([0, 0, 0, 1])):
            module["buffers"].append((next(words), add_tensor()))
        if inner:
            for _ in range(rng.choice([1, 2, 2, 3]) if depth else rng.choice([2, 3, 4, 5])):
                name = next(words)
                module["children"].append((name, add_module(depth + 1)))
        return number

    add_module(0)
    leaves = [m for m in modules if m["parameters"] and not m["children"]]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        if len(leaves) > 1:
            source, target = rng.sample(leaves, 2)
            position = rng.randrange(len(target["parameters"]))
            target["parameters"][position] = (target["parameters"][position][0], rng.choice(source["parameters"])[1])
    if rng.random() < 0.1:
        # A module that two others have.
        owners = [m for m in modules if m["children"]]
        if len(owners) > 1:
            source, target = rng.sample(owners, 2)
            shared = rng.choice(source["children"])[1]
            if not contains(modules, shared, modules.index(target)):
                target["children"].append((next(words), shared))
    return {"tensors": tensors, "modules": modules}


def contains(modules, number, wanted):
    return number == wanted or any(contains(modules, child, wanted) for _, child in modules[number]["children"])


def build(model):
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for dtype, shape in model["tensors"]]
    parameters = [torch.nn.Parameter(t, requires_grad=False) for t in tensors]
    modules = [type(m["class"], (torch.nn.Module,), {})() for m in model["modules"]]
    for module, made in zip(model["modules"], modules):
        for name, number in module["parameters"]:
            made.register_parameter(name, parameters[number])
        for name, number in module["buffers"]:
            made.register_buffer(name, tensors[number])
        for name, number in module["children"]:
            made.register_module(name, modules[number])
    return modules[0]


class Info(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def planned(model, options):
    """The device map, with the numbers of its messages."""
    arguments = dict(options)
    arguments["max_memory"] = budget(options["max_memory"])
    info = Info()
    logger = modeling.logger
    logger.addHandler(info)
    logger.setLevel(logging.INFO)
    result = dict(options)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # Sorted, because the order of a cleaned map is that of a set.
            result["map"] = {name: str(device) for name, device in sorted(modeling.infer_auto_device_map(model, **arguments).items())}
        buffers = [re.search(r"requires ([\d.]+) bytes", str(w.message)) for w in caught]
        result["homeless"] = [float(match[1]) for match in buffers if match]
        result["required"] = [[d, float(b)] for text in info.texts for d, b in re.findall(r"- (\w+): ([\d.]+) bytes required", text)]
    except (IndexError, AttributeError) as error:
        result["error"] = type(error).__name__
    finally:
        logger.removeHandler(info)
    return result


def budget(texts):
    return {int(key) if key.isdigit() else key: value for key, value in texts.items()}


def balanced(model, options):
    arguments = dict(options)
    arguments["max_memory"] = budget(options["max_memory"])
    try:
        return options | {"result": {str(k): v for k, v in modeling.get_balanced_memory(model, **arguments).items()}}
    except (KeyError, RuntimeError) as error:
        return options | {"error": type(error).__name__}


def random_budget(rng, total, keys):
    total = max(int(total), 8)
    texts = {str(key): rng.choice([total // 2, total // 3, total // 4, total // 5, total // 8, total, 0]) for key in keys}
    if rng.random() < 0.8:
        texts["cpu"] = rng.choice([total // 4, total // 2, total, 4 * total])
    if rng.random() < 0.05:
        texts["disk"] = 0
    if not texts:
        texts["cpu"] = total // 2
    items = list(texts.items())
    rng.shuffle(items)
    return dict(items)


def random_sizes(rng, names):
    options = {}
    if rng.random() < 0.4:
        options["dtype"] = rng.choice(["float16", "torch.float32", "int8", "float64"])
    if rng.random() < 0.25:
        options["special_dtypes"] = {name: rng.choice(["float32", "float64", "int8"]) for name in rng.sample(names, min(2, len(names)))}
    return options


def describe(rng):
    model = random_model(rng)
    made = build(model)
    names = [name for name, _ in made.named_parameters()]
    classes = sorted({m["class"] for m in model["modules"][1:]})
    sizes_options = random_sizes(rng, names)
    sizes = modeling.compute_module_sizes(made, **sizes_options)
    total, (largest, layers) = modeling.calculate_maximum_sizes(made)
    plans, balances = [], []
    for _ in range(4):
        options = random_sizes(rng, names)
        options["max_memory"] = random_budget(rng, modeling.compute_module_sizes(made, **options)[""], rng.sample(range(6), rng.choice([0, 1, 2, 2, 3, 4])))
        options["no_split_module_classes"] = rng.sample(classes, rng.choice([0, 0, min(1, len(classes)), min(2, len(classes))]))
        options["clean_result"] = rng.random() < 0.7
        options["offload_buffers"] = rng.random() < 0.3
        options["fallback_allocation"] = rng.random() < 0.4
        plans.append(planned(made, options))
    for _ in range(2):
        options = random_sizes(rng, names)
        options["max_memory"] = random_budget(rng, total, range(rng.choice([1, 2, 3, 4])))
        options["no_split_module_classes"] = rng.sample(classes, rng.choice([0, min(1, len(classes)), min(2, len(classes))]))
        options["low_zero"] = rng.random() < 0.4
        if options["low_zero"]:  # Python counts on GPUs 0, 1, ... that all have memory
            options["max_memory"] = {key: max(value, 8) for key, value in options["max_memory"].items()}
        balances.append(balanced(made, options))
    return model | {
        "sizes_options": sizes_options, "sizes": dict(sizes), "buffers": modeling.compute_module_total_buffer_size(made, **sizes_options),
        "largest": [largest, layers], "tied": find_tied_parameters(made), "plans": plans, "balanced": balances,
    }  # fmt: skip


def main():
    logging.getLogger("accelerate").setLevel(logging.CRITICAL)
    rng = random.Random(19)
    models = []
    while len(models) < 200:
        model = describe(rng)
        if sum(len(m["parameters"]) for m in model["modules"]) >= 3:
            models.append(model)
    (here / "plans.json").write_text("[\n" + ",\n".join(json.dumps(m, separators=(",", ":")) for m in models) + "\n]\n")
    plans = [plan for model in models for plan in model["plans"]]
    print(len(models), "models,", len(plans), "plans,", sum("error" in p for p in plans), "of them errors,",
          sum(bool(m["tied"]) for m in models), "models with ties,", sum(len(set(p.get("map", {}).values())) > 1 for p in plans), "plans with several devices,",
          sum(bool(p.get("homeless")) for p in plans), "with buffers that fit nowhere,", sum("error" in b for m in models for b in m["balanced"]), "errors of get_balanced_memory")  # fmt: skip


if __name__ == "__main__":
    main()
