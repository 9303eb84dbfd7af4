#!/usr/bin/env bash
# What our trackers write is read by the packages that they are for: TensorBoard, MLflow (a folder and a real server),
# Weights & Biases, Trackio.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
packages=$(echo "$(dirname "$ACCELERATE_PYTHON")"/../trackers-*)
PYTHONPATH=$packages "$ACCELERATE_PYTHON" "$(dirname "$0")/trackers.py" "$1"
