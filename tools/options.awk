# options.awk: the options of public headers as Markdown tables; with -v part=enums their enumerations. For tools/options.sh.
function escaped(text) { gsub(/\|/, "\\|", text); return text }
function code(text) { return text == "" ? "" : "`" escaped(text) "`" }
function is_options(name) {
  return name ~ /(Options|Kwargs|Plugin|Configuration|Config)$/ || name ~ /^(ProfileSchedule|MixedPrecisionPolicy|CPUOffload|OneCyclePhase)$/
}
# What no program writes down.
function is_internal(name) { return name ~ /^(PadWith|Node|Leaves|Spelling|LoaderInput|StateKind|HfDeepSpeedConfig)$/ }

# "std::optional<int> x = 3", with the comment before it.
function field(text, about,   left, right, at, name) {
  sub(/; *\/\/\/< */, ";\001", text)
  if ((at = index(text, "\001")) > 0) { about = substr(text, at + 1); text = substr(text, 1, at - 1) }
  sub(/;.*/, "", text)
  if (text ~ /^(static|using|friend|explicit|template|enum|struct|class|constexpr)[ <]/ || text ~ /operator|^~|^\[\[/) return
  at = index(text, " = ")
  left = at > 0 ? substr(text, 1, at - 1) : text
  right = at > 0 ? substr(text, at + 3) : ""
  if (left ~ /(^| )[a-z_0-9]+\(/) return  # a member function
  if (left ~ /\)( const| noexcept)*$/ || left !~ / /) return
  name = left
  sub(/.* /, "", name)
  sub(/ [^ ]*$/, "", left)
  gsub(/std::int64_t/, "int64_t", left)
  if (right == "std::nullopt") right = "unset"
  rows = rows "| `" name "` | " code(left) " | " (right == "unset" || right == "{}" || right == "nullptr" ? "" : code(right)) " | " escaped(about) " |\n"
}

function finish_struct() {
  if (rows != "" && part != "enums") {
    printf "\n### %s\n\n", struct
    if (struct_about != "") print wrapped(struct_about) "\n"
    printf "| field | type | default | meaning |\n| --- | --- | --- | --- |\n%s", rows
  }
  struct = ""
}

function wrapped(text,   words, count, i, line, result) {
  count = split(text, words, " ")
  for (i = 1; i <= count; ++i) {
    if (line != "" && length(line) + length(words[i]) >= 120) { result = result line "\n"; line = "" }
    line = line (line == "" ? "" : " ") words[i]
  }
  return result line
}

FNR == 1 { comment = ""; statement = ""; struct = ""; enumeration = "" }

# The spellings of an enumeration: kEnumTable<Type>{"Type", {"a", "b"}}.
match($0, /kEnumTable<[A-Za-z0-9]+>\{/) { table = substr($0, RSTART + 11, RLENGTH - 13); texts = "" }
table != "" {
  texts = texts $0
  if ($0 ~ /;$/) {
    sub(/^[^{]*\{[^{]*\{/, "", texts)
    sub(/\}.*/, "", texts)
    spelled[table] = texts
    table = ""
  }
  next
}

struct == "" && enumeration == "" && /^ *\/\/\/ / { sub(/^ *\/\/\/ /, ""); comment = comment (comment == "" ? "" : " ") $0; next }

/^struct .*\{$/ {
  name = $0
  sub(/^struct (ACCELERATE_API )?/, "", name)
  sub(/ .*/, "", name)
  if (is_options(name) && !is_internal(name)) { struct = name; struct_about = comment; rows = ""; statement = ""; depth = 0 }
  comment = ""
  next
}
/^enum class / {
  enumeration = $3
  enum_about = comment
  body = ""
  comment = ""
}
enumeration != "" {
  line = $0
  sub(/\/\/.*/, "", line)
  body = body " " line
  if (line ~ /\};?/) {
    sub(/^[^{]*\{/, "", body)
    sub(/\}.*/, "", body)
    if (!is_internal(enumeration)) { enums[++enum_count] = enumeration; values[enumeration] = body; abouts[enumeration] = enum_about }
    enumeration = ""
  }
  next
}

struct != "" && /^\};/ { finish_struct(); comment = ""; next }
struct != "" {
  line = $0
  sub(/^ +/, "", line)
  if (line ~ /^\/\/\/ /) { if (statement == "") { sub(/^\/\/\/ /, "", line); comment = comment (comment == "" ? "" : " ") line }; next }
  if (line == "" ) { comment = ""; next }
  if (line ~ /^\/\//) next
  statement = statement (statement == "" ? "" : " ") line
  # A function with a body, or a declaration of several lines.
  opened = gsub(/\{/, "{", statement) - gsub(/\}/, "}", statement)
  if (opened > 0) next
  if (statement ~ /;( *\/\/.*)?$/ || statement ~ /\}$/) { if (statement ~ /;/) field(statement, comment); statement = ""; comment = "" }
  next
}
{ comment = "" }

END {
  if (part != "enums") exit
  print "\n## Enumerations\n"
  print wrapped("`to_string(value)` gives the text that files, flags and variables have; `from_string<PrecisionType>(\"bf16\")` reads it, and throws `ConfigError` with the choices for another text.") "\n"
  print "| type | values, with their texts | meaning |\n| --- | --- | --- |"
  for (i = 1; i <= enum_count; ++i) {
    name = enums[i]
    count = split(values[name], parts, ",")
    split(spelled[name], words, ",")
    list = ""
    for (j = 1; j <= count; ++j) {
      value = parts[j]
      sub(/=.*/, "", value)
      gsub(/[ ]/, "", value)
      if (value == "") continue
      word = words[j]
      gsub(/[ "]/, "", word)
      list = list (list == "" ? "" : ", ") "`" value "`" (word == "" ? "" : " " word)
    }
    printf "| `%s` | %s | %s |\n", name, list, escaped(abouts[name])
  }
}
