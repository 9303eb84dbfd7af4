#!/usr/bin/env bash
# tools/fuzz.sh <build folder>: builds every fuzz target and runs each for FUZZ_SECONDS, or
# FUZZ_RUNS times if that is set.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
tools/build.sh fuzz "$folder" accelerate_fuzz
for target in "$folder"/fuzz/*_fuzz; do
  name=$(basename "$target")
  corpus=$folder/corpus/$name
  mkdir -p "$corpus"
  if [[ -n ${FUZZ_RUNS:-} ]]; then
    limit=-runs=$FUZZ_RUNS
    echo "fuzz: $name $FUZZ_RUNS times"
  else
    limit=-max_total_time=${FUZZ_SECONDS:-60}
    echo "fuzz: $name for ${FUZZ_SECONDS:-60} s"
  fi
  start=$SECONDS
  "$target" "$limit" -rss_limit_mb=2048 -timeout=10 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="$folder/$name-" "$corpus" "tests/fuzz/corpus/${name%_fuzz}" 2>&1 | grep -E '^(stat::number_of_executed|==|SUMMARY)' || {
    echo "fuzz: $name found something; the input is in $folder/$name-*" >&2
    exit 1
  }
  echo "fuzz: $name took $((SECONDS - start)) s"
done
