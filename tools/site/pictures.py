#!/usr/bin/env python3
"""The pictures of the README, in docs/images.

    tools/site/pictures.py benchmark          of the figures in docs/performance.md
    tools/site/pictures.py benchmark --check  complains if the picture shows others
    tools/site/pictures.py demo BUILD         of a run of the demo, built in that folder, in a terminal
"""

import os
import pty
import re
import sys
from html import escape
from pathlib import Path

IMAGES = Path("docs/images")
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
TEXT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


# ---- the benchmark ----------------------------------------------------------------------------------------------------

# What a bar is called, and how its row in docs/performance.md begins.
BARS = [
    ("training step, small MLP, 2 processes", "| MLP 784-128-10 | 2 |"),
    ("training step, larger MLP, 2 processes", "| MLP 784-1024-1024-10 | 2 |"),
    ("training step, GPT of 3.3 M, 2 processes", "| GPT, 3.3 M parameters | 2 |"),
    ("training step, GPT of 124 M on a GPU", "| GPT, 124 M parameters, 8 x 1024 tokens: step |"),
    ("start to the first step on a GPU", "| to the end of the first step |"),
    ("all-reduce of 4 MB, 2 processes", "| all-reduce 4 MB |"),
    ("gather of a tree of 8 tensors", "| gather tree of 8 tensors |"),
    ("pause of training for a checkpoint", "| stall of an asynchronous save_state |"),
    ("memory of a process", "| resident memory, state up |"),
]


def figures(beginning: str) -> tuple[float, float, str]:
    """Ours, Python's and the unit, of the first row that begins so."""
    for line in Path("docs/performance.md").read_text(encoding="utf-8").splitlines():
        if line.startswith(beginning):
            cells = [cell.strip() for cell in line.removeprefix(beginning).split("|")]
            return float(cells[0]), float(cells[1]), cells[2]
    raise SystemExit(f"pictures: docs/performance.md has no row that begins with '{beginning}'")


def shown(value: float, unit: str) -> str:
    if unit == "us" and value >= 1000:
        value, unit = value / 1000, "ms"
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    return f"{value:.3g} {unit.replace('us', 'µs')}"


def benchmark() -> str:
    left, width, row, top = 330, 330, 30, 66
    height = top + row * len(BARS) + 40
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" font-family="{TEXT}" font-size="14">',
           "<title>Accelerate for C++ compared with Python Accelerate</title>",
           f'<rect width="860" height="{height}" rx="8" fill="#ffffff"/>',
           '<text x="24" y="32" font-size="17" font-weight="600" fill="#1f2937">Time and memory, Python Accelerate = 1</text>',
           '<text x="24" y="52" font-size="12" fill="#6b7280">shorter is better; figures, machines and commands are in'
           " docs/performance.md</text>",
           f'<line x1="{left + width}" y1="{top}" x2="{left + width}" y2="{height - 34}" stroke="#9ca3af"'
           ' stroke-dasharray="3 3"/>',
           f'<text x="{left + width}" y="{height - 16}" font-size="12" text-anchor="middle" fill="#6b7280">Python</text>']
    for i, (label, beginning) in enumerate(BARS):
        ours, python, unit = figures(beginning)
        y = top + i * row
        bar = max(2.0, width * ours / python)
        out += [f'<text x="{left - 12}" y="{y + 19}" text-anchor="end" fill="#1f2937">{escape(label)}</text>',
                f'<rect x="{left}" y="{y + 5}" width="{width}" height="20" rx="2" fill="#eef2ff"/>',
                f'<rect x="{left}" y="{y + 5}" width="{bar:.1f}" height="20" rx="2" fill="#3f51b5"/>',
                f'<text x="{left + width + 12}" y="{y + 19}" font-size="12" fill="#374151">{ours / python:.2g}'
                f'<tspan fill="#6b7280">  ({shown(ours, unit)} / {shown(python, unit)})</tspan></text>']
    return "\n".join([*out, "</svg>"]) + "\n"


# ---- the demo ---------------------------------------------------------------------------------------------------------


def in_terminal(command: list[str], columns: int) -> str:
    """What a command writes to a terminal."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm", LC_ALL="C.UTF-8")
        os.system(f"stty cols {columns} rows 40")
        os.execvp(command[0], command)
    written = b""
    try:
        while chunk := os.read(terminal, 65536):
            written += chunk
    except OSError:  # how a terminal says that nobody writes any more
        pass
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit(f"pictures: the demo failed:\n{written.decode(errors='replace')}")
    return written.decode()


def screen(written: str, columns: int) -> list[str]:
    """The lines that stay: of what was drawn in place the last, long ones continued on the next line."""
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r\n", "\n")
    lines = [line.split("\r")[-1].rstrip() for line in written.rstrip().split("\n")]
    return [line[at:at + columns] for line in lines for at in range(0, max(1, len(line)), columns)]


def demo(build: str) -> str:
    columns, line_height, width = 92, 19, 800
    program = ["launch", "--cpu", "--num_processes", "2", f"{build}/examples/digits"]
    lines = ["$ accelerate launch --cpu --num_processes 2 digits"]
    lines += screen(in_terminal([f"{build}/bin/accelerate", *program], columns), columns)
    height = 60 + line_height * len(lines)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="13.4">',
           "<title>make demo: two processes learn to read digits</title>",
           f'<rect width="{width}" height="{height}" rx="8" fill="#1e2430"/>']
    out += [f'<circle cx="{20 + 18 * i}" cy="18" r="6" fill="{fill}"/>' for i, fill in enumerate(["#ff5f57", "#febc2e", "#28c840"])]
    for i, line in enumerate(lines):
        fill = "#7dd3fc" if line.startswith("$") else "#86efac" if line.startswith("result") else "#e5e7eb"
        out.append(f'<text x="16" y="{52 + line_height * i}" fill="{fill}" xml:space="preserve" textLength="{len(line) * 8.25:.0f}"'
                   f' lengthAdjust="spacingAndGlyphs">{escape(line)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    picture = IMAGES / f"{sys.argv[1]}.svg"
    if sys.argv[1:] == ["benchmark", "--check"]:
        if not picture.exists() or picture.read_text(encoding="utf-8") != benchmark():
            print(f"{picture} is not of the figures in docs/performance.md: tools/site/pictures.py benchmark mends it")
        return 0
    IMAGES.mkdir(exist_ok=True)
    picture.write_text(benchmark() if sys.argv[1] == "benchmark" else demo(sys.argv[2]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
