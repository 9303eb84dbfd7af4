#!/usr/bin/env bash
# setup_test.sh <repository>: tools/setup.sh, tools/lint.sh and the Makefile with commands that only write down what they
# were asked to do. Nothing is installed or fetched.
set -euo pipefail
repository=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin=$work/bin calls=$work/calls
mkdir -p "$bin"

stub() {  # name; the body comes from the input
  { printf '#!/bin/bash\necho "%s $*" >>"%s"\n' "$1" "$calls"; cat; } >"$bin/$1"
  chmod +x "$bin/$1"
}
# A Debian that has all packages but those in the file `absent`; apt-get installs them unless `broken` is there.
stub dpkg-query <<'END'
shift 3
for name; do grep -qx "$name" "$STUBS/absent" || echo "$name install ok installed"; done
END
stub dpkg <<'END'
case $1 in --audit) cat "$STUBS/audit" 2>/dev/null ;; --configure) rm -f "$STUBS/audit" ;; esac
END
stub apt-get <<'END'
[ ! -e "$STUBS/audit" ] || { echo "E: dpkg was interrupted"; exit 100; }
[ ! -e "$STUBS/broken" ] || { echo "E: no network"; exit 100; }
END
# shellcheck disable=SC2016
stub id <<<'echo "${STUB_USER:-0}"'
stub sudo <<<'exit 1'
stub df <<<'printf "Filesystem\nfake 100000 0 99999 0%% /\n"'
# python3: pip makes a LibTorch of the version that it is asked for; there is no torch to import.
stub python3 <<'END'
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *" install "*)
    version=$(sed -n 's/.*torch==\([0-9.]*\).*/\1/p' <<<"$*") target=$(sed -n 's/.*--target \([^ ]*\).*/\1/p' <<<"$*")
    [ -z "$target" ] || "$STUBS/libtorch" "$target/torch" "$version" ;;
esac
END
cat >"$work/libtorch" <<'END'
#!/bin/bash
mkdir -p "$1/lib" "$1/include/ATen" "$1/include/torch"
touch "$1/lib/libtorch_cpu.so" "$1/include/ATen/ATen.h"
IFS=. read -r major minor patch <<<"$2"
printf '#define TORCH_VERSION_%s %s\n' MAJOR "$major" MINOR "$minor" PATCH "$patch" >"$1/include/torch/version.h"
END
chmod +x "$work/libtorch"

what="" status=0 failures=0
case_of() {  # what is tested, from a machine that has all packages and no LibTorch
  what=$1
  rm -rf "$work/cache" "$work/audit" "$work/broken" "$calls"
  touch "$work/absent" "$calls"
  : >"$work/absent"
}
setup() {  # settings as NAME=VALUE, then arguments
  status=0
  env -i PATH="$bin:$PATH" HOME="$work" TMPDIR="$work" STUBS="$work" ACCELERATE_DEPS="$work/cache" CUDA=0 \
    "${settings[@]}" "$repository/tools/setup.sh" "$@" >"$work/out" 2>&1 </dev/null || status=$?
}
with() { settings=("$@"); }
wrong() {
  printf 'FAILED: %s: %s\n' "$what" "$*"
  sed 's/^/  printed: /' "$work/out"
  sed 's/^/  ran: /' "$calls"
  failures=$((failures + 1))
}
ends_with() { [ "$status" -eq "$1" ] || wrong "ended with $status, not $1"; }
prints() { grep -qF -- "$1" "$work/out" || wrong "does not print '$1'"; }
does_not_print() { ! grep -qF -- "$1" "$work/out" || wrong "prints '$1'"; }
runs() { grep -qF -- "$1" "$calls" || wrong "does not run '$1'"; }
does_not_run() { ! grep -qF -- "$1" "$calls" || wrong "runs '$1'"; }

case_of "a second set-up finds the first one's LibTorch"
with
setup && ends_with 0 && prints "fetching LibTorch 2.11.0"
: >"$calls"
setup && ends_with 0 && does_not_run "pip install"
[ ! -s "$work/out" ] || wrong "says something where nothing is to be done"
setup --where && ends_with 0 && prints "$work/cache/torch-2.11.0/torch"

case_of "another version"
with TORCH=2.15.0
setup && ends_with 0 && runs "torch==2.15.0"
setup --where && prints "$work/cache/torch-2.15.0/torch"

for version in 2.15 2 2.15.0+cpu banana 2.015.0; do
  case_of "TORCH=$version is refused before anything is done"
  echo g++ >"$work/absent"
  with TORCH=$version
  setup && ends_with 1 && prints "TORCH=$version is no" && does_not_run "pip install" && does_not_run apt-get
  setup --where && ends_with 1 && prints "TORCH=$version is no"
done
case_of "two numbers are answered with three"
with TORCH=2.15
setup && prints "TORCH=2.15.0"
case_of "a version that CMake would refuse is not fetched"
with TORCH=2.10.0
setup && ends_with 1 && prints "TORCH=2.10.0 is too old: LibTorch 2.11.0 or newer" && does_not_run "pip install"

"$work/libtorch" "$work/old" 2.9.1
"$work/libtorch" "$work/new" 2.12.0
case_of "a LibTorch that the user names is used"
for named in Torch_DIR="$work/new/share/cmake/Torch" ACCELERATE_TORCH_DIR="$work/new" CMAKE_PREFIX_PATH="$work/none:$work/new"; do
  mkdir -p "$work/new/share/cmake/Torch"
  with "$named"
  setup && ends_with 0 && does_not_run "pip install" && does_not_print "not used"
  setup --where && prints "$work/new"
