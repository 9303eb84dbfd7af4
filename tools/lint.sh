#!/usr/bin/env bash
# Formatting, layers, lengths of files and the code in guides. `tools/lint.sh --format` formats instead of complaining.
set -euo pipefail
cd "$(dirname "$0")/.."

find_formatter() { command -v clang-format-14 || command -v clang-format; }
find_formatter >/dev/null || tools/setup.sh --packages clang-format-14
formatter=$(find_formatter) || { echo "lint: clang-format-14 is missing; install it" >&2; exit 1; }
sources() { git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' | while read -r f; do [ -e "$f" ] && echo "$f"; done; }

if [ "${1:-}" = --format ]; then
  sources | xargs "$formatter" -i
  exit 0
fi

status=0
complain() { printf 'lint: %s\n' "$*" >&2; status=1; }

unformatted=$(sources | xargs "$formatter" --dry-run 2>&1 | sed -n 's/^\([^:]*\):[0-9]*:.*clang-format-violations.*/\1/p' | sort -u)
[ -z "$unformatted" ] || complain "not formatted (make format mends it): $(tr '\n' ' ' <<<"$unformatted")"

# Each area includes itself and what layers.txt allows; public headers include public headers only.
areas=$(sed -n 's/^\([a-z]*\):.*/\1/p' tools/layers.txt)
pattern=$(paste -sd '|' <<<"$areas")
for area in $areas; do
  folder=src/$area
  [ -d "$folder" ] || folder=$area
  [ -d "$folder" ] || continue
  allowed=$(sed -n "s/^$area://p" tools/layers.txt)
  while IFS=: read -r file line text; do
    used=$(sed -E "s,.*\"($pattern)/.*,\1," <<<"$text")
    case " $area $allowed " in
      *" $used "*) ;;
      *) complain "$file:$line: $area may not include $used (tools/layers.txt)" ;;
    esac
  done < <(grep -rnE "^#include \"($pattern)/" "$folder" --include='*.h' --include='*.cpp' || true)
done
for known in src/*/; do
  grep -q "^$(basename "$known"):" tools/layers.txt || complain "$known has no line in tools/layers.txt"
done
while IFS= read -r hit; do complain "$hit: core and launch have no Torch"; done < <(
  grep -rnE '^#include <(torch|ATen|c10)/' src/core src/launch || true)
while IFS= read -r hit; do complain "$hit: a public header may include public headers only"; done < <(
  grep -rnE "^#include \"" include | grep -v '"accelerate/' || true)
while IFS= read -r hit; do complain "$hit: <torch/torch.h> costs 20 s; only accelerate.h may"; done < <(
  grep -rn '#include <torch/torch.h>' include | grep -v '^include/accelerate/accelerate.h' || true)
while read -r lines file; do
  [ "$file" = total ] || [ "$lines" -le 700 ] || complain "$file has $lines lines; 700 is the limit"
done < <(sources | xargs wc -l)
# The code in a guide is that of programs which are compiled and run.
while read -r guide programs; do
  while IFS= read -r hit; do complain "$hit"; done < <(
    # shellcheck disable=SC2086  # several files, or a pattern of them
    awk -v guide="$guide" -v programs="$programs" '
      FILENAME != guide { sub(/^ +/, ""); program = program $0 "\n"; next }
      /^```cpp$/ { inside = 1; first = FNR; block = ""; next }
      /^```$/ && inside { inside = 0; if (!index(program, block)) print FILENAME ":" first ": not in " programs }
      inside { sub(/^ +/, ""); block = block $0 "\n" }' $programs "$guide")
done <<'GUIDES'
docs/data.md examples/data_loading.cpp
docs/migrating.md examples/migrated.cpp
docs/training.md examples/basic.cpp examples/complete.cpp examples/migrated.cpp examples/by_feature/*.cpp
GUIDES

[ $status -ne 0 ] || echo "lint: formatting and layers are in order"
exit $status
