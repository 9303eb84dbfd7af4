"""compare.py OURS PYTHON: a table of medians and ratios from files of "name<tab>value<tab>unit" lines."""
import statistics
import sys


def read(path):
    cases = {}
    for line in open(path):
        parts = line.rstrip("\n").split("\t")
        if len(parts) == 3:
            cases.setdefault(parts[0], ([], parts[2]))[0].append(float(parts[1]))
    return {name: (statistics.median(values), unit) for name, (values, unit) in cases.items()}


ours, python = read(sys.argv[1]), read(sys.argv[2])
print(f"{'case':<46}{'ours':>12}{'Python':>12}  {'unit':<5}{'ratio':>8}")
for name, (value, unit) in ours.items():
    reference = python.get(name, (float("nan"), unit))[0]
    print(f"{name:<46}{value:>12.1f}{reference:>12.1f}  {unit:<5}{value / reference:>8.3f}")
