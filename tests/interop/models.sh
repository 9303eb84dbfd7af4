#!/usr/bin/env bash
# Model folders go both ways: Python loads what save_model writes here, and what Accelerate, transformers and
# torch.distributed.checkpoint write is loaded here, sharded and with tied weights.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
transformers=$(echo "$(dirname "$ACCELERATE_PYTHON")"/../transformers-*)
export ACCELERATE_USE_CPU=1 OMP_NUM_THREADS=1
PYTHONPATH=$transformers "$ACCELERATE_PYTHON" "$(dirname "$0")/model_folders.py" "$1" "$2"
