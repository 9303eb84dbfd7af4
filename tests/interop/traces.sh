#!/usr/bin/env bash
# Training runs of our Accelerator and of Python's on the same data and weights, with 1 and 2
# processes: losses, gradient norms, learning rates and steps must be the same. traces.py says how near.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
trace=$1
accelerate=$2
reference=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME=$work/home  # no settings of the user's own
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=1

started=$SECONDS
"$trace" data "$reference/cases.json" "$work/data.pt"
"$trace" run "$reference/cases.json" "$work/ours.1.json"
"$accelerate" launch --cpu --num_processes 2 --main_process_port 0 --num_cpu_threads_per_process 1 \
  "$trace" run "$reference/cases.json" "$work/ours.2.json"
echo "ours took $((SECONDS - started)) s"
started=$SECONDS
"$ACCELERATE_PYTHON" "$reference/write_traces.py" "$work/data.pt" "$work/python.json" 2>"$work/log" || {
  cat "$work/log"
  exit 1
}
echo "Python took $((SECONDS - started)) s"
"$ACCELERATE_PYTHON" "$(dirname "$0")/traces.py" "$reference" "$work"
