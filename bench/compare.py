"""compare.py TITLE OURS [PYTHON]: a table of medians, spreads and ratios.

The files have lines "name<tab>value<tab>unit", one per round. A line "X, raw Gloo" of ours is what X is compared with
besides Python's; "X, best" of Python's is X with its best documented setting. The spread is half of the distance
between the least and the largest value, in percent of the median. BENCH_JSON: a file that the figures are added to.
"""
import datetime
import json
import os
import platform
import statistics
import sys

GLOO = ", raw Gloo"
BEST = ", best"


def read(path):
    """By name, the unit and all values."""
    cases = {}
    for line in open(path) if os.path.exists(path) else ():
        parts = line.rstrip("\n").split("\t")
        if len(parts) == 3:
            cases.setdefault(parts[0], (parts[2], []))[1].append(float(parts[1]))
    return cases


def figure(case):
    if case is None:
        return None
    values = case[1]
    median = statistics.median(values)
    spread = 50 * (max(values) - min(values)) / abs(median) if median else 0.0
    return {"median": median, "spread": round(spread, 1), "values": values}


def table(cases):
    """The lines of a table; columns that no case has are left out."""
    others = [(key, head) for key, head in [("python", "Python"), ("best", "best"), ("gloo", "raw Gloo")]
              if any(case[key] for case in cases)]
    yield f"{'case':<46}{'ours':>12} {'unit':<6}{'+-':>6}" + "".join(f"{head:>12}{'ratio':>8}" for _, head in others)
    for case in cases:
        ours = case["ours"]["median"]
        row = f"{case['name']:<46}{ours:>12.{1 if ours >= 10 else 2}f} {case['unit']:<6}{case['ours']['spread']:>5.0f}%"
        for key, _ in others:
            other = case[key]["median"] if case[key] else 0
            row += f"{other:>12.1f}{ours / other:>8.3f}" if other else " " * 20
        yield row.rstrip()


def machine():
    """What the figures are of."""
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    return {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "cores": os.cpu_count(),
            "cpu": model or platform.processor(), "gpu": os.environ.get("BENCH_GPU", "")}


def add_to(path, title, cases):
    results = json.load(open(path)) if os.path.exists(path) else {"machine": machine(), "areas": []}
    results["areas"] = [area for area in results["areas"] if area["title"] != title]
    results["areas"].append({"title": title, "cases": cases})
    with open(path, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


def main():
    title, ours = sys.argv[1], read(sys.argv[2])
    python = read(sys.argv[3]) if len(sys.argv) > 3 else {}
    cases = [{"name": name, "unit": case[0], "ours": figure(case), "python": figure(python.get(name)),
              "best": figure(python.get(name + BEST)), "gloo": figure(ours.get(name + GLOO))}
             for name, case in ours.items() if not name.endswith(GLOO)]
    facts = machine()
    print(f"\n{facts['date']}, {facts['cores']} cores, {facts['cpu']}: {title}, medians of rounds")
    print("\n".join(table(cases)))
    if os.environ.get("BENCH_JSON"):
        add_to(os.environ["BENCH_JSON"], title, cases)


if __name__ == "__main__":
    main()
