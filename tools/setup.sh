#!/usr/bin/env bash
# Brings a machine to the point where CMake can configure: system packages and LibTorch.
#
#   tools/setup.sh            packages and LibTorch; prints nothing when all is there
#   tools/setup.sh --build    the same without the packages that only tests want
#   tools/setup.sh --where    the folder of LibTorch that setup found or installed
#   tools/setup.sh --python   the Python environment of `make interop` and `make bench`
#   tools/setup.sh --site     the site generator of `make docs`
#   tools/setup.sh --packages NAME...   Debian packages that only some targets need
#
# Settings, from the environment:
#   TORCH=2.15.0     use exactly this version of LibTorch (default: what is found, else 2.11.0)
#   Torch_DIR, CMAKE_PREFIX_PATH   a LibTorch that is there already
#   CUDA=1           LibTorch with all CUDA libraries (default: where a GPU is present); CUDA=0: never
#   ACCELERATE_DEPS  where LibTorch is kept (default: ${XDG_CACHE_HOME:-~/.cache}/accelerate)
set -euo pipefail
cd "$(dirname "$0")/.."

pinned=2.11.0
oldest=2.11.0  # cmake/AccelerateTorch.cmake demands the same
accelerate_version=1.13.0  # the Python package that we compare with
bitsandbytes_version=0.50.2  # its CPU build quantizes, and reads our files
transformers_version=5.22.2  # writes a real model folder for `make interop`
# What reads our trackers' files in `make interop`; behind mlflow-skinny what its server needs. Count up with a change.
trackers_versions=1
trackers=(tensorboard==2.21.0 wandb==0.31.0 trackio==0.43.0 mlflow-skinny==3.17.2 flask flask-cors sqlalchemy alembic graphene pandas aiohttp)
site_generator=(mkdocs-material==9.8.1 mkdocs==1.6.1 pymdown-extensions==13.0 Pygments==2.21.0)
deps=${ACCELERATE_DEPS:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/accelerate}
version=${TORCH:-$pinned}

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
  printf 'setup: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '       %s\n' "$line" >&2; done
  exit 1
}

# --- system packages ---------------------------------------------------------------------------

listed_packages() { sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e '/^$/d' tools/packages.txt; }
wanted_packages() { listed_packages | grep -v '^?'; }
welcome_packages() { listed_packages | sed -n 's/^?//p'; }  # some tests want them, nothing else does

missing_packages() {
  comm -13 <(dpkg-query -W -f '${Package} ${Status}\n' "$@" 2>/dev/null |
    sed -n 's/ install ok installed$//p' | sort -u) <(printf '%s\n' "$@" | sort -u)
}

# Sets as_root to what makes a command run as root; fails where nothing does.
find_root() {
  as_root=()
  [ "$(id -u)" -ne 0 ] || return 0
  command -v sudo >/dev/null || return 1
  if sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  else
    [ -t 0 ] && as_root=(sudo)  # asks for a password
  fi
}

dpkg_was_interrupted() {
  [ -n "$(dpkg --audit 2>/dev/null)" ] || compgen -G '/var/lib/dpkg/updates/[0-9]*' >/dev/null
}

apt_install() {  # log, then names; as_root is set
  local log=$1 repair=()
  shift
  if dpkg_was_interrupted; then
    say "completing an installation of packages that was interrupted: dpkg --configure -a"
    # What it cannot configure lacks packages that apt-get installs; it must remove none for that.
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive dpkg --configure -a >>"$log" 2>&1 || true
    repair=(--fix-broken --no-remove)
  fi
  say "installing Debian packages: $*"
  "${as_root[@]}" apt-get update -q >>"$log" 2>&1 &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -q --no-install-recommends "${repair[@]}" "$@" >>"$log" 2>&1
}

