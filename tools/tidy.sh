#!/usr/bin/env bash
# tools/tidy.sh [--changed | files...]: public headers compile alone; clang-tidy with the checks of .clang-tidy.
#
#   tools/tidy.sh               all public headers, all sources of src/, cuda/ and cli/ (with LibTorch: up to a minute each)
#   tools/tidy.sh src/core/*    these
#   tools/tidy.sh --changed     what differs from the branch it will be merged into, or is not committed yet; skipped
#                               if no clang-tidy is installed, or for more than 12 files, since lint must be quick.
#                               TIDY_BASE=<commit> compares with another one, TIDY_LIMIT=<files> sets the limit.
set -euo pipefail
cd "$(dirname "$0")/.."
clang_tidy=clang-tidy-19  # the newest of Debian 12

# detail/ belongs to the public headers; mpi.h needs MPI's own header, and its test compiles it.
checked() {
  grep -E '^(src|cuda|cli)/.*\.cpp$|^include/accelerate/.*\.h$' | grep -vE '^include/accelerate/(detail/|mpi\.h$)' |
    while read -r f; do [ ! -e "$f" ] || echo "$f"; done
}

changed_files() {
  local base=${TIDY_BASE:-} candidate
  for candidate in origin/HEAD origin/main main HEAD; do
    [ -z "$base" ] || break
    base=$(git merge-base HEAD "$candidate" 2>/dev/null) || base=""
  done
  { git diff --name-only "$base"; git ls-files --others --exclude-standard; } | sort -u | checked
}

case "${1:-}" in
  --changed)
    mapfile -t files < <(changed_files)
    [ ${#files[@]} -ne 0 ] || exit 0
    command -v "$clang_tidy" >/dev/null || {
      echo "lint: $clang_tidy is not installed: ${#files[@]} changed files are not checked by it (make tidy installs it)"
      exit 0
    }
    [ ${#files[@]} -le "${TIDY_LIMIT:-12}" ] || {
      echo "lint: ${#files[@]} changed files are too many for clang-tidy in make lint: run make tidy"
      exit 0
    }
    ;;
  "")
    tools/setup.sh --packages "$clang_tidy"
    mapfile -t files < <(git ls-files | checked)
    ;;
  *) mapfile -t files < <(printf '%s\n' "$@" | checked) ;;
esac
[ ${#files[@]} -ne 0 ] || { echo "tidy: no public header and no file of src/, cuda/ or cli/ among the given ones" >&2; exit 2; }

# How files are compiled, for a compiler that cannot read GCC's precompiled header. Configured only, nothing is built.
torch=$(tools/setup.sh --where 2>/dev/null) || { echo "lint: no LibTorch yet, so nothing is checked by $clang_tidy (make setup)"; exit 0; }
folder=build/tidy${TORCH:+-torch-$TORCH}
mkdir -p "$folder"
cmake --preset no-pch -B "$folder" -DACCELERATE_TORCH_DIR="$torch" >"$folder/configure.log" 2>&1 || { cat "$folder/configure.log" >&2; exit 1; }
cores=$(nproc)
mapfile -t headers < <(printf '%s\n' "${files[@]}" | sed -n 's|^include/accelerate/||p')
mapfile -t sources < <(printf '%s\n' "${files[@]}" | grep '\.cpp$')
if [ ${#headers[@]} -ne 0 ]; then
  objects=("${headers[@]/#/tests/CMakeFiles/accelerate_headers.dir/headers/}")
  objects=("${objects[@]/%/.cpp.o}")
  ninja -C "$folder" -j "${JOBS:-$cores}" -k 0 --quiet \
    "${objects[@]}" >"$folder/headers.log" 2>&1 || {
    cat "$folder/headers.log" >&2
    echo "tidy: a public header does not compile alone (above)" >&2
    exit 1
  }
fi
# What this machine does not build (cuda/ without CUDA headers) is not checked.
mapfile -t sources < <(for f in "${sources[@]}"; do grep -qF "\"$PWD/$f\"" "$folder/compile_commands.json" && echo "$f"; done)
if [ ${#sources[@]} -ne 0 ]; then
  printf '%s\n' "${sources[@]}" | xargs -n 1 -P "${JOBS:-$cores}" "$clang_tidy" -p "$folder" --quiet --warnings-as-errors='*' \
    2> >(grep -vE '^[0-9]+ warnings? (treated|generated)|^Suppressed|^Use -header-filter|^$' >&2) ||
    { echo "tidy: clang-tidy complains (above)" >&2; exit 1; }
fi
echo "tidy: ${#files[@]} files in order"
