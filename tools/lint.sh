#!/usr/bin/env bash
# tools/lint.sh [check...]: formatting, layers, lengths, type names, Markdown, the code in guides, the pages of options,
# parity and errors, and clang-tidy on changed files. Without arguments all of them (but see pending_checks). `tools/lint.sh --format` formats instead of complaining.
# shellcheck disable=SC2317  # checks are called by their names
set -euo pipefail
cd "$(dirname "$0")/.."

all_checks="format layers lengths headers banners types markdown guides options parity errors pictures tidy"
# Run only if they are named, until the tree passes them.
pending_checks=""
clang_format=clang-format-19  # the newest of Debian 12; other versions format differently

sources() { git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' | while read -r f; do [ -e "$f" ] && echo "$f"; done; }

find_formatter() {
  command -v "$clang_format" && return 0
  case $(clang-format --version 2>/dev/null) in *" version ${clang_format##*-}."*) command -v clang-format ;; *) return 1 ;; esac
}
need_formatter() {
  find_formatter >/dev/null || tools/setup.sh --packages "$clang_format"
  formatter=$(find_formatter) || { echo "lint: $clang_format is missing; install it" >&2; exit 1; }
}

if [ "${1:-}" = --format ]; then
  need_formatter
  sources | xargs "$formatter" -i
  exit 0
fi

status=0
complain() { printf 'lint: %s\n' "$*" >&2; status=1; }
complain_about_each_line() { while IFS= read -r hit; do complain "$hit"; done; }

check_format() {
  local unformatted
  need_formatter
  unformatted=$(sources | xargs "$formatter" --dry-run 2>&1 | sed -n 's/^\([^:]*\):[0-9]*:.*clang-format-violations.*/\1/p' | sort -u)
  [ -z "$unformatted" ] || complain "not formatted (make format mends it): $(tr '\n' ' ' <<<"$unformatted")"
}

# Each area, with its public headers, includes itself and what layers.txt allows.
check_layers() {
  complain_about_each_line < <(sources | grep -E '^(src|include|cuda|cli)/' | xargs awk -f tools/check_layers.awk tools/layers.txt)
}

check_lengths() {
  while read -r lines file; do
    [ "$file" = total ] || [ "$lines" -le 700 ] || complain "$file has $lines lines; 700 is the limit"
  done < <(sources | xargs wc -l)
}

# Counts the exports in the files of its input.
exports() { { xargs -r grep -how ACCELERATE_API || true; } | wc -l; }

# The top of include/accelerate has entry points only, and a public header is read in five minutes.
check_headers() {
  local lines file limit count
  while read -r lines file; do
    limit=250
    [ "$file" != include/accelerate/accelerator.h ] || limit=350
    [ "$file" = total ] || [ "$lines" -le "$limit" ] || complain "$file has $lines lines; $limit is the limit of a public header"
  done < <(sources | grep '^include/' | xargs wc -l)
  count=$(sources | grep -cE '^include/accelerate/[^/]*$' || true)
  [ "$count" -le 47 ] || complain "include/accelerate has $count headers at its top; 47 is the limit: parts belong into folders, internals into detail/"
  # What is marked, programs link against: a struct without functions of its own needs no mark (see optim/options.h).
  count=$(sources | grep '^include/' | exports)
  [ "$count" -le 438 ] || complain "include/ has $count times ACCELERATE_API; 438 is the limit: export functions, not aggregates and internals"
  count=$(sources | grep '^include/accelerate/detail/' | exports)
  [ "$count" -le 60 ] || complain "include/accelerate/detail has $count times ACCELERATE_API; 60 is the limit: only what templates call is exported"
}

# The first line of a header is its path, as it is included, and what it is for.
check_banners() {
  local file
  while read -r file; do
    head -n 1 "$file" | grep -qF "// ${file#include/} - " || complain "$file: the first line must be '// ${file#include/} - ' and what it is for"
  done < <(sources | grep -E '^(src|include|cuda|cli)/.*\.h$')
}

check_types() {
  complain_about_each_line < <(sources | grep -E '^(src|include)/' | xargs awk -f tools/check_types.awk)
}