install_packages() {  # names
  command -v dpkg-query >/dev/null || {
    # Not Debian: the compiler will say what it misses; say beforehand what it is.
    local tool absent=()
    for tool in g++ cmake ninja; do command -v "$tool" >/dev/null || absent+=("$tool"); done
    [ ${#absent[@]} -eq 0 ] && return 0
    fail "this is not a Debian system, and ${absent[*]} is missing." \
      "Install what stands for these Debian packages, then run make again:" "$*"
  }
  local missing log
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -ne 0 ] || return 0
  find_root || fail "these packages are missing, and installing them needs root: ${missing[*]}" \
    "Ask an administrator to run:  apt-get install --no-install-recommends ${missing[*]}" "then run make again."
  log=$(mktemp)
  apt_install "$log" "${missing[@]}" || {
    tail -n 15 "$log" >&2
    fail "apt-get failed (the end of its output is above; all of it is in $log)." \
      "By hand:  apt-get update && apt-get install --no-install-recommends ${missing[*]}"
  }
  rm -f "$log"
}

# One try, and one line when it fails: without them some tests are skipped, and that is all.
try_packages() {  # names
  command -v dpkg-query >/dev/null || return 0
  local missing log why="installing them needs root" tried=$deps/.packages-tried
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -ne 0 ] || return 0
  [ "$(cat "$tried" 2>/dev/null)" != "${missing[*]}" ] || return 0
  if find_root </dev/null; then  # asks for no password
    log=$(mktemp)
    apt_install "$log" "${missing[@]}" </dev/null && { rm -f "$log"; return 0; }
    why="apt-get failed, its output is in $log"
  fi
  say "not installed: ${missing[*]} ($why). The tests that want them are skipped."
  mkdir -p "$deps" 2>/dev/null && printf '%s\n' "${missing[*]}" >"$tried" || true
}

# --- LibTorch ----------------------------------------------------------------------------------

is_libtorch() { [ -e "$1/lib/libtorch_cpu.so" ] && [ -e "$1/include/ATen/ATen.h" ]; }

version_of() {
  local header=$1/include/torch/headeronly/version.h
  [ -e "$header" ] || header=$1/include/torch/version.h
  sed -n 's/^#define TORCH_VERSION_\(MAJOR\|MINOR\|PATCH\) \([0-9]*\).*/\2/p' "$header" 2>/dev/null |
    paste -sd. -
}

is_too_old() { [ "$(printf '%s\n%s\n' "$1" "$oldest" | sort -V | head -n 1)" != "$oldest" ]; }

# Before anything is fetched: a version that cannot be used, or that pip would know by another name.
check_wanted_version() {
  local number='(0|[1-9][0-9]*)'
  if [[ $version =~ ^$number\.$number$ ]]; then
    fail "TORCH=$version is no complete version of LibTorch." "Give three numbers: TORCH=$version.0"
  elif [[ ! $version =~ ^$number\.$number\.$number$ ]]; then
    fail "TORCH=$version is no version of LibTorch." "Give three numbers: TORCH=$pinned"
  elif is_too_old "$version"; then
    fail "TORCH=$version is too old: LibTorch $oldest or newer is needed."
  fi
}

# Why the LibTorch in a folder is not used; nothing for one that fits.
misfit() {  # folder
  local found
  is_libtorch "$1" || { echo "$1 has no lib/libtorch_cpu.so and include/ATen/ATen.h"; return; }
  found=$(version_of "$1")
  if [ -z "$found" ]; then
    echo "it has no include/torch/version.h"
  elif [ -n "${TORCH:-}" ] && [ "$found" != "$TORCH" ]; then
    echo "it is LibTorch $found, and TORCH=$TORCH asks for another"
  elif is_too_old "$found"; then
    echo "it is LibTorch $found, and $oldest or newer is needed"
  fi
}

fits() { [ -z "$(misfit "$1")" ]; }  # folder

gpu_is_here() { [ -e /dev/nvidiactl ] || [ -e /dev/nvidia0 ] || [ -e /dev/dxg ]; }

wants_cuda() {
  case "${CUDA:-}" in
    1 | on | ON | yes | true) return 0 ;;
    0 | off | OFF | no | false) return 1 ;;
    *) gpu_is_here ;;
  esac
}

cached_dir() {
  if wants_cuda; then echo "$deps/torch-$version-cuda"; else echo "$deps/torch-$version"; fi
}

