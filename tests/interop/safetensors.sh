#!/usr/bin/env bash
# safetensors files go both ways: the same tensors give the same bytes, Python opens ours, and what
# Python writes we read and write again byte for byte.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
"$ACCELERATE_PYTHON" "$(dirname "$0")/safetensors_files.py" "$1" "$2"