done
case_of "a Torch_DIR without LibTorch is named"
with Torch_DIR="$work/none/share/cmake/Torch"
setup && ends_with 0 && prints "Torch_DIR=$work/none/share/cmake/Torch is not used: " && prints "has no lib/libtorch_cpu.so"
setup && prints "is not used" && does_not_print fetching
case_of "a Torch_DIR with an old LibTorch is named"
mkdir -p "$work/old/share/cmake/Torch"
with Torch_DIR="$work/old/share/cmake/Torch"
setup && ends_with 0 && prints "is not used: it is LibTorch 2.9.1, and 2.11.0 or newer is needed."
setup --where && does_not_print "is not used"  # said once
case_of "an old LibTorch in CMAKE_PREFIX_PATH is named, other folders there are not"
with CMAKE_PREFIX_PATH="$work/none;$work/old;$work"
setup && ends_with 0 && prints "$work/old of CMAKE_PREFIX_PATH is not used: it is LibTorch 2.9.1" && does_not_print "none"
case_of "a LibTorch of another version than TORCH is named"
with CMAKE_PREFIX_PATH="$work/new" TORCH=2.15.0
setup && ends_with 0 && prints "it is LibTorch 2.12.0, and TORCH=2.15.0 asks for another" && runs "torch==2.15.0"

case_of "what is installed is said, for tests as well"
printf '%s\n' mold munge slurm-wlm >"$work/absent"
with
setup && ends_with 0 && prints "installing Debian packages: mold" && prints "installing Debian packages: munge slurm-wlm"
case_of "--build leaves out what only tests want"
printf '%s\n' mold munge >"$work/absent"
setup --build && ends_with 0 && prints "installing Debian packages: mold" && does_not_print munge && does_not_run "install -y -q --no-install-recommends munge"
setup --where && ends_with 0

case_of "packages that only tests want are tried once"
echo munge >"$work/absent"
touch "$work/broken"
setup && ends_with 0 && prints "not installed: munge (apt-get failed" && prints "tests that want them are skipped"
: >"$calls"
setup && ends_with 0 && does_not_run apt-get && does_not_print munge
case_of "without root they are not tried"
echo munge >"$work/absent"
with STUB_USER=1000
setup && ends_with 0 && prints "not installed: munge (installing them needs root)" && does_not_run apt-get
case_of "without root a needed package is asked for"
echo mold >"$work/absent"
setup && ends_with 1 && prints "needs root: mold" && does_not_run apt-get && does_not_run "pip install"
case_of "an apt-get that fails is shown"
echo mold >"$work/absent"
touch "$work/broken"
with
setup && ends_with 1 && prints "E: no network" && prints "apt-get failed"

case_of "an interrupted installation is completed first"
echo mold >"$work/absent"
echo "The following packages are only half configured: mold" >"$work/audit"
setup && ends_with 0 && prints "dpkg --configure -a" && runs "dpkg --configure -a" && runs "--fix-broken --no-remove mold"
case_of "an installation that was not interrupted is left alone"
echo mold >"$work/absent"
setup && ends_with 0 && does_not_run "dpkg --configure" && does_not_run "--fix-broken"

case_of "one who waits for another set-up says so"
mkdir -p "$work/cache"
exec 7>"$work/cache/.lock"
flock 7
(sleep 1.5 && "$work/libtorch" "$work/cache/torch-2.11.0/torch" 2.11.0) 7>&7 &
exec 7>&-
setup && ends_with 0 && prints "waiting for another set-up" && does_not_run "pip install"
wait
case_of "Python's side shows its progress"
setup --python && ends_with 0 && prints "fetching Python Accelerate" && prints "/bin/python" && does_not_run " -q"
case_of "the site generator is fetched once, into an environment of its own"
setup --site && ends_with 0 && prints "fetching the site generator" && prints "/bin/mkdocs" && runs "mkdocs-material=="
: >"$calls"
setup --site && ends_with 0 && does_not_print "fetching" && prints "/bin/mkdocs" && does_not_run "pip install"

# The Makefile, with tools that do nothing.
mkdir -p "$work/clone/tools"
cp "$repository/Makefile" "$work/clone"
for tool in setup build lint; do
  printf '#!/bin/bash\necho "%s $*" >>"%s"\n' "$tool" "$calls" >"$work/clone/tools/$tool.sh"
  chmod +x "$work/clone/tools/$tool.sh"
done
stub cmake <<<'echo half; exit 1'
make_in_clone() { status=0; env -i PATH="$bin:$PATH" make -C "$work/clone" "$@" >"$work/out" 2>&1 || status=$?; }
case_of "make install fails when installing fails"
make_in_clone install PREFIX=/nowhere && ends_with 2 && runs "setup --build"
stub cmake <<<'echo whole'
make_in_clone install && ends_with 0 && prints whole
case_of "make demo installs no packages for tests"
make_in_clone demo && runs "setup --build"
rm "$bin/cmake"

# tools/lint.sh where no clang-format is found: a path with the few commands that it needs.
bin=$work/few
mkdir -p "$bin"
for command in bash dirname env chmod; do ln -s "$(command -v $command)" "$bin/$command"; done
stub git <<<'echo Makefile'
stub xargs <<<'while read -r _; do :; done'
cp "$repository/tools/lint.sh" "$work/clone/tools/lint.sh"
cat >"$work/clone/tools/setup.sh" <<END
#!/bin/bash
echo "setup \$*" >>"$calls"
printf '#!/bin/bash\n' >"$bin/clang-format-19"
chmod +x "$bin/clang-format-19"
END
case_of "make lint and make format install their tool"
status=0
PATH=$bin "$work/clone/tools/lint.sh" --format >"$work/out" 2>&1 || status=$?
ends_with 0 && runs "setup --packages clang-format-19" && runs "xargs $bin/clang-format-19 -i"

[ "$failures" -eq 0 ] || exit 1
echo "set-up does what it says"
