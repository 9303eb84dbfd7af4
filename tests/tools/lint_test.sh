#!/usr/bin/env bash
# lint_test.sh <repository>: the checks of tools/lint.sh on a small tree that goes against each of them.
set -euo pipefail
repository=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/tools"
cp -r "$repository"/tools/{lint.sh,tidy.sh,options.sh,options.awk,headers.sh,parity.py,check_layers.awk,check_types.awk,site} "$work/tools"
cd "$work"
git init -q .

what="" status=0 failures=0
file() { mkdir -p "$(dirname "$1")" && cat >"$1"; }  # path; the content comes from the input
case_of() {  # what is tested, in an empty tree with these layers
  what=$1
  rm -rf src include docs ./*.md
  file tools/layers.txt <<'END'
core:
state: core
comm: core state
headers core: errors value data/
headers comm: operations  # a remark
END
}
lint() { status=0; tools/lint.sh "$@" >out 2>&1 || status=$?; }
wrong() {
  printf 'FAILED: %s: %s\n' "$what" "$*"
  sed 's/^/  printed: /' out
  failures=$((failures + 1))
}
passes() { lint "$1"; [ "$status" -eq 0 ] || wrong "$1 complains"; }
complains() {  # check, then texts
  lint "$1"
  [ "$status" -eq 1 ] || wrong "$1 ends with $status, not 1"
  shift
  for text; do grep -qF -- "$text" out || wrong "does not print '$text'"; done
}

case_of "a higher area includes a lower one and public headers of it"
file src/comm/a.cpp <<<$'#include <torch/torch.h>\n#include "accelerate/data/part.h"\n#include "core/b.h"\n#include "comm/own.h"'
file include/accelerate/operations.h <<<'#include "accelerate/value.h"'
file include/accelerate/value.h <<<'#include "accelerate/data/part.h"'
file include/accelerate/data/part.h <<<'#include "accelerate/detail/core/inside.h"'
file include/accelerate/detail/core/inside.h <<<'#include "accelerate/errors.h"'
passes layers

case_of "a lower area includes a higher one"
file src/core/a.cpp <<<$'#include <string>\n#include "comm/b.h"'
file src/state/a.cpp <<<'#include "accelerate/operations.h"'
complains layers "src/core/a.cpp:2: core may not include comm (tools/layers.txt)" \
  "src/state/a.cpp:1: state may not include comm (tools/layers.txt)"

case_of "public headers keep the layers as well"
file include/accelerate/errors.h <<<'#include "accelerate/operations.h"'
file include/accelerate/data/part.h <<<'#include "accelerate/detail/state/x.h"'
file include/accelerate/detail/state/x.h <<<'#include "accelerate/detail/comm/y.h"'
file include/accelerate/detail/comm/y.h <<<'#include "accelerate/errors.h"'
complains layers "include/accelerate/errors.h:1: core may not include comm" \
  "include/accelerate/data/part.h:1: core may not include state" \
  "include/accelerate/detail/state/x.h:1: state may not include comm"

case_of "a header or area without a line is named"
file include/accelerate/new.h <<<'#pragma once'
file include/accelerate/other/new.h <<<'#pragma once'
file src/magic/a.cpp <<<'int a;'
complains layers "include/accelerate/new.h: has no area" "include/accelerate/other/new.h: has no area" \
  "src/magic/a.cpp: has no area"

case_of "public headers include no header of src and not all of Torch; core has no Torch"
file include/accelerate/operations.h <<<$'#include <torch/torch.h>\n#include "core/text.h"'
file src/core/a.cpp <<<'#include <ATen/ATen.h>'
complains layers "operations.h:1: <torch/torch.h> costs 20 s" "operations.h:2: a public header may include public headers only" \
  "src/core/a.cpp:1: core has no Torch"

case_of "one type per name and namespace"
file src/a.h <<'END'
namespace accelerate::detail {
class Forward;
template <class T> struct Special;
template <> struct Special<int> { int x = 0; };
template <> struct Special<long> {};
struct [[nodiscard]] Once final : public std::vector<int> {
  struct Inner { int x = 0; };
  Once() : x{1} {}
};
namespace { struct Local {}; }
}
namespace accelerate::other { enum class Round { kA }; }
END
file src/b.h <<'END'
namespace accelerate::detail {
class Forward;
// struct Once {};
/* struct Once {}; */
const char* text = "struct Once {";
struct Holder { struct Inner {}; };
enum class Round : int { kA };
namespace { struct Local {}; }
}
END
passes types

