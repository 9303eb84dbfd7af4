"""Writes loads.json and dumps.json: what Python's json module reads and writes.

What it refuses is null, as are integers beyond 64 bits and halves of surrogate pairs, which C++
values cannot hold.

    python tests/reference/json/write_reference.py
"""

import json
import pathlib
import random

random.seed(0)
here = pathlib.Path(__file__).parent


def fits(value):
    if isinstance(value, dict):
        return all(fits(k) and fits(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(fits, value))
    if isinstance(value, str):
        return not any(0xD800 <= ord(c) < 0xE000 for c in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def read(text):
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return repr(value) if fits(value) else None


def write(name, rows):
    (here / name).write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")


texts = ["", " ", "null", "true", "false", "nul", "NaN", "Infinity", "-Infinity", "-NaN", "0", "-0", "-0.0", "01", "1.", ".5", "1.5", "1e5", "1E+5", "1e", "1e400",
         "-1e400", "1e-400", "0.0000001e400", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "+1", "--1",
         "\"\"", "\"a\"", "\"a", "\"\\n\\t\\u0041\\\"\\\\\\/\"", "\"\\x\"", "\"\\u12\"", "\"\\ud83d\\ude00\"", "\"\\ud83d\"", "\"\\ude00\"", "\"\n\"",
         "\"é\"", "[]", "[1,]", "[1 2]", "[1, [2, {}]]", "[", "]", "{}", "{\"a\": 1}", "{\"a\": 1, \"a\": 2, \"b\": 3}", "{\"a\" 1}", "{a: 1}", "{\"a\": 1,}", "{1: 2}",
         "{'a': 1}", "[1] x", " [1]\n", "// x\n1", "\"\\u0000\"", "1.5e3", "123456789.123456789", "1e22", "\"\x7f\"", "{\"a\": NaN, \"b\": [-Infinity]}"]
alphabet = ["{", "}", "[", "]", ",", ":", "\"a\"", "\"b\"", "1", "-2.5", "null", "true", " ", "1e3", "\\", "\""]
texts += ["".join(random.choices(alphabet, k=random.randint(1, 8))) for _ in range(1500)]
write("loads.json", [[t, read(t)] for t in dict.fromkeys(texts)])

values = [None, True, 1, 1.0, 1e-7, 1e17, float("nan"), float("inf"), float("-inf"), "", "é\u2028😀\x7f\x1f\"\\/\b\f\n\r\t", [], {}, [[]], {"b": [1, {}], "a": {"d": 1, "c": [None]}},
          [1, "two", {"three": [3.5]}], {"Z": 1, "a": 2, "é": 3, "_": 4, "A": 5}]
write("dumps.json", [[v, json.dumps(v), json.dumps(v, indent=2, sort_keys=True), json.dumps(v, ensure_ascii=False)] for v in values])
