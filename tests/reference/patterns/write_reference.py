"""Writes substitutions.json: what Python's re makes of names, for patterns that src/formats/pattern.h understands."""

import json
import pathlib
import random
import re

NAMES = [
    "", "a", "aaa", "abc", "abxd", "model.layers.0.self_attn.q_proj.weight", "transformer.h.11.attn.c_attn.bias",
    "layers.10.norm1.weight", "x.y.z", "a_b-c", "lm_head.weight", "größe.wört.0", "encoder.layer.3.output.dense.weight_v",
    "aXbXc", "..", "h.1.h.22.h", "weight[0]{1}",
]
PATTERNS = [
    (r"", "-"), (r"x*", "-"), (r"a|b", "<\\g<0>>"), (r"^model\.", ""), (r"\.h\.(\d+)\.", r".blocks.\1."), (r"(a+)", r"[\1]"),
    (r"(a+?)", r"[\1]"), (r"(a{2})(a?)", r"\2.\1"), (r"a{1,2}", "_"), (r"a{2,}", "_"), (r"(\w+)\.(\w+)$", r"\2.\1"),
    (r"[^.]+", "p"), (r"[a-c]+", "q"), (r"(q|k|v)_proj", r"\1"), (r"(?:layers|h)\.(\d+)", r"L\1"), (r"\.", "/"), (r".", "c"),
    (r"$", "!"), (r"^", "!"), (r"|a", "x"), (r"(?:a*)*", "_"), (r"(a|ab)(c|bcd)?", r"<\1,\2>"), (r"\D+", "n"), (r"\W", "w"),
    (r"\S", "s"), (r"[\d.]+", "#"), (r"[]x]", "b"), (r"[a\-c]", "m"), (r"ö.", "oe"), (r"(weight|bias)(_v)?", r"\2\1"),
    (r"(.*)\.(.*)", r"\2|\1"), (r"(.*?)\.(.*)", r"\2|\1"), (r"((a)|b)+", r"{\1\2}"), (r"\[(\d)\]\{", r"\\\1"),
]


def generated(count):
    """Random patterns of a small alphabet, whose groups take part in every match."""
    choose = random.Random(7)

    def piece(depth):
        kind = choose.random()
        if depth > 2 or kind < 0.5:
            return choose.choice(["a", "b", ".", "[ab]", "[^a]", r"\d", "x"])
        if kind < 0.65:
            return f"(?:{alternatives(depth + 1)})"
        return piece(depth + 1) + choose.choice(["*", "+", "?", "{2}", "{1,3}", "*?", "+?", "??"]) if kind < 0.85 else piece(depth + 1) * 2

    def fixed(text):
        return re.sub(r"([*+?}])([*+?{])", r"\1", text)

    def alternatives(depth):
        return "|".join("".join(piece(depth) for _ in range(choose.randint(1, 3))) for _ in range(choose.randint(1, 2)))

    made = []
    while len(made) < count:
        pattern = fixed(alternatives(0))
        try:
            re.compile(pattern)
        except re.error:
            continue
        made.append((pattern, r"<\g<0>>"))
    return made


def main():
    choose = random.Random(11)
    words = NAMES + ["".join(choose.choice("abx.1") for _ in range(choose.randint(1, 12))) for _ in range(8)]
    cases = []
    for pattern, replacement in PATTERNS + generated(80):
        compiled = re.compile(pattern, re.ASCII)
        results = [[word, compiled.sub(replacement, word), compiled.fullmatch(word) is not None] for word in words]
        cases.append({"pattern": pattern, "replacement": replacement, "results": results})
    text = json.dumps(cases, indent=None, separators=(",", ":"), ensure_ascii=True).replace('{"pattern"', '\n{"pattern"') + "\n"
    pathlib.Path(__file__).with_name("substitutions.json").write_text(text)


if __name__ == "__main__":
    main()
