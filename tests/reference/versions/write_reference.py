"""Writes versions.json: what Python's `packaging` makes of version texts.

Each row is [text, normal form, rank]; rank orders all valid texts, equal versions share one. The
normal form of what is no version is null.

    python tests/reference/versions/write_reference.py
"""

import itertools
import json
import pathlib
import random

from packaging.version import InvalidVersion, Version

random.seed(0)
texts = """0 0.0 1 1.0 1.0.0 1.0.1 01.002 1.10 1.9 2.9.1 2.9.1+cu130 2.10.0 2.11.0 2.11.0+cu126 2.11.0+cu130
2.11.0+cpu 2.11.0.dev20260101 2.11.0.dev20260101+cu130 2.11.0a0+gitabc123 2.11.0a0 1.16.0.dev0 1.16.0
1!0.5 0!1.0 2!1 1.0a 1.0a. 1.0a.1 1.0-a_1 1.0alpha1 1.0b2 1.0beta 1.0c1 1.0rc1 1.0RC.1 1.0-rc-1 1.0pre 1.0preview3
1.0.post 1.0.post1 1.0post2 1.0-1 1.0-0 1.0r4 1.0rev5 1.0_rev_6 1.0a1.post2 1.0a1.post2.dev3 1.0.dev 1.0dev4 1.0.dev.5
1.0.post1.dev2 1.0+abc 1.0+abc.1 1.0+1 1.0+10 1.0+9 1.0+a.b 1.0+a-b_c 1.0+ABC 1.0+001 1.0+1a v1.0 V1.2rc3
1.0.0.0 1.0.0.1 99999999999999999999.1 99999999999999999998.1 1.0.dev99999999999999999999999
550.40.07 550.54.15 13.0 12.9 6.8.0 5.4.300
abc 1.0x 1..0 .1 1. 1.0+ 1.0+a..b 1.0+_a 1!  !1 1.0-- 1.0-1-2 1.0a1b2 1.0dev1post1 v v.1 1.0+a+b 1.0rcx 1,0 1.0é
1.0.post1.post2 1.0-1.dev1 1.0-.1 1.0a-1 1.0a--1 1.0.- 1-a 1.a1 1.dev 1.post1 1post-1""".split()
texts += ["", " 1.0 ", "\t1.0\n", "1 .0", "1.0 rc1", "1.0\n\n"]
parts = [["", "1!"], ["1", "1.0", "1.2", "1.2.0"], ["", "a1", "b", "rc2", ".a.1"], ["", ".post1", "-2", "r"],
         ["", ".dev3", "dev"], ["", "+a", "+1.b", "+b.2"]]
texts += random.sample(["".join(p) for p in itertools.product(*parts)], 300)
alphabet = ["1", "0", ".", "-", "_", "a", "b", "rc", "post", "dev", "+", "!", "v", "r", "12"]
texts += ["".join(random.choices(alphabet, k=random.randint(1, 6))) for _ in range(600)]

parsed = {}
for text in dict.fromkeys(texts):
    try:
        parsed[text] = Version(text)
    except InvalidVersion:
        parsed[text] = None

order = sorted({v for v in parsed.values() if v is not None})
rank = {v: i for i, v in enumerate(order)}
rows = [[t, None if v is None else str(v), None if v is None else rank[v]] for t, v in parsed.items()]
path = pathlib.Path(__file__).with_name("versions.json")
path.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
