"""Writes what Python Accelerate 1.13 does with save_state and load_state. Run with torch 2.11.

calls.json: for each case the calls and, after each of them, the folders in `checkpoints` and save_iteration, or the error; and what
hooks were called with and which files there were then. safetensors/ and bin/: checkpoints of one process, saved after 3 steps with
numbers that any processor computes exactly; next.json: the losses, parameters, learning rates and random numbers that follow them.
"""

import json
import os
import pathlib
import random
import shutil
import sys
import tempfile

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration, set_seed

HERE = pathlib.Path(__file__).parent


def accelerator_with(**options):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def folders_of(project):
    return sorted((p.name for p in (project / "checkpoints").glob("*")), key=lambda name: int(name.split("_")[-1]))


# ---- automatic names ----------------------------------------------------------------------------

# "new" makes another accelerator with these fields of the ProjectConfiguration; a number sets the iteration.
NAMING = {
    "no limit": ["new", {}, "save", "save", "save"],
    "a limit of two": ["new", {"total_limit": 2}] + ["save"] * 11,
    "a limit of one": ["new", {"total_limit": 1}] + ["save"] * 3,
    "a first number": ["new", {"iteration": 5}, "save", "save", 20, "save", 7, "save"],
    "a limit and numbers out of order": ["new", {"total_limit": 3, "iteration": 8}] + ["save"] * 4 + [2, "save", "save"],
    "a second run": ["new", {}, "save", "save", "new", {}, "save", 2, "save"],
    "a second run with a lower limit": ["new", {}] + ["save"] * 5 + ["new", {"total_limit": 2, "iteration": 5}, "save", "save"],
}


def naming_case(calls):
    results = []
    with tempfile.TemporaryDirectory() as project:
        calls = iter(calls)
        for call in calls:
            if call == "new":
                config = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, **next(calls))
                accelerator = accelerator_with(project_config=config)
                accelerator.prepare(torch.nn.Linear(1, 1))
                continue
            if isinstance(call, int):
                accelerator.project_configuration.iteration = call
                continue
            result = {}
            try:
                folder = accelerator.save_state("ignored")
                result["saved"] = os.path.relpath(folder, project)
            except ValueError as error:
                result["error"] = "already exists" if "already exists" in str(error) else str(error)
            results.append(result | {"folders": folders_of(pathlib.Path(project)), "save_iteration": accelerator.save_iteration})
    assert not os.path.exists("ignored")
    return results


# ---- hooks --------------------------------------------------------------------------------------


def hooks_case():
    """Two models, named by the number of their outputs. What each call of a hook saw, the files, and the models whose weights came back."""
    accelerator = accelerator_with()
    models = [torch.nn.Linear(1, n) for n in (1, 2)]
    models = list(accelerator.prepare(*models))
    for model in models:
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []

    def first(models, weights, output_dir):
        seen.append(["first", [m.out_features for m in models], [len(w["bias"]) for w in weights]])
        (pathlib.Path(output_dir) / "side.txt").write_text("by a hook")

    def second(models, weights, output_dir):
        seen.append(["second", [m.out_features for m in models], [len(w["bias"]) for w in weights]])
        weights.pop(0)

    def load_first(models, input_dir):
        seen.append(["load_first", [m.out_features for m in models], (pathlib.Path(input_dir) / "side.txt").read_text()])
        models.pop(0)

    def load_second(models, input_dir):
        seen.append(["load_second", [m.out_features for m in models], None])

    results = []

    def save():
        with tempfile.TemporaryDirectory() as folder:
            seen.clear()
            accelerator.save_state(folder)
            results.append({"seen": list(seen), "files": sorted(os.listdir(folder))})

    handles = [accelerator.register_save_state_pre_hook(hook) for hook in (first, second)]
    save()
    handles[0].remove()
    save()
    handles[0].remove()
    handles[1].remove()
    save()

    for hook in (load_first, load_second):
        handles.append(accelerator.register_load_state_pre_hook(hook))
    accelerator.register_save_state_pre_hook(first)
    accelerator.register_save_state_pre_hook(second)

    def load(folder):
        seen.clear()
        with torch.no_grad():
            for model in models:
                model.bias.fill_(7)
        accelerator.load_state(folder)
        results.append({"seen": list(seen), "loaded": [m.out_features for m in models if not (m.bias == 7).all()]})

    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)  # model.safetensors has the weights of the second model
        load(folder)
    return results


# ---- checkpoints --------------------------------------------------------------------------------


class Progress:
    def __init__(self):
        self.batches = 0

    def state_dict(self):
        return {"batches": self.batches, "names": ["a", "b"]}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def run_of_three():
    """The objects of tests/accelerator/run_state_test.cpp, after three steps."""
    accelerator = accelerator_with()
    net = torch.nn.Linear(2, 2)  # its gradients do not depend on its weights
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(((torch.arange(parameter.numel()) % 3 - 1) * (number + 1) / 4).view(parameter.shape))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    set_seed(3)
    random.gauss(0, 1)  # Python's generators draw numbers in pairs and keep one
    np.random.normal()
    return accelerator, model, optimizer, scheduler, progress


def step(run):
    accelerator, model, optimizer, scheduler, progress = run
    with accelerator.accumulate(model):
        x = torch.tensor([[1.0, 0.5]]) * (progress.batches % 2 + 1) / 4
        loss = model(x).sum() / 2
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    progress.batches += 1
    return loss.item()


def random_numbers():
    return {
        "python": [random.getrandbits(32) for _ in range(3)],
        "numpy": [int(n) for n in np.random.randint(0, 2**32, 3, dtype=np.uint32)],
        "torch": [int(n) for n in torch.randint(0, 2**31, (3,))],
    }


def main():
    naming = [{"name": name, "calls": calls, "results": naming_case(calls)} for name, calls in NAMING.items()]
    lines = [json.dumps(case) for case in naming]
    (HERE / "calls.json").write_text(
        '{"naming": [\n' + ",\n".join(lines) + '\n],\n"hooks": [\n' + ",\n".join(json.dumps(r) for r in hooks_case()) + "\n]}\n"
    )

    run = run_of_three()
    for _ in range(3):
        step(run)
    for name in ("safetensors", "bin"):
        shutil.rmtree(HERE / name, ignore_errors=True)
        run[0].save_state(HERE / name, safe_serialization=name == "safetensors")
    after = {"random": random_numbers(), "step": run[0].step, "losses": [], "rates": []}
    for _ in range(3):
        after["losses"].append(step(run))
        after["rates"].append(run[2].param_groups[0]["lr"])
    after["parameters"] = [p.flatten().tolist() for p in run[1].parameters()]
    (HERE / "next.json").write_text(json.dumps(after, indent=1) + "\n")


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
