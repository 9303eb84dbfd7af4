#!/usr/bin/env bash
# Files of torch.save go both ways: Python opens ours with weights_only=True and its optimizers,
# schedulers, scaler and generators go on from them; what Python writes comes back from us the same;
# sharded checkpoints of FSDP merge into the same files.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
OMP_NUM_THREADS=1 "$ACCELERATE_PYTHON" "$(dirname "$0")/torch_archive.py" "$1" "$2" "$3" "$work"