case_of "a type name twice in a namespace"
file src/a.h <<'END'
namespace accelerate {
namespace detail {
struct Message {};
template <class T>
  requires(std::is_class_v<T> || sizeof(T) > 4)
class ACCELERATE_API Reader {};
using Name = int;
template <class T> concept Fits = requires { typename T::type; };
}  // namespace detail
}
END
file include/accelerate/b.h <<'END'
namespace accelerate::detail {
enum class Message
{
  kA
};
struct alignas(64) [[nodiscard]] Reader : Base<int> {};
template <class T> using Name = T;
template <class T> concept Fits = true;
}
END
complains types "accelerate::detail::Message is also defined in" "accelerate::detail::Reader is also defined in" \
  "accelerate::detail::Name is also defined in" "accelerate::detail::Fits is also defined in"

case_of "an inner name that hides one around it"
file src/a.h <<<'namespace accelerate::detail::comm { enum class Reduction { kSum }; }'
file include/accelerate/b.h <<<'namespace accelerate { enum class Reduction { kSum }; }'
complains types "src/a.h:1: accelerate::detail::comm::Reduction hides accelerate::Reduction, defined in include/accelerate/b.h:1"

long=$(printf 'word %.0s' {1..25})
case_of "Markdown has 120 columns, except tables, code and what has no space"
# shellcheck disable=SC2016  # no expression
{ printf '%.119s…\n' "$long"; printf '| %s |\n' "$long"; printf '```\n%s\n```\n' "$long"
  printf -- '- https://example.com/%0120d\n' 1; } | file docs/a.md
sed -i '1s/.*/'"$(printf '…%.0s' {1..120})"'/' docs/a.md
passes markdown
printf 'short\n%s\n' "$long" | file README.md
complains markdown "README.md:2: 125 columns; 120 is the limit"

case_of "a long file"
yes 'int a;' | head -n 701 | file src/a.cpp || true
complains lengths "src/a.cpp has 701 lines; 700 is the limit"

case_of "a long public header, and too many of them"
yes 'int a;' | head -n 251 | file include/accelerate/a.h || true
yes 'int a;' | head -n 350 | file include/accelerate/accelerator.h || true
complains headers "include/accelerate/a.h has 251 lines; 250 is the limit"
grep -q accelerator.h out && wrong "does not give accelerator.h its 350 lines"
for i in {1..51}; do file "include/accelerate/$i.h" <<<'#pragma once'; file "include/accelerate/detail/core/$i.h" <<<'#pragma once'; done
complains headers "include/accelerate has 53 headers at its top; 47 is the limit"

case_of "many exports"
yes 'ACCELERATE_API int a();' | head -n 61 | file include/accelerate/detail/core/a.h || true
complains headers "include/accelerate/detail has 61 times ACCELERATE_API; 60 is the limit"

case_of "a header begins with its path"
file include/accelerate/a.h <<<'// accelerate/a.h - the letter.'
file src/core/b.h <<<'// src/core/b.h - the next one.'
passes banners
file src/core/c.h <<<'// src/old/c.h - the third.'
complains banners "src/core/c.h: the first line must be '// src/core/c.h - ' and what it is for"

case_of "the page of options has what the headers say"
file include/accelerate/a.h <<'END'
enum class Colour { kRed, kBlue };
/// How to paint.
struct PaintOptions {
  /// Unset: red.
  std::optional<Colour> colour = std::nullopt;
  std::int64_t layers = 2;

