#!/usr/bin/env bash
# tools/docs.sh: the documentation site in build/docs/site. Fails if a link leads nowhere. Needs no network to be read.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdocs=$(tools/setup.sh --site)
mkdir -p build/docs
PYTHONDONTWRITEBYTECODE=1 python3 tools/site/pages.py build/docs/pages
NO_MKDOCS_2_WARNING=1 "$mkdocs" build --quiet --strict --clean --config-file build/docs/mkdocs.yml
PYTHONDONTWRITEBYTECODE=1 python3 tools/site/check_links.py build/docs/site
echo "docs: open build/docs/site/index.html"
