#!/usr/bin/env bash
# `accelerate launch --dry_run` beside Python's launcher: for the same command line, file and
# environment both give workers the same variables, but for the differences that launch_plan.py names.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
"$ACCELERATE_PYTHON" "$(dirname "$0")/launch_plan.py" "$1"
