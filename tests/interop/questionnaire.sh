#!/usr/bin/env bash
# `accelerate config` of both sides gets the same answers; the files must be equal to the byte, and
# each side reads the other's.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
"$ACCELERATE_PYTHON" "$(dirname "$0")/questionnaire.py" "$1" "$2"
