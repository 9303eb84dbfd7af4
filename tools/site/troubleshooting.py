"""The error texts of docs/troubleshooting.md.

Below the explanation of a group of errors, a comment names the sources that raise them:

    <!-- errors: src/launch/*.cpp cli/launch.cpp -->

The site has the table of their texts there. `troubleshooting.py` checks that each text of the sources is in one group.
"""

import re
import sys
from fnmatch import fnmatch

from error_texts import ErrorText, all_errors

PAGE = "docs/troubleshooting.md"
MARKER = re.compile(r"<!-- errors:\s+(.*?)\s+-->", re.S)


def is_in(error: ErrorText, patterns: list[str]) -> bool:
    return any(fnmatch(error.file, pattern) for pattern in patterns)


def cell(text: str) -> str:
    fence = "``" if "`" in text else "`"
    space = " " if fence == "``" else ""
    return fence + space + text.replace("|", "\\|") + space + fence


def table(errors: list[ErrorText]) -> str:
    lines = ["| kind | text |", "| --- | --- |"]
    seen = set()
    for error in sorted(errors, key=lambda error: error.text.lstrip("…' ").lower()):
        if error.text not in seen:
            lines.append(f"| {error.kind or 'a part'} | {cell(error.text)} |")
        seen.add(error.text)
    return "\n".join(lines)


def with_texts(page: str) -> str:
    errors = all_errors()
    front_matter = "---\nsearch:\n  boost: 3\n---\n"  # who pastes a message looks for this page
    return front_matter + MARKER.sub(lambda m: table([e for e in errors if is_in(e, m.group(1).split())]), page)


def problems(page: str) -> list[str]:
    errors = all_errors()
    groups = [marker.split() for marker in MARKER.findall(page)]
    found = []
    for file in sorted({error.file for error in errors}):
        count = sum(any(fnmatch(file, pattern) for pattern in group) for group in groups)
        if count != 1:
            found.append(f"{PAGE}: {file} raises errors and is in {count} groups; put it into one, with what its errors mean")
    for pattern in (pattern for group in groups for pattern in group):
        if not any(fnmatch(error.file, pattern) for error in errors):
            found.append(f"{PAGE}: nothing that fits '{pattern}' raises errors")
    return found


if __name__ == "__main__":
    with open(PAGE, encoding="utf-8") as stream:
        complaints = problems(stream.read())
    for complaint in complaints:
        print(complaint)
    sys.exit(1 if complaints else 0)
