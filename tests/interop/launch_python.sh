#!/usr/bin/env bash
# Python programs with Python Accelerate under our launcher: they meet in the store that
# accelerate-torch holds, fail, are started anew and run as modules.
set -euo pipefail
: "${ACCELERATE_PYTHON:?run through make interop}"
accelerate=$1
here=$(cd "$(dirname "$0")" && pwd)
program=$here/launch_python.py
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# No settings of the user's own.
export PYTHON_EXEC=$ACCELERATE_PYTHON HF_HOME=$folder/home
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
launch=("$accelerate" launch --cpu --num_processes 2 --main_process_port 0 --num_cpu_threads_per_process 1)

status=0
output=""
run() {  # command
  status=0
  output=$(timeout 300 "$@" 2>&1) || status=$?
}
expect() {  # code, texts
  local code=$1 text
  shift
  [ "$status" -eq "$code" ] || { printf 'expected exit code %s, got %s:\n%s\n' "$code" "$status" "$output"; exit 1; }
  for text in "$@"; do
    grep -qF -- "$text" <<<"$output" || { printf 'expected "%s" in:\n%s\n' "$text" "$output"; exit 1; }
  done
}

run "${launch[@]}" --mixed_precision bf16 "$program"
expect 0 "rank 0 of 2 gathered [0, 1] in 2 processes, DistributedType.MULTI_CPU, precision bf16, restarts 0" \
  "[default1]:rank 1 of 2 gathered [0, 1] in 2 processes"
echo "two Python processes met"

run "${launch[@]}" "$program" --fail_on 1 --lonely
# Python with torch sometimes aborts while it ends after an exception: the launcher then passes on signal 6.
code=1
! grep -qF "exitcode  : -6 " <<<"$output" || code=134
expect "$code" "FAILED" "rank      : 1 (local_rank: 1)" "message   : ValueError: rank 1 does not like it"
grep -q "FileNotFoundError" <<<"$output" && { printf 'record found no place for its file:\n%s\n' "$output"; exit 1; }
echo "the failed one was named, by the file that torch's record wrote"

run "${launch[@]}" --max_restarts 2 "$program" --succeed_at 2
expect 0 "rank 0 of 2 gathered [0, 1] in 2 processes, DistributedType.MULTI_CPU, precision no, restarts 2" \
  "restart 2 of 2"
echo "two restarts were enough"

run env PYTHONPATH="$here" "${launch[@]}" -m launch_python
expect 0 "rank 0 of 2 gathered [0, 1]"
echo "a module ran"

run env ACCELERATE_USE_CPU=1 "$accelerate" launch --quiet --num_processes 1 "$program" --help
expect 0 "--succeed_at"
echo "one process became Python itself"

# The variables that Python's plugins read: FSDP on the CPU is not run, only seen.
cat >"$folder/plugin.py" <<'PYTHON'
import os
from accelerate.utils import FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin()
print("seen", os.environ["ACCELERATE_USE_FSDP"], plugin.fsdp_version, plugin.cpu_offload, plugin.state_dict_type)
PYTHON
run "${launch[@]}" --use_fsdp --fsdp_version 2 --fsdp_offload_params true "$folder/plugin.py"
if [ "$status" -ne 0 ]; then  # --cpu and --use_fsdp exclude each other; without an accelerator it runs on the CPU anyway
  run "$accelerate" launch --num_processes 2 --main_process_port 0 --use_fsdp --fsdp_version 2 --fsdp_offload_params true "$folder/plugin.py"
fi
expect 0 "seen true 2"
echo "Python's FSDP plugin read our variables"
