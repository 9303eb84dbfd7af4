#!/usr/bin/env bash
# A native program under Python's launchers: torchrun and `accelerate launch` start it, it finds its
# world in their variables, and it prints its state as Python prints its own.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
program=$1
bin=$(dirname "$ACCELERATE_PYTHON")
export ACCELERATE_USE_CPU=1 OMP_NUM_THREADS=1

expect() {  # text, output
  grep -qF "$1" <<<"$2" || { printf 'expected "%s" in:\n%s\n' "$1" "$2"; exit 1; }
}

output=$("$bin/torchrun" --standalone --nproc_per_node 3 --no-python "$program" 2>&1)
expect "3 processes" "$output"
expect "result: 3 processes agree on" "$output"
echo "torchrun started 3 native processes"

# --multi_gpu is the mode in which Python's launcher starts several processes; the variable above keeps
# them on the CPU.
output=$("$bin/accelerate" launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no \
  --dynamo_backend no --no_python "$program" 2>&1)
expect "result: 2 processes agree on" "$output"
echo "accelerate launch started 2 native processes"
