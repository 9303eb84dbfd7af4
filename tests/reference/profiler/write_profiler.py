"""Writes profiler.json: what torch.profiler makes of a few operators, and of schedules.

    python write_profiler.py        (torch 2.11.0)

`operators` are the rows of key_averages (key, calls, shapes if grouped by them, floating-point operations, bytes of `with_memory`), `trace` the
events of the Chrome trace by category and name. `schedules` are the actions of each step: 0 none, 1 warm-up, 2 record, 3 record and save;
`ready` are the numbers of the steps at whose end on_trace_ready was called, -1 for the end of the profile. `texts` are how times and sizes are written.
"""
import collections
import json
import os
import tempfile

import torch
from torch.autograd import profiler_util
from torch.profiler import ProfilerActivity, profile, record_function, schedule


ONE = torch.ones(())  # C++ and Python would make it by other operators


def run(x, w, b):
    with record_function("forward"):
        hidden = torch.addmm(b, x, w).relu()
        loss = hidden.sum()
    loss.backward(ONE)


def operators():
    x, w, b = torch.ones(4, 8), torch.ones(8, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    run(x, w, b)  # without gradients before, AccumulateGrad does other things
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True, profile_memory=True) as prof:
        run(x, w, b)
        run(x, w, b)
    rows = []
    for grouped in (False, True):
        for row in prof.key_averages(group_by_input_shape=grouped):
            entry = {"grouped": grouped, "key": row.key, "count": row.count, "flops": row.flops}
            if grouped:
                entry["shapes"] = row.input_shapes
            if row.key in ("aten::addmm", "aten::relu", "aten::sum"):
                entry["self_cpu_memory"] = row.self_cpu_memory_usage
            rows.append(entry)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        prof.export_chrome_trace(path)
        with open(path) as file:
            trace = json.load(file)
    counts = collections.Counter((event["cat"], event["name"]) for event in trace["traceEvents"]
                                 if event.get("cat") in ("cpu_op", "user_annotation"))
    return rows, sorted([cat, name, count] for (cat, name), count in counts.items())


def schedules():
    result = []
    for wait, warmup, active, repeat, skip_first, steps in [(2, 1, 2, 0, 0, 12), (1, 1, 3, 2, 2, 9), (0, 0, 1, 0, 0, 4), (0, 1, 1, 1, 0, 5),
                                                            (3, 0, 2, 1, 1, 10), (1, 2, 4, 0, 0, 3)]:
        plan = dict(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)
        ready = []
        done = False
        with profile(activities=[ProfilerActivity.CPU], schedule=schedule(**plan), on_trace_ready=lambda p: ready.append(-1 if done else p.step_num)) as prof:
            for _ in range(steps):
                torch.ones(1)
                prof.step()
            done = True
        result.append({**plan, "steps": steps, "actions": [schedule(**plan)(step).value for step in range(steps + 1)], "ready": ready})
    return result


rows, trace = operators()
times = [0.0, 1.5, 999.9994, 1000.0, 12345.678, 1e6, 98765432.1]
sizes = [0, 1, 1023, 1024, -2048, 5 << 20, 3 << 30]
reference = {
    "operators": rows,
    "trace": trace,
    "schedules": schedules(),
    "texts": [[str(value), profiler_util._format_time(value)] for value in times] + [[str(value), profiler_util._format_memory(value)] for value in sizes],
}
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "profiler.json"), "w") as file:
    json.dump(reference, file, indent=1)
    file.write("\n")
