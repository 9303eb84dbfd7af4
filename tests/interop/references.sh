#!/usr/bin/env bash
# What is stored under tests/reference is what Python says today: every script there is run again,
# in a copy, and must reproduce its files; references.py says how exactly. But for the traces: these
# need data of ours, and traces.sh makes and compares them.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
stored=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$stored" "$work/reference"

count=0
for script in "$work"/reference/*/*.py; do
  name=${script#"$work/reference/"}
  [ "$name" != traces/write_traces.py ] || continue
  echo "running $name"
  # A script that needs several processes says in its banner how torchrun starts it.
  processes=$(sed -n 's/.*torchrun --nproc_per_node \([0-9]*\).*/\1/p' "$script" | head -n 1)
  start=("$ACCELERATE_PYTHON")
  [ -z "$processes" ] || start+=(-m torch.distributed.run --standalone --nproc_per_node "$processes")
  # One that needs a package says which; it is kept apart, so that the other scripts do not see it.
  package=$(sed -n 's/^# needs: //p' "$script")
  extra=
  if [ -n "$package" ]; then
    # What tools/setup.sh has fetched already is in a folder of that name.
    extra=$(dirname "$ACCELERATE_PYTHON")/../${package/==/-}
    [ -e "$extra/complete" ] || extra=$(dirname "$ACCELERATE_PYTHON")/../extra-$package
    [ -e "$extra/complete" ] || {
      "$ACCELERATE_PYTHON" -m pip install --quiet --disable-pip-version-check --target "$extra" "$package"
      touch "$extra/complete"
    }
  fi
  (cd "$(dirname "$script")" && PYTHONPATH=$extra ACCELERATE_USE_CPU=1 OMP_NUM_THREADS=1 "${start[@]}" "$(basename "$script")" >"$work/log" 2>&1) || {
    cat "$work/log"
    echo "$name failed"
    exit 1
  }
  count=$((count + 1))
done
"$ACCELERATE_PYTHON" "$(dirname "$0")/references.py" "$stored" "$work/reference"
[ "$count" -gt 0 ] || { echo "no reference script was found"; exit 1; }
echo "$count scripts, all references reproduced"
