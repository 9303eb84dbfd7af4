#!/usr/bin/env bash
# tools/headers.sh: writes the table of docs/headers.md, all that is below its marker, from the banners of the entry points.
# tools/headers.sh --show prints the page instead.
set -euo pipefail
cd "$(dirname "$0")/.."
page=docs/headers.md
marker='<!-- tools/headers.sh writes the rest of this page from the first sentences of the headers. -->'

# The first sentence of a banner: "accelerate/x.h - what it is for.", on one line or on several.
table() {
  printf '\n| include | for |\n| --- | --- |\n'
  LC_ALL=C awk '
    FNR == 1 { text = ""; done = 0 }
    done { next }
    { sub(/^\/\/ ?/, ""); text = text (text == "" ? "" : " ") $0 }
    text ~ /[.:]$/ || text ~ /[.] / {
      sub(/[.:]$/, "", text); sub(/[.] .*/, "", text)
      split(text, parts, / - /)
      print "| `" parts[1] "` | " substr(text, length(parts[1]) + 4) " |"
      done = 1
    }' include/accelerate/*.h cmake/version.h.in | LC_ALL=C sort
}
text=$(sed '/^<!-- tools\/headers.sh/,$d' "$page"; echo "$marker"; table)
if [ "${1:-}" = --show ]; then printf '%s\n' "$text"; else printf '%s\n' "$text" >"$page"; fi
