#!/usr/bin/env bash
# Config files go both ways: what Python writes we read and write again byte for byte, and Python
# reads ours to the same record.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
"$ACCELERATE_PYTHON" "$(dirname "$0")/config.py" "$1"