  [[nodiscard]] bool thick() const { return layers > 2; }
};
END
file docs/options.md <<<$'# Options\n'
file docs/headers.md <<<$'# Headers\n'
file cmake/version.h.in <<<'// accelerate/version.h - the version.'
tools/options.sh
tools/headers.sh
passes options
for row in "### PaintOptions" "How to paint." "| \`colour\` | \`std::optional<Colour>\` |  | Unset: red. |" \
  "| \`layers\` | \`int64_t\` | \`2\` |  |" "| \`Colour\` | \`kRed\`, \`kBlue\` |  |"; do
  grep -qxF -- "$row" docs/options.md || wrong "the page has no '$row'"
done
grep -q thick docs/options.md && wrong "a function is no option"
sed -i 's/layers = 2/layers = 3/' include/accelerate/a.h
complains options "docs/options.md is not what the headers say: tools/options.sh mends it"

case_of "the page of parity is made of its table, and what is done is in a header"
file include/accelerate/a.h <<<'void gather(int tree);'
file cmake/version.h.in <<<'#define ACCELERATE_VERSION_MAJOR 0'
file docs/parity.md <<<$'# Parity\n\n<!-- tools/parity.py writes the rest of this page from docs/parity.txt. -->'
file docs/parity.txt <<'END'
== Collectives

python: `gather(tensor)`
ours: `gather(tree)`
status: done
test: Gather.*
differences: A whole tree
  at once: a|b.

python: `reduce`
status: later
END
tools/parity.py
passes parity
for row in '## Collectives' '| `gather(tensor)` | `gather(tree)` | done | Gather.\* | A whole tree at once: a\|b. |' '| `reduce` | | later | | |'; do
  grep -qxF -- "$row" docs/parity.md || wrong "the page has no '$row'"
done
sed -i 's/A whole tree/All of it/' docs/parity.md
complains parity "docs/parity.md is not what docs/parity.txt says"
tools/parity.py --adopt
grep -q "^differences: All of it at once: a|b.$" docs/parity.txt || wrong "does not take over a row of the page"
passes parity
sed -i 's/status: later/status: done\nours: same/' docs/parity.txt
tools/parity.py
complains parity "docs/parity.txt: 'reduce' of the row \`reduce\` is in no public header"

case_of "errors are explained"
file src/core/a.cpp <<<'void a() { throw ArgumentError(str("The size ", size, " is too large. Take a smaller one.")); }'
file docs/troubleshooting.md <<<$'# Trouble\n\n<!-- errors: src/core/b.cpp\nsrc/core/*.cpp -->'
complains errors "nothing that fits 'src/core/b.cpp' raises errors"
file docs/troubleshooting.md <<<$'# Trouble\n\n<!-- errors: src/core/*.cpp -->'
passes errors
PYTHONPATH=tools/site python3 -c 'import troubleshooting; print(troubleshooting.with_texts(open(troubleshooting.PAGE).read()))' >out
grep -qxF '| ArgumentError | `The size … is too large. Take a smaller one.` |' out || wrong "the text is not in the table"
file src/state/b.cpp <<<'void b() { throw StateError("The state is gone. Make another one."); }'
complains errors "src/state/b.cpp raises errors and is in 0 groups"

case_of "links of the site lead somewhere, and nothing is loaded from elsewhere"
for i in {1..20}; do file "site/$i.html" <<<'<h2 id="here">Here</h2>'; done
file site/index.html <<<'<a href="1.html#here"></a><a href="https://example.com"></a><img src="a.png">'
file site/a.png <<<'picture'
python3 tools/site/check_links.py site >out 2>&1 || wrong "complains of a good site"
file site/index.html <<<'<a href="21.html"></a><a href="2.html#there"></a><script src="https://example.com/a.js"></script>'
python3 tools/site/check_links.py site >out 2>&1 && wrong "does not complain"
for text in "21.html does not exist" "2.html#there has no such heading" "loads https://example.com/a.js"; do
  grep -qF -- "$text" out || wrong "does not print '$text'"
