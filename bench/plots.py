"""plots.py RESULTS.json FOLDER: one SVG for each area, a bar for each case that Python has too.

A bar says how many times as fast as Python (for memory: how many times as little), on a logarithmic scale; the thin
line at its end is the spread of both.
"""
import json
import math
import re
import sys
from html import escape
from pathlib import Path

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
LEFT, WIDTH, ROW, TOP = 330, 400, 26, 70


def factor(case):
    ratio = case["ours"]["median"] / case["python"]["median"]
    return ratio if case["unit"].endswith("/s") else 1 / ratio


def picture(title, machine, cases):
    most = max(2.0, *(factor(case) for case in cases)) * 1.3
    least = min(1.0, *(factor(case) for case in cases)) / 1.1

    def x(value):
        return LEFT + WIDTH * math.log(value / least) / math.log(most / least)

    height = TOP + ROW * len(cases) + 34
    where = machine["gpu"] or f"{machine['cores']} cores, {machine['cpu']}"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" font-family="{FONT}" font-size="13">',
           f"<title>{escape(title)}: times as fast as Python Accelerate</title>",
           f'<rect width="860" height="{height}" rx="8" fill="#ffffff"/>',
           f'<text x="24" y="30" font-size="16" font-weight="600" fill="#1f2937">{escape(title)}</text>',
           '<text x="24" y="50" font-size="12" fill="#6b7280">times as fast as Python Accelerate, or times as little memory; '
           f'{escape(machine["date"])}, {escape(where)}</text>']
    decades = [10.0 ** k for k in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]
    for mark in sorted({1.0, *(m for m in decades if least <= m <= most)}):
        dash = "" if mark == 1 else ' stroke-dasharray="2 4"'
        out += [f'<line x1="{x(mark):.1f}" y1="{TOP - 6}" x2="{x(mark):.1f}" y2="{height - 30}" stroke="#9ca3af"{dash}/>',
                f'<text x="{x(mark):.1f}" y="{height - 14}" font-size="12" text-anchor="middle" fill="#6b7280">{mark:g}</text>']
    for i, case in enumerate(cases):
        y, value = TOP + i * ROW, factor(case)
        noise = 1 + (case["ours"]["spread"] + case["python"]["spread"]) / 100
        begin, end = sorted([x(1), x(value)])
        fill = "#3f51b5" if value >= 1 else "#c2410c"
        ends = f'x1="{max(LEFT, x(value / noise)):.1f}" x2="{min(LEFT + WIDTH, x(value * noise)):.1f}"'
        out += [f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end" fill="#1f2937">{escape(case["name"])}</text>',
                f'<rect x="{begin:.1f}" y="{y + 3}" width="{max(1.5, end - begin):.1f}" height="16" rx="2" fill="{fill}"/>',
                f'<line {ends} y1="{y + 11}" y2="{y + 11}" stroke="#1f2937" stroke-width="1"/>',
                f'<text x="{LEFT + WIDTH + 12}" y="{y + 15}" font-size="12" fill="#374151">{value:.3g}</text>']
    return "\n".join([*out, "</svg>"]) + "\n"


def main():
    results, folder = json.load(open(sys.argv[1])), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for area in results["areas"]:
        cases = [case for case in area["cases"] if case["python"]]
        if not cases:
            continue
        name = re.sub(r"[^a-z0-9]+", "-", area["title"].lower()).strip("-")
        (folder / f"{name}.svg").write_text(picture(area["title"], results["machine"], cases), encoding="utf-8")
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
