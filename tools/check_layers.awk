# check_layers.awk <layers.txt> <sources...>: prints each include that goes against the layers, as file:line: reason.
#
# The area of a file: src/<area>/, cuda/, cli/ and include/accelerate/detail/<area>/ say it themselves; the other public
# headers and their folders stand in the `headers` lines of layers.txt.

function area_of(path,    rest, folder) {
  if (path ~ /^src\//) { sub(/^src\//, "", path); sub(/\/.*/, "", path); return path }
  if (path !~ /^include\/accelerate\//) { sub(/\/.*/, "", path); return path }
  rest = substr(path, length("include/accelerate/") + 1)
  if (rest ~ /^detail\//) { sub(/^detail\//, "", rest); sub(/\/.*/, "", rest); return rest }
  folder = rest
  sub(/\.h$/, "", rest)
  if (rest in header_area || rest !~ /\//) return header_area[rest]
  sub(/\/.*/, "/", folder)
  return header_area[folder]
}

function complain(text) { print FILENAME ":" FNR ": " text }

FILENAME == ARGV[1] {
  sub(/#.*/, "")
  if ($0 ~ /^headers /) {
    sub(/:$/, "", $2)
    for (i = 3; i <= NF; i++) header_area[$i] = $2
  } else if ($0 ~ /^[a-z0-9_]+:/) {
    area = $1
    sub(/:$/, "", area)
    known[area] = 1
    for (i = 2; i <= NF; i++) allowed[area, $i] = 1
  }
  next
}

FNR == 1 {
  own = area_of(FILENAME)
  public = FILENAME ~ /^include\//
  umbrella = FILENAME == "include/accelerate/accelerate.h"
  if (!(own in known)) print FILENAME ": has no area in tools/layers.txt"
}

/^#include </ {
  if ((own == "core" || own == "launch") && $2 ~ /^<(torch|ATen|c10)\//) complain(own " has no Torch")
  if (public && !umbrella && $2 == "<torch/torch.h>") complain("<torch/torch.h> costs 20 s; only accelerate.h includes it")
}

/^#include "/ {
  path = $2
  gsub(/"/, "", path)
  if (path ~ /^accelerate\//) path = "include/" path
  else {
    if (public) { complain("a public header may include public headers only"); next }
    folder = path
    sub(/\/.*/, "", folder)
    if (!(folder in known)) next  # a file beside the including one
    if (folder != "cuda" && folder != "cli") path = "src/" path
  }
  used = area_of(path)
  if (used != "" && used != own && own in known && !((own, used) in allowed))
    complain(own " may not include " used " (tools/layers.txt)")
}
