"""check_links.py SITE: every link, picture, script and anchor of the built pages leads somewhere, and none is fetched from
the internet. Prints what does not, and fails."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links: list[str] = []
        self.parts: list[str] = []  # what a browser loads with the page
        self.anchors: set[str] = set()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "link" and values.get("href"):
            self.parts.append(values["href"])
        if tag in ("img", "script", "source", "iframe") and values.get("src"):
            self.parts.append(values["src"])


def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def problems(site: Path) -> list[str]:
    pages = {page.resolve(): read(page) for page in sorted(site.rglob("*.html"))}
    found = []
    for page, content in pages.items():
        for link in content.links + content.parts:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in content.parts:
                    found.append(f"{page.relative_to(site.resolve())}: loads {link}")
                continue
            # Only the page of a server's error 404 has links from the root.
            start = site if url.path.startswith("/") else page.parent
            target = (start / unquote(url.path).lstrip("/")).resolve() if url.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{page.relative_to(site.resolve())}: {link} does not exist")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors:
                found.append(f"{page.relative_to(site.resolve())}: {link} has no such heading")
    if len(pages) < 20:
        found.append(f"{site} has {len(pages)} pages")
    return found


if __name__ == "__main__":
    complaints = problems(Path(sys.argv[1]))
    for complaint in complaints:
        print("docs:", complaint, file=sys.stderr)
    sys.exit(1 if complaints else 0)
