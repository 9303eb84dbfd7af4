#!/usr/bin/env bash
# Folders of torch.distributed.checkpoint go both ways: Python loads what 1 to 4 of our processes have
# saved, and 1 to 3 of ours load what 1, 2 and 4 of Python's have; all dtypes, odd sizes, optimizers.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
OMP_NUM_THREADS=1 "$ACCELERATE_PYTHON" "$(dirname "$0")/dcp.py" "$1" "$2" "$work"
