"""compare.py OURS [PYTHON]: a table of medians and ratios from files of "name<tab>value<tab>unit" lines.

A line "X, raw Gloo" of ours is what X is compared with besides Python's.
"""
import os
import statistics
import sys

gloo = ", raw Gloo"


def read(path):
    cases = {}
    for line in open(path) if os.path.exists(path) else ():
        parts = line.rstrip("\n").split("\t")
        if len(parts) == 3:
            cases.setdefault(parts[0], ([], parts[2]))[0].append(float(parts[1]))
    return {name: (statistics.median(values), unit) for name, (values, unit) in cases.items()}


def against(value, reference):
    if reference is None:
        return f"{'':>12}{'':>8}"
    return f"{reference[0]:>12.1f}{value / reference[0]:>8.3f}"


ours = read(sys.argv[1])
python = read(sys.argv[2]) if len(sys.argv) > 2 else {}
heads = (f"{'Python':>12}{'ratio':>8}" if python else "") + (
    f"{'raw Gloo':>12}{'ratio':>8}" if any(name.endswith(gloo) for name in ours) else "")
print(f"{'case':<46}{'ours':>12} {'unit':<5}{heads}".rstrip())
for name, (value, unit) in ours.items():
    if name.endswith(gloo):
        continue
    row = f"{name:<46}{value:>12.{1 if value >= 10 else 2}f} {unit:<5}"
    if python:
        row += against(value, python.get(name))
    print((row + against(value, ours.get(name + gloo))).rstrip())