done
rm -rf site cmake

case_of "the reference has what headers declare for users"
file include/accelerate/paint.h <<'END'
// accelerate/paint.h - colours.
//
//     Brush brush({.layers = 2});
#pragma once
namespace accelerate {
/// How to paint.
struct PaintOptions {
  /// At least one.
  int layers = 1;
};
/// Paints with `PaintOptions`.
class ACCELERATE_API Brush {
 public:
  explicit Brush(const PaintOptions& options = {});
  ~Brush();
  /// How often `stroke` was called.
  [[nodiscard]] int count() const { return count_; }

 private:
  int count_ = 0;
};
namespace detail { struct Hidden {}; }
}  // namespace accelerate
END
PYTHONPATH=tools/site python3 -c 'import api_reference, pathlib; api_reference.write(pathlib.Path("api"))' >out 2>&1 || wrong "fails"
cp api/paint.md out
for line in "Colours." "Brush brush({.layers = 2});" '| `int layers = 1` | At least one. |' "explicit Brush(const PaintOptions& options = {});" \
  "int count() const;" 'Paints with [`PaintOptions`](#paintoptions).'; do
  grep -qxF -- "$line" out || wrong "has no '$line'"
done
grep -qE "Hidden|count_|~Brush" out && wrong "shows internals"
rm -rf api

case_of "a check that there is not"
lint layer
[ "$status" -eq 2 ] || wrong "ends with $status, not 2"
grep -qF "there is no check 'layer'" out || wrong "does not name it"

# clang-tidy: a path with the few commands that it needs, and programs that only write down what they were asked to do.
bin=$work/bin calls=$work/calls
mkdir -p "$bin"
for command in bash cat dirname env git grep mkdir nproc sort xargs; do ln -s "$(command -v $command)" "$bin/$command"; done
stub() { { printf '#!/bin/bash\necho "%s $*" >>"%s"\n' "${1##*/}" "$calls"; cat; } >"$1" && chmod +x "$1"; }  # path; the body comes from the input
# shellcheck disable=SC2016  # expands in the stub
stub tools/setup.sh <<<'[ "$1" != --where ] || echo /libtorch'
stub "$bin/cmake" <<<"while [ \"\$1\" != -B ]; do shift; done; echo '[{\"file\": \"$work/src/core/new.cpp\"}]' >\"\$2/compile_commands.json\""
tidy() { status=0; : >"$calls"; PATH=$bin tools/tidy.sh "$@" >out 2>&1 || status=$?; }
commit() { git add -A && git -c user.name=a -c user.email=a@localhost commit -qm "$1"; }
prints() { [ "$status" -eq "$1" ] || wrong "ends with $status, not $1"; grep -qF -- "$2" out || wrong "does not print '$2'"; }

case_of "make lint does not run clang-tidy where nothing has changed"
file src/core/old.cpp <<<'int old;'
commit base
tidy --changed
if [ "$status" -ne 0 ] || [ -s out ]; then wrong "ends with $status, or says something"; fi
case_of "where clang-tidy is missing, make lint says so"
file src/core/old.cpp <<<'int old;'
file src/core/new.cpp <<<'int a;'
tidy --changed
prints 0 "clang-tidy-19 is not installed: 1 changed files are not checked"
what="clang-tidy sees changed files, and fails the check when it complains"
stub "$bin/clang-tidy-19" <<<'true'
tidy --changed
prints 0 "tidy: 1 files in order"
grep -q "^clang-tidy-19 .*src/core/new.cpp$" "$calls" || wrong "does not run it"
grep -q "old.cpp" "$calls" && wrong "looks at a file that has not changed"
TIDY_LIMIT=0 tidy --changed
prints 0 "1 changed files are too many for clang-tidy in make lint: run make tidy"
stub "$bin/clang-tidy-19" <<<'exit 1'
tidy --changed
prints 1 "clang-tidy complains"

[ "$failures" -eq 0 ] || exit 1
echo "lint finds what it is for"
