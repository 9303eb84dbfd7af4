#!/usr/bin/env bash
# tools/build.sh <preset> <build folder> [targets...]: configures when needed, builds, says how long.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1 folder=$2
shift 2

# Compilers that only some presets need.
case $preset in
  clang) tools/setup.sh --packages clang-16 ;;
  fuzz) tools/setup.sh --packages clang-16 libclang-rt-16-dev ;;
esac
torch=$(tools/setup.sh --where)
configured=$(sed -n 's/^ACCELERATE_TORCH_DIR:[A-Z]*=//p' "$folder/CMakeCache.txt" 2>/dev/null || true)
if [ ! -e "$folder/build.ninja" ] || [ "$configured" != "$torch" ]; then
  cmake --preset "$preset" -B "$folder" -DACCELERATE_TORCH_DIR="$torch" >"/tmp/accelerate-configure.$$" 2>&1 || {
    cat "/tmp/accelerate-configure.$$" >&2
    exit 1
  }
  grep -E '^-- (LibTorch|libaccelerate)' "/tmp/accelerate-configure.$$" | sed 's/^-- /build: /' || true
  rm -f "/tmp/accelerate-configure.$$"
fi

# A translation unit with LibTorch takes up to 1.5 GB: more jobs than memory carries only thrash.
jobs=${JOBS:-}
if [ -z "$jobs" ]; then
  cores=$(nproc)
  gigabytes=$(awk '/MemAvailable/{print int($2 / 1024 / 1024)}' /proc/meminfo)
  jobs=$((gigabytes / 2 < cores ? gigabytes / 2 : cores))
  [ "$jobs" -ge 1 ] || jobs=1
fi

start=$(date +%s)
ninja -C "$folder" -j "$jobs" ${1+"$@"} | { grep --line-buffered -vE '^ninja: (Entering|no work)' || true; }
printf 'build: %s is up to date after %d s\n' "$folder" $(($(date +%s) - start))