# Prose has at most 120 columns; tables, code and words that cannot be wrapped (links) may be longer.
check_markdown() {
  # shellcheck disable=SC2016  # awk's own
  complain_about_each_line < <(git ls-files --cached --others --exclude-standard -- '*.md' | LC_ALL=C xargs awk '
    FNR == 1 { code = 0 }
    /^ *```/ { code = !code; next }
    code || /^ *\|/ { next }
    {
      text = $0
      gsub(/[\200-\277]/, "", text)  # the further bytes of a character
      sub(/^ *([-*] |[0-9]+\. )? */, "", $0)
      if (length(text) > 120 && $0 ~ / /) print FILENAME ":" FNR ": " length(text) " columns; 120 is the limit"
    }')
}

# The code in a guide is that of programs which are compiled and run. (The README's is taken from it by CMake.)
check_guides() {
  local guide programs listed=" "
  while read -r guide programs; do
    listed+="$guide "
    complain_about_each_line < <(
      # shellcheck disable=SC2086  # several files, or a pattern of them
      awk -v guide="$guide" -v programs="$programs" '
        FILENAME != guide { sub(/^ +/, ""); program = program $0 "\n"; next }
        /^```cpp$/ { inside = 1; first = FNR; block = ""; next }
        /^```$/ && inside { inside = 0; if (!index(program, block)) print FILENAME ":" first ": not in " programs }
        inside { sub(/^ +/, ""); block = block $0 "\n" }' $programs "$guide")
  done <<'GUIDES'
docs/activation_checkpointing.md examples/by_feature/activation_checkpointing.cpp
docs/accumulation.md examples/by_feature/gradient_accumulation.cpp examples/by_feature/automatic_gradient_accumulation.cpp
docs/big_models.md tests/examples/snippets.cpp
docs/capture.md examples/by_feature/captured_step.cpp tests/examples/snippets.cpp
docs/checkpointing.md examples/by_feature/checkpointing.cpp
docs/data.md examples/data_loading.cpp
docs/faults.md tests/examples/snippets.cpp
docs/formats.md examples/saved_models.cpp
docs/inference.md examples/inference.cpp
docs/launching.md tests/examples/snippets.cpp
docs/migrating.md examples/migrated.cpp
docs/modules.md tests/nn/attention_test.cpp
docs/options.md tests/examples/snippets.cpp
docs/parallelism.md examples/by_feature/context_parallel.cpp examples/by_feature/pipeline.cpp examples/by_feature/tensor_parallel.cpp
docs/precision.md examples/by_feature/mixed_precision.cpp
docs/profiling.md examples/by_feature/profiler.cpp
docs/fp8.md examples/by_feature/fp8.cpp
docs/quantization.md examples/by_feature/lora.cpp
docs/quickstart.md examples/basic.cpp
docs/trackers.md examples/by_feature/tracking.cpp
docs/training.md examples/basic.cpp examples/complete.cpp examples/migrated.cpp examples/by_feature/*.cpp
GUIDES
  for guide in $(grep -l '^```cpp$' docs/*.md); do
    [[ $listed == *" $guide "* ]] || complain "$guide has code, and no row in tools/lint.sh says which program it is of"
  done
}

# The tables of docs/options.md and docs/headers.md are those of the headers.
check_options() {
  local name
  for name in options headers; do
    "tools/$name.sh" --show | cmp -s - "docs/$name.md" || complain "docs/$name.md is not what the headers say: tools/$name.sh mends it"
  done
}

# docs/parity.md is what docs/parity.txt says, and names that are said to exist are in a header.
check_parity() { complain_about_each_line < <(PYTHONDONTWRITEBYTECODE=1 python3 tools/parity.py --check || true); }

# docs/troubleshooting.md explains each group of errors; every error of the sources is in one.
check_errors() {
  complain_about_each_line < <(PYTHONDONTWRITEBYTECODE=1 python3 tools/site/troubleshooting.py || true)
}

# The plot in the README shows the figures of docs/performance.md.
check_pictures() { complain_about_each_line < <(PYTHONDONTWRITEBYTECODE=1 python3 tools/site/pictures.py benchmark --check); }

check_tidy() { tools/tidy.sh --changed || status=1; }

checks=$*
if [ -z "$checks" ]; then
  for check in $all_checks; do [[ " $pending_checks " == *" $check "* ]] || checks+=" $check"; done
fi
for check in $checks; do
  case " $all_checks " in
    *" $check "*) "check_$check" ;;
    *) echo "lint: there is no check '$check'. Choose of: $all_checks" >&2; exit 2 ;;
  esac
done
[ $status -ne 0 ] || echo "lint: in order (${checks# })"
exit $status
