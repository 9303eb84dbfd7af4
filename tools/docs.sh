#!/usr/bin/env bash
# Reference pages of the public headers and the guides, in build/docs/html.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh --packages doxygen
mkdir -p build
doxygen docs/Doxyfile
echo "docs: open build/docs/html/index.html"
