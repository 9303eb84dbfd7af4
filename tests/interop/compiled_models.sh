#!/usr/bin/env bash
# A model that Python has compiled ahead of time (AOTInductor) runs here with Python's results, also with other weights.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TORCHINDUCTOR_CACHE_DIR="$work/cache"
OMP_NUM_THREADS=1 "$ACCELERATE_PYTHON" "$(dirname "$0")/compiled_models.py" "$1" "$work"
