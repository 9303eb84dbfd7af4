#!/usr/bin/env bash
# Runs our benchmarks and Python Accelerate's in turn, in one go, and prints both with their ratio.
#
#   bench/run.sh        two processes on the CPU
#   bench/run.sh gpu    one process on a GPU
#
#   ACCELERATE_PYTHON  python of the comparison      BENCH  folder of our programs
set -euo pipefail
: "${ACCELERATE_PYTHON:?}" "${BENCH:?}"
BENCH=$(cd "$BENCH" && pwd)
cd "$(dirname "$0")"
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
export TMPDIR=$results  # torchrun leaves its folders behind

if [ "${1:-cpu}" = gpu ]; then
  processes=1 cases="startup" where="1 process, $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
else
  processes=2 cases="startup collectives" where="2 processes on one host"
  export ACCELERATE_USE_CPU=1 CUDA_VISIBLE_DEVICES=
fi
launch() {  # result file, then the program
  local out=$1
  shift
  OMP_NUM_THREADS=1 "$ACCELERATE_PYTHON" -m torch.distributed.run --standalone --nproc_per_node $processes "$@" >>"$out" 2>"$results/log" ||
    { cat "$results/log" >&2; exit 1; }
}

# In turns, so that a slow minute of the machine hits both.
for _ in 1 2 3; do
  for case in $cases; do
    launch "$results/python" "$case.py"
    launch "$results/ours" --no-python "$BENCH/bench_$case"
  done
done

if [ $processes -eq 2 ]; then
  "$ACCELERATE_PYTHON" launches.py "$BENCH" "$results/ours" "$results/python"
fi

echo "$(date -u +%F), $(nproc) cores, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $where, medians of 3 rounds"
"$ACCELERATE_PYTHON" compare.py "$results/ours" "$results/python"
