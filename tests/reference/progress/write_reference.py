"""Writes meters.json: lines as Python's tqdm formats them, for tests/core/progress_line_test.cpp.

    python write_reference.py  # beside it
"""
import json
from pathlib import Path

from tqdm import tqdm

CASES = [
    dict(n=0, total=10, elapsed=0),
    dict(n=3, total=10, elapsed=1.5),
    dict(n=10, total=10, elapsed=5),
    dict(n=11, total=10, elapsed=5),
    dict(n=3, total=None, elapsed=1.5),
    dict(n=0, total=None, elapsed=0),
    dict(n=0, total=0, elapsed=1),
    dict(n=5, total=100, elapsed=600),
    dict(n=5, total=100, elapsed=7300, prefix="epoch 1"),
    dict(n=5, total=100, elapsed=2, prefix="epoch 1: "),
    dict(n=5, total=None, elapsed=2, prefix="stream"),
    dict(n=50, total=100, elapsed=2, ncols=60),
    dict(n=33, total=100, elapsed=2, ncols=79),
    dict(n=33, total=100, elapsed=2, ncols=79, ascii=True),
    dict(n=99, total=100, elapsed=2, ncols=80, ascii=True, prefix="training"),
    dict(n=50, total=100, elapsed=2, ncols=20),
    dict(n=50, total=100, elapsed=2, ncols=0),
    dict(n=50, total=None, elapsed=2, ncols=0),
    dict(n=50, total=None, elapsed=2, ncols=12),
    dict(n=5, total=None, elapsed=2, prefix="train: "),
    dict(n=12345, total=1234567, elapsed=10, unit="B", unit_scale=True),
    dict(n=12345678, total=123456789, elapsed=10, unit="B", unit_scale=True, unit_divisor=1024),
    dict(n=999, total=None, elapsed=10, unit="B", unit_scale=True),
    dict(n=9994, total=99949, elapsed=0.001, unit=" samples", unit_scale=True),
    dict(n=7, total=9, elapsed=3, postfix="loss=0.25, lr=1e-5"),
    dict(n=7, total=9, elapsed=3, rate=100.0),
    dict(n=7, total=9, elapsed=3, rate=0.01),
    dict(n=107, total=200, elapsed=3, initial=100),
    dict(n=100, total=200, elapsed=3, initial=100),
    dict(n=1, total=3, elapsed=86400 * 3),
    dict(n=1, total=10**9, elapsed=100.0),
    dict(n=123456, total=123456, elapsed=0.01, unit="batch"),
    dict(n=2, total=7, elapsed=1, prefix="数据", ncols=60),
    dict(n=2, total=7, elapsed=1, prefix="数据很长很长很长很长很长很长", ncols=30),
    dict(n=2, total=7, elapsed=1, prefix="café ☕", ncols=70),
    dict(n=1, total=3, elapsed=0.5, ncols=1),
    dict(n=-3, total=None, elapsed=1),
]

NUMBERS = [0, 1, 12, 123456, 1234567, -5, 0.25, 1e-5, 1.0, 2.5e10, 0.123456789, 100.0, 1e100, -0.5, 3.14159,
           1e16, 123456.0, float("inf"), float("nan"), 1 / 3, 1e-4, 12345.678]


def main():
    meters = [dict(arguments=case, line=tqdm.format_meter(**case)) for case in CASES]
    # As text: JSON has no infinity.
    numbers = [dict(value=repr(value), text=tqdm.format_num(value)) for value in NUMBERS]
    text = json.dumps(dict(meters=meters, numbers=numbers), indent=1, ensure_ascii=True)
    Path(__file__).with_name("meters.json").write_text(text + "\n")


main()
