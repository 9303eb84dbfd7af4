#!/usr/bin/env bash
# Runs our benchmarks and Python Accelerate's in turn, in one go, and prints both with their ratio.
#
#   ACCELERATE_PYTHON  python of the comparison      BENCH  folder of our programs
set -euo pipefail
cd "$(dirname "$0")"
: "${ACCELERATE_PYTHON:?}" "${BENCH:?}"
BENCH=$(cd .. && cd "$BENCH" && pwd)
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

two_processes() { env ACCELERATE_USE_CPU=1 OMP_NUM_THREADS=1 "$(dirname "$ACCELERATE_PYTHON")/torchrun" --standalone --nproc_per_node 2 "$@"; }

# In turns, so that a slow minute of the machine hits both.
for round in 1 2 3; do
  two_processes collectives.py >>"$results/python" 2>"$results/log" || { cat "$results/log"; exit 1; }
  two_processes --no-python "$BENCH/bench_collectives" >>"$results/ours" 2>"$results/log" || { cat "$results/log"; exit 1; }
done

echo "$(nproc) cores, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(date -u +%F), 2 processes, Gloo on one host, medians of 3 rounds"
"$ACCELERATE_PYTHON" compare.py "$results/ours" "$results/python"
