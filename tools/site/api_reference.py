"""The reference of the public headers as Markdown: a page for each entry header, with the parts that it includes."""

import re
from pathlib import Path

import headers

INCLUDE = Path("include/accelerate")
NOT_AN_ENTRY = {"accelerate.h", "api.h", "fwd.h"}
# Headers behind `detail` that have options of public functions; tools/options.sh has the same ones.
WITH_OPTIONS = {"detail/accelerator/model_core.h", "detail/comm/tensor_operations.h", "detail/core/split_range.h"}


def entries() -> list[str]:
    return sorted(path.name for path in INCLUDE.glob("*.h") if path.name not in NOT_AN_ENTRY)


def read_all() -> dict[str, headers.Header]:
    paths = sorted(INCLUDE.rglob("*.h"))
    return {path.relative_to(INCLUDE).as_posix(): headers.read(path.as_posix()) for path in paths}


def is_part(name: str) -> bool:
    return "/" in name and (not name.startswith("detail/") or name in WITH_OPTIONS)


def parts_of(all_headers: dict[str, headers.Header]) -> dict[str, list[str]]:
    """The parts of each entry header: those in the folder of its name, then those that it includes."""
    def reached(entry: str) -> list[str]:
        order, queue = [], [entry]
        while queue:
            for include in all_headers[queue.pop(0)].includes:
                name = include.removeprefix("accelerate/")
                if name in all_headers and "/" in name and name not in order:
                    order.append(name)
                    queue.append(name)
        return [name for name in order if is_part(name)]

    by_entry = {entry: reached(entry) for entry in entries()}
    owner = {}
    for part in filter(is_part, all_headers):
        same_name = part.split("/")[0] + ".h"
        including = [entry for entry, found in by_entry.items() if part in found]
        if same_name not in by_entry and not including:
            raise SystemExit(f"docs: accelerate/{part} belongs to no header at the top of include/accelerate")
        owner[part] = same_name if same_name in by_entry else including[0]
    return {entry: sorted((part for part in owner if owner[part] == entry),
                          key=lambda part: found.index(part) if part in found else len(found))
            for entry, found in by_entry.items()}


def as_markdown(comment: str, links: dict[str, str], own_page: str) -> str:
    """A comment with its indented examples as blocks, and names that the reference has as links."""
    def linked(match: re.Match) -> str:
        place = links.get(match.group(1).removeprefix("accelerate::"))
        if place is None:
            return match.group(0)
        page, _, anchor = place.partition("#")
        return f"[`{match.group(1)}`]({'' if page == own_page else page}#{anchor})"

    lines, code = [], False
    for line in comment.splitlines():
        indented = line.startswith("    ") and line.strip()
        if indented and not code and (not lines or not lines[-1].strip()):
            lines.append("```cpp")
            code = True
        elif code and line.strip() and not indented:
            while lines and not lines[-1].strip():
                lines.pop()
            lines += ["```", ""]
            code = False
        if code:
            lines.append(line[4:])
        else:
            lines.append(re.sub(r"`([\w:]+)(?:\(\))?`", linked, re.sub(r"<(?=\w+>)", "&lt;", line)))
    if code:
        lines.append("```")
    return "\n".join(lines).strip()


def block(code: str) -> str:
    return f"```cpp\n{code}\n```"


def anchor_of(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name.replace("operator()", "call").replace("operator", "operator-")).strip("-").lower()


class Page:
    def __init__(self, name: str, links: dict[str, str]):
        self.name, self.links, self.lines, self.used = name, links, [], set()

    def text(self, comment: str) -> None:
        if comment:
            self.lines += [as_markdown(comment, self.links, self.name), ""]

    def heading(self, level: int, title: str, kind: str = "") -> None:
        anchor, number = anchor_of(title), 2
        while anchor in self.used:
            anchor, number = f"{anchor_of(title)}-{number}", number + 1
        self.used.add(anchor)
        note = f' <span class="api-kind">{kind}</span>' if kind else ""
        self.lines += [f"{'#' * level} {title.replace('<', '&lt;').replace('_', chr(92) + '_').replace('*', chr(92) + '*')}{note} {{ #{anchor} }}", ""]

    def fields(self, declaration: headers.Declaration) -> list[headers.Declaration]:
        """Data members as a table; returns the other members."""
        data = [m for m in declaration.members if m.kind == "constant"]
        if data:
            self.lines += ["| member | meaning |", "| --- | --- |"]
            for member in data:
                code = re.sub(r"\s+", " ", member.code).rstrip(";").replace("|", "\\|")
                meaning = as_markdown(re.sub(r"\s+", " ", member.contract), self.links, self.name).replace("|", "\\|")
                self.lines.append(f"| `{code}` | {meaning} |")
            self.lines.append("")
        return [m for m in declaration.members if m.kind != "constant"]

    def declarations(self, found: list[headers.Declaration], level: int, owner: str = "") -> None:
        before = None
        for declaration in found:
            name = f"{owner}::{declaration.name}" if owner else declaration.name
            if name != before:  # overloads share a heading
                self.heading(level, name, declaration.kind if declaration.kind in {"class", "struct", "enum", "concept"} else "")
            before = name
            if declaration.code != f"{declaration.kind} {declaration.name}":
                self.lines += [block(declaration.code), ""]
            self.text(declaration.contract)
            if declaration.members:
                self.declarations(self.fields(declaration), level + 1, name)


def write(output: Path) -> list[str]:
    all_headers = read_all()
    parts = parts_of(all_headers)
    links: dict[str, str] = {}
    for entry, names in parts.items():
        page = entry.removesuffix(".h") + ".md"
        for declaration in (d for name in [entry, *names] for d in all_headers[name].declarations):
            links.setdefault(declaration.name, f"{page}#{anchor_of(declaration.name)}")
            for member in declaration.members:
                if member.kind != "constant":
                    full = f"{declaration.name}::{member.name}"
                    links.setdefault(full, f"{page}#{anchor_of(full)}")
    output.mkdir(parents=True, exist_ok=True)
    index = ["# API reference", "", "Include `<accelerate/accelerate.h>` for all of it, or one of these headers.", "",
             "| header | what it is for |", "| --- | --- |"]
    for entry, names in parts.items():
        header = all_headers[entry]
        page = Page(entry.removesuffix(".h") + ".md", links)
        first, _, rest = header.banner.partition("\n")
        summary = first.partition(" - ")[2]
        paragraph, _, rest = (first + "\n" + rest).partition(" - ")[2].partition("\n\n")
        page.lines += [f"# {entry.removesuffix('.h')}", "", f"`#include <accelerate/{entry}>`", ""]
        page.text(paragraph[:1].upper() + paragraph[1:])
        page.text(rest)
        for name in [entry, *names]:
            if all_headers[name].declarations:
                page.declarations(all_headers[name].declarations, 2)
        (output / page.name).write_text("\n".join(page.lines), encoding="utf-8")
        index.append(f"| [accelerate/{entry}]({page.name}) | {as_markdown(' '.join(paragraph.split()), links, 'index.md')} |")
    (output / "index.md").write_text("\n".join(index) + "\n", encoding="utf-8")
    return ["index.md"] + [entry.removesuffix(".h") + ".md" for entry in parts]
