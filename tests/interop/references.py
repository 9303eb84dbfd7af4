"""Compares two copies of tests/reference: `references.py stored written`. The first is what the repository has, the second what Python
writes now.

Files must be equal to the byte, with one exception: the last bits of floats depend on the processor. A script whose numbers do defines
`tolerance(case)`: how far two processors may differ in a number of that case, relative to 1 + |number|. A case is an element of the
first list on the way from the top of the file; in files of torch.save and of safetensors it is a pair of name and values. Texts, counts, keys and shapes must be equal in such files too.
"""

import ast
import json
import math
import pathlib
import sys

import safetensors.torch
import torch


class Differences:
    """Numbers of one file that differ: how many, the largest, and the first that differs by more than is allowed."""

    def __init__(self):
        self.numbers = self.count = 0
        self.largest = 0.0
        self.failures = []

    def compare(self, old, new, where, allowed):
        if isinstance(old, float) and isinstance(new, float):
            self.numbers += 1
            if old == new or (math.isnan(old) and math.isnan(new)):
                return
            self.count += 1
            difference = abs(old - new) / (1 + abs(old))
            self.largest = max(self.largest, difference)  # keeps the old one for NaN, which fails below
            if not difference <= allowed:
                self.failures.append(f"{where}: {old!r} is stored, {new!r} is written now ({difference:.1e}; {allowed:.1e} is allowed)")
        elif isinstance(old, dict) and isinstance(new, dict) and list(old) == list(new):
            for key in old:
                self.compare(old[key], new[key], f"{where}.{key}", allowed)
        elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for i, pair in enumerate(zip(old, new)):
                self.compare(*pair, f"{where}[{i}]", allowed)
        elif old != new or type(old) is not type(new):
            self.failures.append(f"{where}: {str(old)[:200]} is stored, {str(new)[:200]} is written now")

    def compare_cases(self, old, new, where, tolerance):
        if isinstance(old, dict) and isinstance(new, dict) and list(old) == list(new):
            for key in old:
                self.compare_cases(old[key], new[key], f"{where}.{key}", tolerance)
        elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for i, (one, other) in enumerate(zip(old, new)):
                self.compare(one, other, f"{where}[{i}]", tolerance(one))
        else:
            self.compare(old, new, where, 0.0)


def tolerance_of(topic):
    """The function `tolerance` of the topic's script, or None. The rest of the script does not run: it would write its files again."""
    for script in topic.glob("*.py"):
        for node in ast.parse(script.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == "tolerance":
                names = {}
                exec(compile(ast.Module([node], type_ignores=[]), script, "exec"), names)
                return names["tolerance"]
    return None


def plain(value):
    """Tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def parsed(path):
    """A file of numbers; those of torch.save and safetensors have their cases in a dict."""
    if path.suffix == ".json":
        return json.loads(path.read_bytes())
    cases = safetensors.torch.load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return [plain(case) for case in cases.items()]


def files_of(folder):
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def main():
    stored, written = map(pathlib.Path, sys.argv[1:])
    if files_of(stored) != files_of(written):
        sys.exit(f"other files are written now: {sorted(set(files_of(stored)) ^ set(files_of(written)))}")
    failed = 0
    for path in files_of(stored):
        old, new = (stored / path).read_bytes(), (written / path).read_bytes()
        if old == new:
            continue
        tolerance = tolerance_of(stored / path.parts[0])
        if path.suffix not in (".json", ".pt", ".safetensors") or tolerance is None:
            print(f"{path}: differs, and its script has no tolerance")
            failed += 1
            continue
        differences = Differences()
        differences.compare_cases(parsed(stored / path), parsed(written / path), path.name, tolerance)
        print(f"{path}: {differences.count} of {differences.numbers} numbers differ, by {differences.largest:.1e} at most")
        for failure in differences.failures[:5]:
            print(f"  {failure}")
        if len(differences.failures) > 5:
            print(f"  and {len(differences.failures) - 5} more")
        failed += bool(differences.failures)
    if failed:
        sys.exit(f"{failed} stored references differ from what Python writes now")


if __name__ == "__main__":
    main()
