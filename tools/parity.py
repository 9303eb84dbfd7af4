#!/usr/bin/env python3
"""tools/parity.py: writes the tables of docs/parity.md, all that is below its marker, from docs/parity.txt.

    tools/parity.py --check    complains if the page is another one, or a name that is said to exist is in no header
    tools/parity.py --adopt    the other way round: takes rows that were changed in the page over into docs/parity.txt

docs/parity.txt has a line `== title` for each section, prose below it, and rows as paragraphs of fields:

    python: `gather(tensor)`
    ours: `gather(tree)`
    status: done
    test: operations_multi_test.cpp: Gather.*
    differences: One message for a whole tree; lines that go on are
      indented.
"""

import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

TABLE, PAGE = Path("docs/parity.txt"), Path("docs/parity.md")
MARKER = "<!-- tools/parity.py writes the rest of this page from docs/parity.txt. -->"
FIELDS = ("python", "ours", "status", "test", "differences")
HEAD = ["| Python name | Ours | Status | Test | Differences |", "| --- | --- | --- | --- | --- |"]


@dataclass
class Section:
    title: str
    prose: list[str] = field(default_factory=list)
    rows: list[dict[str, str]] = field(default_factory=list)


def fail(text: str) -> None:
    raise SystemExit(f"parity: {text}")


# ---- docs/parity.txt --------------------------------------------------------------------------------------------------


def read_row(lines: list[str], number: int) -> dict[str, str]:
    row: dict[str, str] = {}
    for line in lines:
        name, colon, text = line.partition(":")
        if line.startswith("  ") and row:
            row[list(row)[-1]] += " " + line.strip()
        elif colon and name in FIELDS and name not in row:
            row[name] = text.strip()
        else:
            fail(f"{TABLE}:{number}: '{line}' is no field. Fields, each once: {', '.join(FIELDS)}")
    if "python" not in row or "status" not in row:
        fail(f"{TABLE}:{number}: a row needs 'python' and 'status'")
    return row


def read_table() -> list[Section]:
    sections: list[Section] = []
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        start = at
        while at < len(lines) and lines[at].strip():
            at += 1
        block = lines[start:at]
        at += 1
        if not block or block[0].startswith("#"):
            continue
        if block[0].startswith("== "):
            sections.append(Section(block[0].removeprefix("== ")))
        elif not sections:
            fail(f"{TABLE}:{start + 1}: a section begins with '== title'")
        elif block[0].startswith("python:"):
            sections[-1].rows.append(read_row(block, start + 1))
        else:
            sections[-1].prose += block + [""]
    return sections


def write_table(sections: list[Section]) -> str:
    out = ["# The rows of docs/parity.md. tools/parity.py says what they look like, and writes the page."]
    for section in sections:
        out += ["", f"== {section.title}", ""] + section.prose
        for row in section.rows:
            for name in FIELDS:
                if row.get(name):
                    out += textwrap.wrap(f"{name}: {row[name]}", 120, subsequent_indent="  ", break_long_words=False,
                                         break_on_hyphens=False)
            out.append("")
        while out[-1] == "":
            out.pop()
    return "\n".join(out) + "\n"


# ---- docs/parity.md ---------------------------------------------------------------------------------------------------


def cell(name: str, text: str) -> str:
    text = text.replace("|", "\\|")
    return text.replace("*", "\\*") if name == "test" else text


def page(sections: list[Section]) -> str:
    out = [PAGE.read_text(encoding="utf-8").split(MARKER)[0].rstrip(), "", MARKER]
    for section in sections:
        out += ["", f"## {section.title}", ""] + section.prose + HEAD
        out += ["| " + " | ".join(cell(name, row.get(name, "")) for name in FIELDS) + " |" for row in section.rows]
    return re.sub(r" +\|", " |", "\n".join(out)) + "\n"


def read_page() -> list[Section]:
    sections: list[Section] = []
    for line in PAGE.read_text(encoding="utf-8").split(MARKER)[-1].splitlines():
        if line.startswith("## "):
            sections.append(Section(line.removeprefix("## ")))
        elif line.startswith("|"):
            cells = [part.strip().replace("\\|", "|") for part in re.split(r"(?<!\\)\|", line)[1:-1]]
            if cells == [part.strip() for part in HEAD[0].split("|")[1:-1]] or set(line) <= set("|- "):
                continue
            if len(cells) != len(FIELDS):
                fail(f"{PAGE}: a row with {len(cells)} columns: {line[:100]}")
            cells[3] = cells[3].replace("\\*", "*")
            sections[-1].rows.append(dict(zip(FIELDS, cells)))
        elif sections and (line or sections[-1].prose) and not sections[-1].rows:
            sections[-1].prose.append(line)
    return sections


# ---- names ------------------------------------------------------------------------------------------------------------


def names_in(text: str) -> list[str]:
    """The names that code calls or reads, as they are written: `Accelerator.gather(x)` is Accelerator.gather."""
    found = []
    for code in re.findall(r"`([^`]+)`", text):
        if match := re.fullmatch(r"((?:[A-Za-z_]\w*(?:\.|::|->))*[A-Za-z_]\w*)(?:<.*>)?(?:\(.*\))?(?:\[.*\])?", code):
            found.append(match.group(1))
    return found


def words_of(files) -> set[str]:
    return {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}


def said_to_exist(row: dict[str, str]) -> list[str]:
    if not row["status"].startswith("done"):
        return []
    ours = row.get("ours", "")
    same = re.match(r"(the )?same\b", ours)
    return names_in(ours) + (names_in(row["python"]) if same and not re.search(r"`", ours) else [])


def missing_names(sections: list[Section]) -> list[str]:
    """Names are looked for by their last part, those behind `detail::` in the headers of src/ as well."""
    public = words_of([*Path("include").rglob("*.h"), Path("cmake/version.h.in")])
    internal = public | words_of(Path("src").rglob("*.h"))
    return [f"{TABLE}: '{name}' of the row {row['python'][:60]} is in no {'' if 'detail::' in name else 'public '}header"
            for section in sections for row in section.rows for name in said_to_exist(row)
            if re.split(r"\.|::|->", name)[-1] not in (internal if "detail::" in name else public)]


def missing_tests(sections: list[Section]) -> list[str]:
    """What is done has a test; a file that is named is there."""
    files = {path.name for folder in ("tests", "examples") for path in Path(folder).rglob("*")}
    rows = [row for section in sections for row in section.rows]
    return [f"{TABLE}: the row {row['python'][:60]} is done, but names no test"
            for row in rows if row["status"].startswith("done") and not row.get("test")] + [
        f"{TABLE}: the row {row['python'][:60]} names {name}, which is no file of tests/ or examples/"
        for row in rows for name in re.findall(r"[\w/]+\.(?:cpp|py|sh)\b", row.get("test", ""))
        if Path(name).name not in files]


def main() -> int:
    if sys.argv[1:] == ["--adopt"]:
        TABLE.write_text(write_table(read_page()), encoding="utf-8")
    sections = read_table()
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(sections), encoding="utf-8")
        return 0
    complaints = missing_names(sections) + missing_tests(sections)
    if page(sections) != PAGE.read_text(encoding="utf-8"):
        complaints.append(f"{PAGE} is not what {TABLE} says: tools/parity.py mends it (--adopt keeps changes of the page)")
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
