#!/usr/bin/env bash
# orderly_exit.sh <program>: programs that return from main with their group alive end with 0, at once, one after the other,
# and the file at which they met is gone, so that the next run may use its name again.
set -euo pipefail
program=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

for run in first second; do
  pids=()
  for rank in 0 1 2; do
    env ACCELERATE_USE_CPU=1 OMP_NUM_THREADS=1 WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 RANK=$rank LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 \
      ACCELERATE_DEBUG_RDV_FILE="$folder/meeting" timeout 60 "$program" >"$folder/out.$rank" 2>&1 &
    pids+=($!)
  done
  for rank in 0 1 2; do
    wait "${pids[$rank]}" || { echo "rank $rank of the $run run ended with $?"; cat "$folder/out.$rank"; exit 1; }
  done
  grep -q "result: 3 processes agree" "$folder/out.0" || { cat "$folder/out.0"; exit 1; }
  [ ! -e "$folder/meeting" ] || { echo "the $run run left its meeting file behind"; exit 1; }
done
echo "two runs ended in order"
