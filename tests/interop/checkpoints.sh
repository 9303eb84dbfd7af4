#!/usr/bin/env bash
# Runs of 60 steps that go through save_state and load_state of Python and of ours in turn, on 1 and 2
# processes, compared with runs that are not interrupted: checkpoints.json has the cases, checkpoints.py
# says what is compared.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
ours=$1
accelerate=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME=$work/home  # no settings of the user's own
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=1

# The loader whose state is saved; kept apart, so that other comparisons do not see it.
extra=$(dirname "$ACCELERATE_PYTHON")/../extra-torchdata==0.11.0
[ -e "$extra/complete" ] || {
  "$ACCELERATE_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$extra" torchdata==0.11.0
  touch "$extra/complete"
}

run_ours() {  # ranks chain from begin end
  local start=()
  [ "$1" = 1 ] ||
    start=("$accelerate" launch --cpu --num_processes "$1" --main_process_port 0 --num_cpu_threads_per_process 1)
  "${start[@]}" "$ours" run "$here/checkpoints.json" "$work" "${@:2}"
}
run_python() {
  PYTHONPATH=$extra "$ACCELERATE_PYTHON" "$here/checkpoints.py" run "$1" "$here/checkpoints.json" "$work" "${@:2}" \
    2>"$work/log" || {
    cat "$work/log"
    exit 1
  }
}

for ranks in 1 2; do
  run_python $ranks P none 0 60
  run_ours $ranks C none 0 60
  run_ours $ranks PC P 20 40
  run_python $ranks CP C 20 40
  run_python $ranks PCP PC 40 60
  run_ours $ranks CPC CP 40 60
done
"$ACCELERATE_PYTHON" "$here/checkpoints.py" compare "$here/checkpoints.json" "$work"
