#!/bin/sh
# run_example.sh SOURCE CASE COMMAND...: runs the command and compares the last line that it prints
# with the one that SOURCE promises for the case:
#
#     // Last line: "result: 99.3 % of 1000 test points right after 6..8 epochs"
#     // One process: "result: 99.1 % of 1000 test points right after 3..5 epochs"
#
# A case that SOURCE says nothing about ends as "Last line", or "Last line then" in a shorter run.
#
# Other CPUs round differently. So a percentage may be off by 1 point, a count of 1000 things or more
# by 1 % of them, and a number with a decimal point by 2 %. 6..8 is a number from 6 to 8, N any
# number. All else must be the same.
source=$1
case=$2
shift 2

promise_for() { sed -n "s/.*$1: \"\([^\"]*\)\".*/\1/p" "$source"; }
promised=$(promise_for "$case")
[ -n "$promised" ] || promised=$(promise_for "Last line${case#One process}")
if [ -z "$promised" ]; then
  echo "run_example.sh: $source has no line of the form // $case: \"...\""
  exit 1
fi

output=$("$@")
code=$?
printf '%s\n' "$output"
if [ $code -ne 0 ]; then
  echo "run_example.sh: exit code $code"
  exit 1
fi
printf '%s\n' "$output" | tail -n 1 | awk -v promised="$promised" '
  function is_number(word) { return word ~ /^[0-9]+(\.[0-9]+)?$/ }
  function near(i, range, allowed) {
    if (promise[i] == $i) return 1
    if (!is_number($i)) return 0
    if (promise[i] == "N") return 1
    if (split(promise[i], range, /\.\./) == 2) return $i >= range[1] + 0 && $i <= range[2] + 0
    if (!is_number(promise[i])) return 0
    allowed = 0
    if (promise[i + 1] == "%") allowed = 1
    else if (promise[i + 1] == "of" && promise[i + 2] >= 1000) allowed = promise[i + 2] / 100
    else if (promise[i] $i ~ /\./) allowed = promise[i] / 50 + 0.005  # what is printed is rounded
    return $i - promise[i] <= allowed + 1e-9 && promise[i] - $i <= allowed + 1e-9
  }
  {
    same = split(promised, promise, " ") == NF
    for (i = 1; i <= NF; ++i) same = same && near(i)
    if (!same) print "run_example.sh: the last line is not as promised: " promised
  }
  END { exit !same }'
