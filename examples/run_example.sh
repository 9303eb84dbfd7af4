#!/bin/sh
# run_example.sh SOURCE COMMAND...: runs the command and compares the last line that it prints with
# the one in the banner of SOURCE. There a percentage stands for any from 90 up, and N for any
# number; all else must be the same.
source=$1
shift

promised=$(sed -n 's,^// Last line: "\(.*\)".*,\1,p' "$source")
if [ -z "$promised" ]; then
  echo "run_example.sh: $source has no line of the form // Last line: \"...\""
  exit 1
fi
pattern=$(printf '%s\n' "$promised" | sed -E \
  -e 's/[][().*+?^$|\\]/\\&/g' \
  -e 's/[0-9]+(\\\.[0-9]+)? %/(100|9[0-9](\\.[0-9]+)?) %/g' \
  -e 's/\bN\b/[0-9]+/g')

output=$("$@")
code=$?
printf '%s\n' "$output"
if [ $code -ne 0 ]; then
  echo "run_example.sh: exit code $code"
  exit 1
fi
if ! printf '%s\n' "$output" | tail -n 1 | grep -Eqx "$pattern"; then
  echo "run_example.sh: the last line is not as promised: $promised"
  exit 1
fi
