# check_types.awk <sources...>: prints each type name (class, struct, union, enum, alias, concept) that one namespace
# defines twice, or that a namespace defines although one around it does: the inner name would hide the outer one.
# Unnamed namespaces belong to their file; specialisations and declarations without a body do not count.

function reset() { count = 0 }

function namespace_name(    i, name) {
  for (i = 1; i <= depth; i++) if (scope[i] != "") name = name (name == "" ? "" : "::") scope[i]
  return name
}

function record(name,    key) {
  if (opaque) return
  key = namespace_name() "::" name
  if (key ~ /\(unnamed/) return
  if (key in place) print FILENAME ":" FNR ": " key " is also defined in " place[key]
  else place[key] = FILENAME ":" FNR
}

# The first token behind `template <...>` prefixes.
function behind_templates(    i, angles) {
  i = 1
  while (i <= count && token[i] == "template") {
    i++
    angles = 0
    do {
      if (token[i] == "<") angles++
      if (token[i] == ">") angles--
      i++
    } while (i <= count && angles > 0)
  }
  return i
}

# What is defined by the tokens before a '{', or before a ';' (then only aliases and concepts).
function define(with_body,    i, brackets) {
  token[count + 1] = token[count + 2] = token[count + 3] = ""  # what an earlier statement left there
  i = behind_templates()
  if (token[i] == "using" && token[i + 2] == "=") { record(token[i + 1]); return }
  if (token[i] == "concept") { record(token[i + 1]); return }
  if (!with_body) return
  if (token[i] == "requires") {  # a constraint: the class follows it
    brackets = 0
    for (; i <= count; i++) {
      if (token[i] == "(") brackets++
      if (token[i] == ")") brackets--
      if (brackets == 0 && token[i] ~ /^(class|struct|union)$/) break
    }
  }
  if (token[i] !~ /^(class|struct|union|enum)$/) return
  for (i++; i <= count; i++) {
    if (token[i] ~ /^(class|struct)$/ || token[i] ~ /^[A-Z][A-Z0-9_]*_API$/) continue
    if (token[i] == "[" || token[i] == "alignas") {  # attributes
      if (token[i] == "alignas") i++
      brackets = 0
      do {
        if (token[i] ~ /^[\[(]$/) brackets++
        if (token[i] ~ /^[\])]$/) brackets--
        i++
      } while (i <= count && (brackets > 0 || token[i] == "["))
      i--
      continue
    }
    break
  }
  if (i > count || token[i] !~ /^[A-Za-z_]/) return      # without a name
  if (token[i + 1] == "<" || token[i + 1] == "::") return  # a specialisation; a nested type
  record(token[i])
}

function open_brace(    i, name) {
  depth++
  scope[depth] = ""
  closes_opaque[depth] = 0
  if (opaque) return
  i = token[1] == "inline" ? 2 : 1
  if (token[i] == "namespace" && count >= i) {
    for (i++; i <= count; i++) name = name token[i]
    scope[depth] = name == "" ? "(unnamed " FILENAME ")" : name
  } else if (token[1] != "extern" || count != 1) {  # the string of extern "C" is cut out
    define(1)
    opaque = 1
    closes_opaque[depth] = 1
  }
  reset()
}

function close_brace() {
  if (closes_opaque[depth]) opaque = 0
  if (depth > 0) depth--
  reset()
}

FNR == 1 { depth = 0; opaque = 0; in_comment = 0; continued = 0; reset() }
continued || /^[ \t]*#/ { continued = /\\$/; next }
{
  line = $0
  gsub(/\\./, "", line)
  gsub(/"[^"]*"/, "", line)
  gsub(/'[^' ]'/, "", line)
  sub(/\/\/.*/, "", line)
  if (in_comment) { if (!sub(/^.*\*\//, "", line)) next; in_comment = 0 }
  gsub(/\/\*[^*]*\*\//, "", line)
  if (sub(/\/\*.*/, "", line)) in_comment = 1
  while (match(line, /[A-Za-z_][A-Za-z0-9_]*|::|[^ \t]/)) {
    word = substr(line, RSTART, RLENGTH)
    line = substr(line, RSTART + RLENGTH)
    if (word == "{") open_brace()
    else if (word == "}") close_brace()
    else if (opaque) continue
    else if (word == ";") { define(0); reset() }
    else token[++count] = word
  }
}
END {
  for (key in place) {
    name = key
    sub(/.*::/, "", name)
    around = substr(key, 1, length(key) - length(name) - 2)
    while (sub(/::[^:]*$/, "", around)) {
      outer = around "::" name
      if (outer in place) print place[key] ": " key " hides " outer ", defined in " place[outer]
    }
  }
}