# With --aloud it says why a LibTorch that the user named is passed over.
find_libtorch() {
  local candidate prefix name aloud=${1:-}
  for name in ACCELERATE_TORCH_DIR Torch_DIR; do
    [ -n "${!name:-}" ] || continue
    candidate=${!name}
    [ $name = Torch_DIR ] && candidate+=/../../..  # from share/cmake/Torch
    fits "$candidate" && { (cd "$candidate" && pwd); return 0; }
    [ -z "$aloud" ] || say "$name=${!name} is not used: $(misfit "$candidate")."
  done
  local IFS=':;'
  for prefix in ${CMAKE_PREFIX_PATH:-}; do
    for candidate in "$prefix" "$prefix/torch" "$prefix/libtorch" "$prefix/../.."; do
      is_libtorch "$candidate" || continue  # a prefix may well be there for other libraries
      fits "$candidate" && { (cd "$candidate" && pwd); return 0; }
      [ -z "$aloud" ] || say "$candidate of CMAKE_PREFIX_PATH is not used: $(misfit "$candidate")."
    done
  done
  unset IFS
  if command -v python3 >/dev/null; then
    candidate=$(python3 -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')" 2>/dev/null || true)
    [ -n "$candidate" ] && fits "$candidate" && { echo "$candidate"; return 0; }
  fi
  # One with all CUDA libraries serves a build without as well.
  for candidate in "$(cached_dir)" "$deps/torch-$version-cuda"; do
    fits "$candidate/torch" && { echo "$candidate/torch"; return 0; }
  done
  return 1
}

# Two clones that set up at once fetch one LibTorch: the second waits, and says so.
take_lock() {  # descriptor that is open on the lock
  flock -n "$1" && return 0
  say "waiting for another set-up that fetches the same (its lock is in $deps)"
  flock "$1"
}

needs_space() {  # megabytes, what for
  local free
  mkdir -p "$deps" 2>/dev/null || fail "cannot write to $deps." "Choose another place: ACCELERATE_DEPS=/some/folder make ..."
  free=$(df -Pm "$deps" | awk 'NR==2{print $4}')
  [ "$free" -ge "$1" ] || fail "$2 needs $1 MB in $deps, and $free MB are free." \
    "Free some space, or choose another disk: ACCELERATE_DEPS=/some/folder make ..."
}

pip_install() {  # target folder, then what to give to pip
  local target=$1
  shift
  python3 -m pip --version >/dev/null 2>&1 ||
    fail "python3 has no pip, which fetches LibTorch." "Debian: apt-get install python3-pip" \
      "Or give a LibTorch you have: CMAKE_PREFIX_PATH=/path/to/libtorch make ..."
  local quiet=(--disable-pip-version-check --no-warn-script-location --root-user-action=ignore)
  # pip unpacks in TMPDIR first: keep that on the disk we checked.
  mkdir -p "$target.tmp"
  TMPDIR=$target.tmp python3 -m pip install "${quiet[@]}" --no-compile --target "$target" "$@" >&2
}

install_libtorch() {
  local target part
  target=$(cached_dir)
  part=$target.part
  if wants_cuda; then
    needs_space 14000 "LibTorch $version with all CUDA libraries"
    say "fetching LibTorch $version with all CUDA libraries (about 2.5 GB, 2 minutes) into $target"
  else
    needs_space 3000 "LibTorch $version"
    say "fetching LibTorch $version (545 MB, under a minute) into $target"
  fi
  rm -rf "$part" "$part.tmp"
  local failed=0 cuda
  if wants_cuda; then
    pip_install "$part" "torch==$version" || failed=1
  else
    pip_install "$part" --no-deps "torch==$version" || failed=1
  fi
  cuda=$(sed -n "s/^cuda.*= '\\([0-9]*\\.[0-9]*\\).*/\\1/p" "$part/torch/version.py" 2>/dev/null || true)
  if [ $failed -eq 0 ] && [ -n "$cuda" ]; then
    local extra
    if wants_cuda; then
      # Headers that the runtime's own headers include, and that torch does not ask for.
      extra=("nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*")
    else
      # torch_cpu of a CUDA build needs these two small libraries and nothing else of CUDA.
      extra=("nvidia-cuda-runtime==${cuda%.*}.*" "nvidia-cuda-cupti==${cuda%.*}.*")
    fi
    # Into a folder of its own first: pip would not add to a folder nvidia/ that is there.
    pip_install "$part.tmp/extra" --no-deps "${extra[@]}" && cp -a "$part.tmp/extra/." "$part/" || failed=1
  fi
  rm -rf "$part.tmp"
  if [ $failed -ne 0 ] || ! is_libtorch "$part/torch"; then
    rm -rf "$part"
    fail "LibTorch $version could not be fetched (pip's words are above)." \
      "Without network: unpack a LibTorch archive or wheel of 2.11 or newer anywhere and run" \
      "  CMAKE_PREFIX_PATH=/path/to/libtorch make ..." \
      "Behind a proxy or mirror: pip reads https_proxy, PIP_INDEX_URL and its configuration file."
  fi
  rm -rf "$target"
  mv "$part" "$target"  # whole or not at all: an interrupted set-up leaves no half LibTorch
}

ensure_libtorch() {
  find_libtorch --aloud >/dev/null && return 0
  mkdir -p "$deps" 2>/dev/null || fail "cannot write to $deps." "Choose another place: ACCELERATE_DEPS=/some/folder make ..."
  exec 9>"$deps/.lock"
  take_lock 9
  find_libtorch >/dev/null || install_libtorch
  flock -u 9
}

# --- the Python side of comparisons --------------------------------------------------------------

# In a folder of their own: with them on the path Accelerate imports more, which would be measured by `make bench`.
ensure_extra() {  # the Python environment, what it is called, the size, then the packages
  local python=$1/bin/python target=$1/$2 name=$2 size=$3
  shift 3
  [ ! -e "$target/complete" ] || return 0
  exec 8>"$deps/.python.lock"
  take_lock 8
  if [ ! -e "$target/complete" ]; then
    say "fetching ${name//-/ } ($size) into $target"
    rm -rf "$target"
    "$python" -m pip install --disable-pip-version-check --target "$target" "$@" >&2 ||
      fail "$name could not be fetched (pip's words are above)." "The C++ library does not need it: make test works without."
    touch "$target/complete"
  fi
  flock -u 8
}

ensure_python() {
  local target=$deps/python-accelerate-$accelerate_version-torch-$pinned
  if [ ! -e "$target/complete" ]; then
    needs_space 9000 "the Python environment of the comparison"
    exec 8>"$deps/.python.lock"
    take_lock 8
    if [ ! -e "$target/complete" ]; then
      say "fetching Python Accelerate $accelerate_version and torch $pinned (about 2.5 GB, 2 minutes) into $target"
      rm -rf "$target"
      python3 -m venv "$target"
      "$target/bin/python" -m pip install --disable-pip-version-check \
        "accelerate==$accelerate_version" "torch==$pinned" tqdm packaging pyyaml >&2 ||
        fail "Python Accelerate could not be fetched (pip's words are above)." "The C++ library does not need it: make test works without."
      touch "$target/complete"
    fi
    flock -u 8
  fi
  ensure_extra "$target" "transformers-$transformers_version" "about 100 MB" "transformers==$transformers_version"
  # Alone: it asks for torch, which the environment has.
  ensure_extra "$target" "bitsandbytes-$bitsandbytes_version" "about 45 MB" --no-deps "bitsandbytes==$bitsandbytes_version"
  ensure_extra "$target" "trackers-$trackers_versions" "about 530 MB" "${trackers[@]}"
  echo "$target/bin/python"
}

# Prints the command that builds the site.
ensure_site() {
  local target=$deps/site-${site_generator[0]##*=}
  if [ ! -e "$target/complete" ]; then
    install_packages python3 python3-venv
    mkdir -p "$deps" 2>/dev/null || fail "cannot write to $deps." "Choose another place: ACCELERATE_DEPS=/some/folder make ..."
    exec 8>"$deps/.site.lock"
    take_lock 8
    if [ ! -e "$target/complete" ]; then
      say "fetching the site generator (40 MB) into $target"
      rm -rf "$target"
      python3 -m venv "$target"
      "$target/bin/python" -m pip install --quiet --disable-pip-version-check "${site_generator[@]}" >&2 ||
        fail "mkdocs-material could not be fetched (pip's words are above)." "The pages are readable without it: docs/*.md."
      touch "$target/complete"
    fi
    flock -u 8
  fi
  echo "$target/bin/mkdocs"
}

case "${1:-}" in
  "" | --build)
    check_wanted_version
    # shellcheck disable=SC2046 # one word per package
    install_packages $(wanted_packages)
    # shellcheck disable=SC2046
    [ "${1:-}" = --build ] || try_packages $(welcome_packages)
    ensure_libtorch
    ;;
  --where)
    check_wanted_version
    find_libtorch || fail "LibTorch is not there yet." "Run: make setup"
    ;;
  --python) ensure_python ;;
  --site) ensure_site ;;
  --packages) install_packages "${@:2}" ;;
  *) fail "unknown argument '$1'." "Use --build, --where, --python, --site, --packages or none." ;;
esac
