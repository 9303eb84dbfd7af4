#!/usr/bin/env bash
# bench_test.sh <source>: tables, JSON files, plots and comparisons of figures that are made up.
set -euo pipefail
bench=$1/bench
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

fail() {
  echo "bench_test: $1" >&2
  exit 1
}
expect() {  # file, line that it has
  grep -qxF -- "$2" "$1" || { cat "$1" >&2; fail "no line '$2'"; }
}

# Medians of three rounds; of a rate larger is better.
ours() { printf 'step\t%s\tus\nstep\t%s\tus\nstep\t%s\tus\nload\t400\tMB/s\nstep, raw Gloo\t200\tus\nalone\t5\tus\n' "$@"; }
ours 100 90 110 >ours
printf 'step\t1000\tus\nstep, best\t500\tus\nload\t100\tMB/s\n' >python
BENCH_JSON=$folder/a.json python3 "$bench/compare.py" "steps" ours python >table
expect table 'case                                                  ours unit      +-      Python   ratio        best   ratio    raw Gloo   ratio'
expect table 'step                                                 100.0 us       10%      1000.0   0.100       500.0   0.200       200.0   0.500'
expect table 'load                                                 400.0 MB/s      0%       100.0   4.000'
expect table 'alone                                                 5.00 us        0%'

# One picture, with the cases that Python has.
python3 "$bench/plots.py" a.json plots >/dev/null
python3 -c 'import sys, xml.dom.minidom as x; t = [n.firstChild.data for n in x.parse("plots/steps.svg").getElementsByTagName("text")]
sys.exit(not ({"step", "load", "10", "4"} <= set(t) and "alone" not in t))' || fail "the plot has other bars"

# Within the spread nothing became slower, beyond it is said and is a failure.
ours 105 95 115 >ours
BENCH_JSON=$folder/b.json python3 "$bench/compare.py" "steps" ours python >table
make --no-print-directory -C "$1" bench-compare "$folder/a.json" "$folder/b.json" >said
expect said '0 of 3 cases became slower'
ours 200 190 210 >ours
BENCH_JSON=$folder/b.json python3 "$bench/compare.py" "steps" ours python >table
if python3 "$bench/difference.py" a.json b.json >said; then fail "slower is no failure"; fi
expect said 'SLOWER  2.00 times  steps: step (100 to 200 us, spread 15%)'
expect said '1 of 3 cases became slower'
if python3 "$bench/difference.py" b.json a.json >said; then :; else fail "faster is a failure"; fi
expect said 'faster  2.00 times  steps: step (200 to 100 us, spread 15%)'
