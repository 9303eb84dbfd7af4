#!/bin/sh
# check.sh CASES BUILD LIKE: compiles CASES, which must fail, with the flags that the build folder
# has for the file LIKE, and compares the first error of each function there with the comment
# "// expect: ..." in front of it. For GCC, which names the place of a mistake before the error.
cases=$1
command=$(sed -n "s|^ *\"command\": \"\(.*\) -o .* -c [^ ]*$3\",|\1|p" "$2/compile_commands.json")
if [ -z "$command" ]; then
  echo "check.sh: $2/compile_commands.json has no command for $3"
  exit 1
fi
errors=$(cd "$2" && LC_ALL=C $command -fsyntax-only -fmax-errors=0 "$cases" 2>&1)

printf '%s\n' "$errors" | awk -v file="${cases##*/}" '
  FNR == NR {  # the cases: which lines belong to which function, and what it expects
    if ($0 ~ /^\/\/ expect: /) { name = ""; expected = substr($0, 12) }
    if ($0 ~ /^void /) { name = $2; sub(/\(.*/, "", name); order[++count] = name; wanted[name] = expected }
    if (name != "") owner[FNR] = name
    next
  }
  match($0, file ":[0-9]+") { place = substr($0, RSTART + length(file) + 1, RLENGTH - length(file) - 1) + 0 }
  / error: / && place in owner && !(owner[place] in first) { first[owner[place]] = $0; sub(/.* error: /, "", first[owner[place]]) }
  END {
    for (i = 1; i <= count; ++i) {
      name = order[i]
      if (index(first[name], wanted[name]) > 0) continue
      printf "%s: %s\n  expected: %s\n  came:     %s\n", file, name, wanted[name], first[name] == "" ? "no error" : first[name]
      ++wrong
    }
    printf "%d of %d mistakes are explained\n", count - wrong, count
    exit wrong > 0 || count == 0
  }' "$cases" -
