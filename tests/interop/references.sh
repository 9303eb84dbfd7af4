#!/usr/bin/env bash
# What is stored under tests/reference is what Python says today: every script there is run again,
# in a copy, and must reproduce its files.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
stored=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$stored" "$work/reference"

count=0
for script in "$work"/reference/*/*.py; do
  name=${script#"$work/reference/"}
  echo "running $name"
  (cd "$(dirname "$script")" && OMP_NUM_THREADS=1 "$ACCELERATE_PYTHON" "$(basename "$script")" >"$work/log" 2>&1) || {
    cat "$work/log"
    echo "$name failed"
    exit 1
  }
  count=$((count + 1))
done
find "$work/reference" -name __pycache__ -prune -exec rm -rf {} +
diff -r "$stored" "$work/reference" || { echo "the stored references differ from what Python writes now"; exit 1; }
[ "$count" -gt 0 ] || { echo "no reference script was found"; exit 1; }
echo "$count scripts, all references reproduced"
