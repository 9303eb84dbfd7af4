"""Writes values.json: texts that Python and Accelerate give for numbers, strings and sizes.

    python tests/reference/values/write_reference.py
"""

import json
import pathlib
import random
import struct

from accelerate.utils import convert_bytes
from accelerate.utils.modeling import convert_file_size_to_int

random.seed(0)


def bits(x):
    return struct.pack(">d", x).hex()


floats = [0.0, -0.0, 1.0, -1.5, 0.1, 1e-4, 1e-5, 12345.678, 1e15, 1e16, 1e17, 123456789012345678.0, 1e22, 1e23, 5e-324,
          1.7976931348623157e308, 2.2250738585072014e-308, float("inf"), float("-inf"), float("nan"), 2 / 3, 1 / 3, 1e100,
          9007199254740993.0, 9999999999999998.0, 0.00012345]
floats += [struct.unpack(">d", random.randbytes(8))[0] for _ in range(300)]
floats += [random.uniform(-1000, 1000) for _ in range(100)]

strings = ["", "a", "it's", 'say "x"', "both ' and \"", "back\\slash", "\n\r\t\x00\x1b\x7f", "é", "ß", "日本", "\u200b", "\xa0",
           "\u2028", "😀", "\U000e0001", "\ud7ff", "\ue000", "\ufffd", "\U0010ffff", "tab\tinside", "\x85", "\xad", "\u0378"]
strings += ["".join(chr(random.choice([random.randint(0, 0x2FF), random.randint(0x300, 0xD7FF), random.randint(0xE000, 0x1FFFF)]))
                    for _ in range(8)) for _ in range(200)]
byte_strings = [b"", b"abc", b"it's", b'"', b"'\"", bytes(range(256))]

sizes = [0, 1, 300, 1023, 1024, 1025, 2048, 1530000, 1073741823, 1073741824, 5 * 2**40, 2**50, 2**60, 2**63 - 1, -5, -5000,
         1536, 10**9, 999999, 1048575]
sizes += [random.randrange(2**random.randint(1, 62)) for _ in range(200)]
double_sizes = [0.0, 700.0, 700.125, 1023.999, 1024.0, 2.5e9, 1e30, 0.005, 1.005, 2.675]

size_texts = ["1MiB", "5GB", "5.0GB", "10GiB", "1Gb", "8gb", "8Gb", "3KB", "3kb", "3Kb", "0.5 GB", " 2MB", "2 MiB", "1e3KB", "1_000KB",
              "0GB", "-1GB", "GB", "7", "1TB", "5 GB ", "abcGB", "1.5KiB", "0.3KB", "1__0KB", "_1KB", "-0.5KB", "+2KB", "1gIb", "", "1.KB", ".5KB",
              "1Mb", "9Kb", "12kib"]


def size_of(text):
    try:
        return convert_file_size_to_int(text)
    except (ValueError, OverflowError):
        return None


path = pathlib.Path(__file__).with_name("values.json")
path.write_text(json.dumps({
    "floats": [[bits(x), repr(x)] for x in floats],
    "rounded": [[bits(x), bits(round(x, 2))] for x in floats if x == x and abs(x) < 1e200],
    "strings": [[s, repr(s)] for s in strings],
    "bytes": [[b.hex(), repr(b)] for b in byte_strings],
    "sizes": [[n, convert_bytes(n)] for n in sizes],
    "double_sizes": [[bits(x), convert_bytes(x)] for x in double_sizes],
    "size_texts": [[t, size_of(t)] for t in size_texts],
    "nested": [[json.dumps(v), repr(v)] for v in
               [None, True, [], {}, [1, [2.5, "x", None]], {"a": [2, 3], "b": {"c": False}}, [[[]]], {"k'": "v\""}]],
}, indent=0) + "\n")
