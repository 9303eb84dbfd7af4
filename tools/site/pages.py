"""pages.py OUTPUT: the Markdown pages of the site, and mkdocs.yml beside them.

The README is the home page and docs/*.md keep their names. Links to other files of the repository, such as examples, get
a page with their text. Raises if a link leads nowhere.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import api_reference
import troubleshooting

LINK = re.compile(r'(\[(?:docs/)?\w+\.md\]\(|\]\(|\bsrc(?:set)?="|\bhref=")([^)\s"]+)')
FENCE = re.compile(r"^ *```")
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".sh": "bash", ".py": "python", ".yaml": "yaml", ".yml": "yaml",
             ".cmake": "cmake", ".txt": "text", ".awk": "awk", ".json": "json"}
IMAGES = {".svg", ".png"}
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"

# What a reader meets first comes first. Pages of docs/ that are not listed follow in the guides.
NAVIGATION = {
    "Start": ["docs/quickstart.md", "docs/migrating.md", "docs/launching.md"],
    "Guides": ["docs/training.md", "docs/accumulation.md", "docs/precision.md", "docs/fp8.md",
               "docs/modules.md",
               "docs/activation_checkpointing.md", "docs/sharding.md", "docs/parallelism.md", "docs/data.md",
               "docs/checkpointing.md", "docs/formats.md", "docs/inference.md", "docs/trackers.md", "docs/monitor.md",
               "docs/commands.md", "docs/profiling.md", "docs/capture.md",
               "docs/performance.md", "docs/threads.md"],
    "Trouble": ["docs/troubleshooting.md", "docs/faults.md"],
    "Reference": ["docs/headers.md", "docs/options.md", "docs/parity.md", "docs/abi.md"],
    "Project": ["docs/architecture.md", "src/README.md", "docs/testing.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"],
}


def tracked(under: str = ".") -> list[str]:
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", under], check=True,
                            capture_output=True, text=True).stdout
    return listed.splitlines()


def site_path(path: str) -> str:
    """Where a Markdown file of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return "project/" + path.replace("/", "_").lower()


def title_of(page: str) -> str:
    with open(page, encoding="utf-8") as stream:
        return next(line for line in stream if line.startswith("# ")).removeprefix("# ").strip()


class Site:
    def __init__(self, output: Path):
        self.output = output
        self.files = set(tracked())
        self.folders = {parent.as_posix() for file in self.files for parent in Path(file).parents}
        self.pages = ["README.md"] + [file for group in NAVIGATION.values() for file in group]
        more = sorted(f for f in self.files if re.fullmatch(r"docs/[^/]*\.md", f) and f not in self.pages)
        self.groups = {**NAVIGATION, "Guides": NAVIGATION["Guides"] + more}
        self.pages += more
        self.wanted: list[str] = []  # files and folders that pages link to

    def write(self, path: str, text: str) -> None:
        target = self.output / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def place_of(self, path: str, page: str) -> str:
        """The place in the site of a file or folder of the repository."""
        if path in self.pages:
            return site_path(path)
        if Path(path).suffix in IMAGES and path in self.files:
            place = path.removeprefix("docs/")
            (self.output / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.output / place)
            return place
        if path not in self.files and path not in self.folders:
            raise SystemExit(f"docs: {page} links to {path}, which does not exist")
        if path not in self.wanted:
            self.wanted.append(path)
        return f"files/{path}/index.md" if path in self.folders else f"files/{path}.md"

    def relocated(self, text: str, page: str, place: str) -> str:
        """The text of a page of the repository with links that hold at its place in the site."""
        def link(match: re.Match) -> str:
            target, hash_sign, anchor = match.group(2).partition("#")
            if not target or re.match(r"[a-z]+:", match.group(2)):
                return match.group(0)
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            there = posixpath.relpath(self.place_of(path, page), posixpath.dirname(place) or ".")
            begin = match.group(1)
            if begin.startswith("["):  # the name of a page says less than its title
                begin = f"[{title_of(path)}]("
            return begin + there + hash_sign + anchor

        lines, code = [], False
        for line in text.splitlines():
            if FENCE.match(line):
                code = not code
            # Every second part is between backticks.
            parts = [line] if code else re.split(r"(`+[^`]+`+)", line)
            lines.append("".join(part if code or i % 2 else LINK.sub(link, part) for i, part in enumerate(parts)))
        return "\n".join(lines) + "\n"

    def write_page(self, page: str) -> None:
        text = Path(page).read_text(encoding="utf-8")
        if page == "docs/troubleshooting.md":
            text = troubleshooting.with_texts(text)
        text = self.relocated(text, page, site_path(page))
        if page in NAVIGATION["Project"]:  # for those who change the library
            text = "---\nsearch:\n  boost: 0.5\n---\n" + text
        self.write(site_path(page), text)

    def write_files(self) -> None:
        for path in self.wanted:  # grows while folders are listed
            if path in self.folders:
                inside = sorted({name.removeprefix(path + "/").split("/")[0] for name in tracked(path)})
                place = f"files/{path}/index.md"
                listed = [f"- [{name}]({posixpath.relpath(self.place_of(f'{path}/{name}', place), f'files/{path}')})"
                          for name in inside]
                self.write(place, f"{NOT_SEARCHED}# {path}\n\n" + "\n".join(listed) + "\n")
            else:
                text = Path(path).read_text(encoding="utf-8")
                language = LANGUAGES.get(Path(path).suffix, "text")
                fence = "`" * max([3] + [len(run) + 1 for run in re.findall(r"`+", text)])
                self.write(f"files/{path}.md", f"{NOT_SEARCHED}# {path}\n\n{fence}{language}\n{text}{fence}\n")

    def write_configuration(self, references: list[str]) -> None:
        lines = ["INHERIT: ../../tools/site/mkdocs.yml", f"docs_dir: {self.output.name}", "site_dir: site", "nav:",
                 "  - Home: index.md"]
        for title, pages in self.groups.items():
            lines.append(f"  - {title}:")
            lines += [f"      - {site_path(page)}" for page in pages]
            if title == "Reference":
                lines.append("      - API:")
                lines += [f"          - {page}" for page in references]
        lines.append("not_in_nav: /files/")
        (self.output.parent / "mkdocs.yml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    output = Path(sys.argv[1])
    shutil.rmtree(output, ignore_errors=True)
    site = Site(output)
    for page in site.pages:
        site.write_page(page)
    site.write_files()
    references = api_reference.write(output / "api")
    for asset in ("site.css", "iframe-worker.js"):
        shutil.copyfile(f"tools/site/{asset}", output / asset)
    site.write_configuration([f"api/{page}" for page in references])
    print(f"docs: {len(site.pages)} pages, {len(references)} of the reference, {len(site.wanted)} files")


if __name__ == "__main__":
    main()
