#!/usr/bin/env bash
# Runs our benchmarks and Python Accelerate's in turn, in one go, and prints both with their ratio.
#
#   bench/run.sh        processes on the CPU
#   bench/run.sh gpu    one process on a GPU
#
#   ACCELERATE_PYTHON  python of the comparison      BENCH_FOLDER  folder of our programs
#   BENCH_THREADS      threads of each process, 1    BENCH_JSON    file for the figures; plots go beside it
#   BENCH              which parts, by default all; those of the CPU and of a GPU stand in the lists below
#   BENCH_GPU_PARTS    parts of bench_gpu_training: gpu_training.cpp lists them
#   BENCH_GPU_ROUNDS   rounds of each of its medians, 5
set -euo pipefail
: "${ACCELERATE_PYTHON:?}" "${BENCH_FOLDER:?}"
folder=$(cd "$BENCH_FOLDER" && pwd)
parts="startup collectives ddp training activations sharding model_parallel hosts data files models offload planner states guard quantization monitor launches"
if [ "${1:-cpu}" = gpu ]; then parts="startup training files offload states sharding data quantization"; fi
wanted=" ${BENCH:-$parts} "
for part in $wanted; do
  [[ " $parts " == *" $part "* ]] ||
    { echo "bench: BENCH has '$part', which is no part of the ${1:-cpu} benchmarks. Choose from: $parts" >&2; exit 2; }
done
if [ -n "${BENCH_JSON:-}" ]; then
  BENCH_JSON=$(realpath "$BENCH_JSON")
  rm -f "$BENCH_JSON"
  export BENCH_JSON
fi
cd "$(dirname "$0")"
results=$(mktemp -d)
finish() {
  rm -rf "$results"
  if [ -s "${BENCH_JSON:-}" ]; then "$ACCELERATE_PYTHON" plots.py "$BENCH_JSON" "${BENCH_JSON%.json}-plots"; fi
}
trap finish EXIT
export TMPDIR=$results  # torchrun leaves its folders behind

launch() {  # processes, result file, then the program
  local processes=$1 out=$2
  shift 2
  OMP_NUM_THREADS=${BENCH_THREADS:-1} "$ACCELERATE_PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$processes" "$@" >>"$out" 2>"$results/log" ||
    { cat "$results/log" >&2; exit 1; }
}

# Part, number of processes, program if its name is another one: ours and Python's in turns, so that a slow minute of
# the machine hits both.
compare() {
  local case=$1 processes=$2 program=${3:-$1}
  [[ $wanted == *" $case "* ]] || return 0
  local ours=$results/$case-$processes python=$results/$case-$processes-python
  for _ in 1 2 3; do
    launch "$processes" "$python" "$program.py"
    launch "$processes" "$ours" --no-python "$folder/bench_$program"
  done
  "$ACCELERATE_PYTHON" compare.py "$case, $processes processes on one host" "$ours" "$python"
}

if [ "${1:-cpu}" = gpu ]; then
  BENCH_GPU=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
  export BENCH_GPU
  compare startup 1
  compare training 1 gpu_training
  compare files 1
  compare offload 1  # rates
  compare states 1
  if [[ $wanted == *" data "* ]]; then
    for _ in 1 2 3; do launch 1 "$results/gpu_data" --no-python "$folder/bench_gpu_data"; done
    "$ACCELERATE_PYTHON" compare.py "data, steps of a GPT with fixed inputs and with a loader" "$results/gpu_data"
    launch 1 "$results/log" --no-python "$folder/bench_gpu_data" "$results/trace.json"
    "$ACCELERATE_PYTHON" gpu_overlap.py "$results/trace.json"
  fi
  if [[ $wanted == *" sharding "* ]]; then
    # With all cores, for the optimizer on the host.
    for _ in 1 2 3; do "$folder/bench_gpu_sharding" >>"$results/gpu_sharding"; done
    "$ACCELERATE_PYTHON" compare.py "sharding, one process on a GPU" "$results/gpu_sharding"
  fi
  if [[ $wanted == *" quantization "* ]]; then
    for _ in 1 2 3; do "$folder/bench_quantization" gpu >>"$results/quantization"; done
    "$ACCELERATE_PYTHON" compare.py "layers in 4 and 8 bits" "$results/quantization"
  fi
  exit
fi

export ACCELERATE_USE_CPU=1 CUDA_VISIBLE_DEVICES=
compare startup 2
compare training 1
compare training 2
compare activations 1
compare sharding 2
if [[ $wanted == *" sharding "* ]]; then
  for processes in 1 2 4; do  # 100 million parameters: up to 8 GB in all
    launch $processes "$results/sharding-memory-$processes" --no-python "$folder/bench_sharding" memory
    "$ACCELERATE_PYTHON" compare.py "sharding, memory of each of $processes processes" "$results/sharding-memory-$processes"
  done
fi
if [[ $wanted == *" model_parallel "* ]]; then
  for _ in 1 2 3; do
    launch 2 "$results/model-parallel-python" model_parallel.py
    for mode in tp cp sp pp memory_tp memory_pp memory_cp memory_sp; do
      launch 2 "$results/model-parallel" --no-python "$folder/bench_model_parallel" $mode
    done
  done
  "$ACCELERATE_PYTHON" compare.py "models cut over 2 processes" "$results/model-parallel" "$results/model-parallel-python"
fi
for processes in 2 4; do
  compare collectives $processes
  compare ddp $processes
done

if [[ $wanted == *" hosts "* ]]; then
  if [ "$(id -u)" = 0 ] && command -v ip >"$results/log"; then
    for _ in 1 2 3; do BENCH_FOLDER=$folder ./hosts.sh >>"$results/hosts"; done
    "$ACCELERATE_PYTHON" compare.py "hosts, 2 network namespaces with 2 processes each" "$results/hosts"
  else
    echo "hosts: left out, network namespaces need root and iproute2"
  fi
fi

compare data 1 data_loader  # rates: the ratio says how many times as fast as Python

compare files 1  # rates too, but for the times of opening
compare models 1  # rates
compare offload 1  # rates, but for the times of building and of an operator
compare planner 1
compare states 1  # rates, but for the stall

if [[ $wanted == *" guard "* ]]; then
  # How long Gloo's messages take varies by much more than the guard adds. One process sends none, and all else is as ever.
  for _ in 1 2 3; do
    ACCELERATE_HOST_BACKEND=shm launch 2 "$results/guard" --no-python "$folder/bench_guard"
    ACCELERATE_HOST_BACKEND=gloo launch 1 "$results/guard" --no-python "$folder/bench_guard"
  done
  "$ACCELERATE_PYTHON" compare.py "guard, 2 processes with shared memory, 1 with Gloo" "$results/guard"
fi

if [[ $wanted == *" quantization "* ]]; then
  for _ in 1 2 3; do "$folder/bench_quantization" >>"$results/quantization"; done
  "$ACCELERATE_PYTHON" compare.py "layers of 4096 x 4096 in 4 and 8 bits" "$results/quantization"
fi

if [[ $wanted == *" monitor "* ]]; then
  for _ in 1 2 3; do "$folder/bench_monitor" >>"$results/monitor"; done
  "$ACCELERATE_PYTHON" compare.py "what recording for accelerate monitor takes" "$results/monitor"
fi

if [[ $wanted == *" launches "* ]]; then
  "$ACCELERATE_PYTHON" launches.py "$folder" "$results/launches" "$results/launches-python"
  "$ACCELERATE_PYTHON" compare.py "launches, 2 processes on one host" "$results/launches" "$results/launches-python"
fi
