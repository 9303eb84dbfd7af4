#!/usr/bin/env bash
# GPT-2 and Llama of examples/ say what transformers says, on folders that transformers saves: resident, and with
# weights in host memory and on disk.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
transformers=$(echo "$(dirname "$ACCELERATE_PYTHON")"/../transformers-*)
export ACCELERATE_USE_CPU=1 OMP_NUM_THREADS=1
PYTHONPATH=$transformers "$ACCELERATE_PYTHON" "$(dirname "$0")/decoders.py" "$1"
