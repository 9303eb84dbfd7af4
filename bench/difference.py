"""difference.py A.json B.json: what became slower from A to B, by more than both spread.

Exits with 1 if something did. Cases are compared by area and name; rates (unit X/s) are better when larger, all else
when smaller. A case that one of the files has not is named.
"""
import json
import sys


def cases_of(path):
    return {(area["title"], case["name"]): case for area in json.load(open(path))["areas"] for case in area["cases"]}


def change(before, after):
    """How many times as slow it became, and by how much of that the rounds of the two runs differ."""
    ratio = after["ours"]["median"] / before["ours"]["median"]
    if before["unit"].endswith("/s"):
        ratio = 1 / ratio
    return ratio, (before["ours"]["spread"] + after["ours"]["spread"]) / 100


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: make bench-compare A.json B.json")
    before, after = cases_of(sys.argv[1]), cases_of(sys.argv[2])
    slower = 0
    for key in before:
        title, name = key
        if key not in after:
            print(f"only in {sys.argv[1]}: {title}: {name}")
            continue
        ratio, noise = change(before[key], after[key])
        if abs(ratio - 1) <= noise:
            continue
        slower += ratio > 1
        values = f"{before[key]['ours']['median']:.6g} to {after[key]['ours']['median']:.6g} {before[key]['unit']}"
        print(f"{'SLOWER' if ratio > 1 else 'faster'}  {ratio if ratio > 1 else 1 / ratio:.2f} times  "
              f"{title}: {name} ({values}, spread {100 * noise:.0f}%)")
    for title, name in after.keys() - before.keys():
        print(f"only in {sys.argv[2]}: {title}: {name}")
    print(f"{slower} of {len(before.keys() & after.keys())} cases became slower")
    sys.exit(slower > 0)


if __name__ == "__main__":
    main()
