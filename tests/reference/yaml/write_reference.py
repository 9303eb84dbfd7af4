"""Writes scalars.json, documents.json and dumps.json: what PyYAML reads and writes.

Dates stay strings (a C++ value has no date), long strings stay in one line: the differences from
yaml.safe_load and yaml.safe_dump. What PyYAML refuses is null, and so are integers beyond 64 bits and
sets.

    python tests/reference/yaml/write_reference.py
"""

import itertools
import json
import pathlib
import random

import yaml

random.seed(0)
here = pathlib.Path(__file__).parent


class Loader(yaml.SafeLoader):
    pass


Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


def fits(value):
    if isinstance(value, dict):
        return all(type(k) in (str, int, bool) and fits(k) and fits(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(fits, value))
    if isinstance(value, set):
        return False
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def read(text):
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, KeyError, IndexError, TypeError):
        return None
    return repr(value) if fits(value) else None


def write(name, rows):
    (here / name).write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")


words = ["yes", "no", "on", "off", "true", "false", "y", "n", "null", "none", "~", "nan", "inf", "NO", "bf16", "fp16", "all", "main"]
scalars = [f(w) for w in words for f in (str, str.upper, str.capitalize)]
scalars += """0 1 -1 +1 007 010 08 0o7 0x1F 0X1f 0b101 0b 0x 0b_ 0x_ 1_000 1__0 _1 1_ -0 +0x10 -010 0_7 1:30 1:30:45 1:60 1:5 190:20:30
1:30.5 -1:30.25 1:99.5 01:30 1:2:3:4:5 9223372036854775807 -9223372036854775808 9223372036854775808 1e8 1e+8 1.e8 1.0e8 1.0e+8 1.5E-3 1.
.5 -.5 +.5 .5e+3 .inf -.Inf +.INF .nan .NaN -.nan 1.2.3 1_0.5_0 1e5.0 12e03 -2E+05 685_230.15 0.1 1.7976931348623157e+309 1.0e-400
2024-01-31 2024-1-1 2024-01-31T12:30:45Z 2001-12-14t21:59:43.10-05:00 2001-12-14 2024-13-45 ! & * ... --- -- - ? : #
'it''s' "a\\tb" "\\x41\\u00e9" 'no' "1" !!str\x201 !!int\x20"3" !!float\x203 !!bool\x20yes !!null\x20x !!int\x20x !foo\x20bar
127.0.0.1 12:00 a:b a#b http://x:80 -a ?a :a [a] {a} a,b %a @a `a 0.0.0.0 1e-5 1.0e-5 +-1 0x1G 0b12 1,000 ~/hostfile null_ 0:0 0:30
6:59 6:60.0 1:2. 1:2.5_0""".split()
scalars = [s.replace("\\x20", " ") for s in scalars]
alphabet = ["0", "1", "7", "9", "_", ".", ":", "-", "+", "e", "E", "x", "b", "5", "30", "inf", "nan"]
scalars += ["".join(random.choices(alphabet, k=random.randint(1, 6))) for _ in range(2500)]
write("scalars.json", [[s, read(s)] for s in dict.fromkeys(scalars)])

documents = [
    "", "# only a comment\n", "---\n", "a: 1\n", "a: 1\na: 2\n", "{\"a\": [1, 2.5, null, true], \"b\": {}}\n", "- 1\n- [2, 3]\n- {x: y}\n",
    "a: &x [1, 2]\nb: *x\n", "base: &b {x: 1, y: 2}\nmore:\n  <<: *b\n  y: 3\n  z: 4\n",
    "a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc:\n  <<: [*a, *b]\n  q: 0\n", "a:\n  <<: {x: 1}\n  <<: {x: 2, y: 3}\n", "a:\n  <<: 3\n", "a:\n  <<: [1]\n",
    "a:\n  '<<': 3\n", "a: *nope\n", "a: 1\n---\nb: 2\n", "a: |\n  one\n  two\nb: >\n  one\n  two\n", "a: 'x\n  y\n\n  z'\n", "a:\n- 1\n-\n  b: 2\n",
    "? long\n: value\n", "1: a\ntrue: b\n", "1: a\n1.5: b\n", "null: a\n", "[a, b]: c\n", "a: [1, 2\n", "a: 'x\n", "a:\n\tb: 1\n", "a: b: c\n", "key: \x01\n",
    "%YAML 1.1\n---\na: 1\n", "%YAML 3.0\n---\na: 1\n", "a: !!str 1\n", "a: !!set {x}\n", "!!map {a: 1}\n", "a: !!python/none x\n", "é: ü\n", "- &a 1\n- *a\n",
    "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\ndowncast_bf16: 'no'\ntpu_env: []\n", "a: ''\nb: \"\"\nc:\n", "a: !!int '0x10'\n", "=: 1\n",
]
write("documents.json", [[d, read(d)] for d in documents])

pieces = ["a", "B", " ", "'", '"', ":", ": ", "#", " #", "-", "- ", "?", "\n", "\t", "\\", "é", "0", "1.5", "[", "{", ",", "&", "*", "!", "|", ">", "%", "@", "`",
          "yes", "null", "\x00", "\u2028", "\x85", "\ufeff", "😀", "=", "~", "<<", "---", "...", "\r", "_", "e+5"]
values = [s for s in dict.fromkeys(scalars)]
values += ["".join(random.choices(pieces, k=random.randint(0, 6))) for _ in range(2500)]
values += [None, True, False, 0, -3, 2**63 - 1, 0.1, 1e17, 1e-7, 1.5e300, float("inf"), float("-inf"), float("nan"), 100000000.0, [], {}, [[]], [{}]]
values += ["x" * 200, "word " * 40, {"k" * n: 1 for n in (121, 122, 123, 124, 127, 128)}, {"é" * 123: [1], "k" * 130: {"a": [1, 2]}, "": 3}]
values += [{"b": 1, "a": {"z": [], "y": {}}, "c": [1, [2, [3, 4]], {"q": 1, "p": [5]}, [{"m": 1, "n": 2}]]}]
values += [{"multi\nline": "a\nb\n\nc\n", "t": ["a\nb", "x "], "B": 1, "_": 2, "Z": 3, "é": 4}]
values += [{"s%d" % i: "".join(random.choices(pieces, k=3)) for i in range(50)}, ["".join(random.choices(pieces, k=3)) for i in range(50)]]
write("dumps.json", [[v, yaml.safe_dump(v, width=float("inf"))] for v in values])
