#!/usr/bin/env bash
# Installs the build tree to a temporary prefix, then builds and runs another project against it.
#
#   run.sh <build folder> <source folder> [--with-torch <LibTorch>]
set -euo pipefail
build=$1 source=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
options=(-DCMAKE_PREFIX_PATH="$work/prefix")
if [ "${1:-}" = --with-torch ]; then
  if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    echo "SKIPPED: find_package(Torch) of a CUDA build needs a CUDA toolkit, and none was found"
    exit 77
  fi
  export PATH=$PATH:/usr/local/cuda/bin
  options=(-DCMAKE_PREFIX_PATH="$work/prefix;$2" -DCONSUMER_FINDS_TORCH=ON)
fi
# Most of the time goes into LibTorch's headers: what was compiled before, wherever the prefix was then, is not compiled again.
if command -v ccache >/dev/null; then
  export CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1
  options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
fi
cmake -G Ninja -S "$source" -B "$work/build" -DCMAKE_BUILD_TYPE=Release "${options[@]}"
cmake --build "$work/build"

# LibTorch keeps no ABI: the package takes the version that it was built with, any patch of it, and no other.
built=$(sed -n 's/^set(ACCELERATE_BUILT_WITH_TORCH_VERSION "\([0-9]*\.[0-9]*\)\..*/\1/p' "$work/prefix/lib/cmake/accelerate/accelerateConfig.cmake")
configure_with() {  # a LibTorch that says it is of this version
  local fake=$work/torch-$1 parts
  mkdir -p "$fake/lib" "$fake/include/ATen" "$fake/include/torch/csrc/api/include"
  touch "$fake/lib/libtorch_cpu.so" "$fake/lib/libc10.so" "$fake/include/ATen/ATen.h"
  IFS=. read -ra parts <<<"$1"
  printf '#define TORCH_VERSION_%s %s\n' MAJOR "${parts[0]}" MINOR "${parts[1]}" PATCH "${parts[2]}" >"$fake/include/torch/version.h"
  # Configured already, so that it looks for no compiler again.
  cmake -S "$source" -B "$work/build" -DACCELERATE_TORCH_DIR="$fake" >"$work/log" 2>&1
}
if [ "${1:-}" != --with-torch ]; then
  configure_with "$built.99" || { cat "$work/log"; exit 1; }
  if configure_with "${built%.*}.99.0" || ! tr -s ' \n' ' ' <"$work/log" | grep -q "was built with LibTorch $built and works with no other"; then
    cat "$work/log"
    echo "a LibTorch ${built%.*}.99.0 is taken for a package that was built with $built"
    exit 1
  fi
fi

# Beside the headers lies a list of the entry points.
for header in "$work"/prefix/include/accelerate/*.h; do
  grep -q "^| \`accelerate/${header##*/}\` |" "$work/prefix/include/accelerate/README.md" || {
    echo "README.md beside the installed headers does not list ${header##*/}"
    exit 1
  }
done

# The installed library alone must be enough: no package but LibTorch, nothing of CUDA linked.
needed=$(readelf -d "$work"/prefix/lib/libaccelerate.so | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p')
for library in $needed; do
  case $library in
    libtorch_cpu.so | libc10.so | libstdc++.so.* | libm.so.* | libgcc_s.so.* | libc.so.* | ld-linux*) ;;
    libpthread.so.* | libdl.so.* | libasan.so.* | libubsan.so.* | libtsan.so.*) ;;
    *) echo "libaccelerate.so needs $library, which a machine with LibTorch may not have"; exit 1 ;;
  esac
done
# The commands run from where they were installed; `accelerate` without LibTorch.
"$work"/prefix/bin/accelerate --help >"$work/help"
"$work"/prefix/bin/accelerate-torch --help >>"$work/help"
if readelf -d "$work"/prefix/bin/accelerate | grep -q 'NEEDED.*torch'; then
  echo "accelerate links LibTorch, so it starts slowly"
  exit 1
fi
export OMP_NUM_THREADS=1
"$work/build/consumer"
"$work"/prefix/bin/accelerate launch --cpu --num_processes 2 "$work/build/consumer" >"$work/out" 2>&1 || { cat "$work/out"; exit 1; }
grep '^2 processes' "$work/out"
HF_HOME=$work "$work"/prefix/bin/accelerate test >"$work/out" 2>&1 || { cat "$work/out"; exit 1; }
# Without CMake: pkg-config tells a compiler all that it needs, and the program finds its libraries.
if [ "${1:-}" = --with-torch ]; then
  :
elif command -v pkg-config >/dev/null; then
  export PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig
  compiler=(c++)
  command -v ccache >/dev/null && compiler=(ccache c++)
  # shellcheck disable=SC2046  # one word per flag
  "${compiler[@]}" $(pkg-config --cflags accelerate) -c "$source/pkg_config.cpp" -o "$work/pkg_config.o"
  # shellcheck disable=SC2046
  c++ "$work/pkg_config.o" $(pkg-config --libs accelerate) -o "$work/pkg_config"
  env -u LD_LIBRARY_PATH "$work/pkg_config" "$(pkg-config --modversion accelerate)"
else
  echo "pkg-config is not installed: accelerate.pc is not tested"
fi
if [ -x "$work/build/consumer_of_both" ]; then
  # Linking all of LibTorch brings in CUDA libraries, which a LibTorch set up for the CPU does not have.
  missing=$(ldd "$work/build/consumer_of_both" | sed -n 's/^[[:space:]]*\(.*\) => not found/\1/p' | sort -u | paste -sd ' ')
  if [ -n "$missing" ]; then
    echo "linked against all of LibTorch, not run: this machine has no $missing"
  else
    "$work/build/consumer_of_both"
  fi
fi
