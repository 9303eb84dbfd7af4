#!/usr/bin/env bash
# Models in 8 and 4 bits go both ways: bitsandbytes reads what we write and computes the same with it, and we read what
# it writes.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
bitsandbytes=$(echo "$(dirname "$ACCELERATE_PYTHON")"/../bitsandbytes-*)
export ACCELERATE_USE_CPU=1 OMP_NUM_THREADS=1
PYTHONPATH=$bitsandbytes "$ACCELERATE_PYTHON" "$(dirname "$0")/quantization.py" "$1"
