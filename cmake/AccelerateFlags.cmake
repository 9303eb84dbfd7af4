# Flags of our own translation units. They live in one interface target, because a precompiled
# header is only reused by targets with the very same flags.
include_guard(GLOBAL)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()

# The one header that CMake writes; the others are in include/.
configure_file(${PROJECT_SOURCE_DIR}/cmake/version.h.in ${PROJECT_BINARY_DIR}/include/accelerate/version.h @ONLY)

add_library(accelerate_flags INTERFACE)
target_compile_features(accelerate_flags INTERFACE cxx_std_20)
target_compile_options(accelerate_flags INTERFACE
  -Wall -Wextra -fvisibility=hidden -fvisibility-inlines-hidden -fPIC
  # The same source gives the same object in any clone, so that ccache serves all of them.
  -ffile-prefix-map=${PROJECT_SOURCE_DIR}=. -ffile-prefix-map=${PROJECT_BINARY_DIR}=build)
target_compile_definitions(accelerate_flags INTERFACE NDEBUG)
target_include_directories(accelerate_flags INTERFACE
  ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include ${PROJECT_SOURCE_DIR}/src)
if(ACCELERATE_WERROR)
  target_compile_options(accelerate_flags INTERFACE -Werror)
endif()
if(ACCELERATE_SANITIZE)
  target_compile_options(accelerate_flags INTERFACE
    -fsanitize=${ACCELERATE_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(accelerate_flags INTERFACE -fsanitize=${ACCELERATE_SANITIZE})
  # With instrumentation GCC loses track of what is set and warns about LibTorch's own classes.
  target_compile_options(accelerate_flags INTERFACE
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)

find_program(ACCELERATE_CCACHE ccache)
find_program(ACCELERATE_MOLD mold)
mark_as_advanced(ACCELERATE_CCACHE ACCELERATE_MOLD)
if(ACCELERATE_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 CCACHE_PCH_EXTSUM=1
    ${ACCELERATE_CCACHE})
  if(ACCELERATE_PCH)
    target_compile_options(accelerate_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>
      # A precompiled header from the cache is older than the headers of this clone.
      "$<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>")
  endif()
endif()
if(ACCELERATE_MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT ACCELERATE_SANITIZE)
  target_link_options(accelerate_flags INTERFACE -fuse-ld=mold)
endif()

# Several sources of a target in one translation unit: what LibTorch's templates cost is then paid once for them.
if(ACCELERATE_UNITY)
  set(CMAKE_UNITY_BUILD ON)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 8)
  # A class of one source that holds what is local to it: here "its" file is an included one.
  target_compile_options(accelerate_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endif()

# accelerate_precompiled(<target> <headers...>): headers of LibTorch, compiled once for all targets that reuse <target>.
function(accelerate_precompiled target)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/${target}.cpp CONTENT "// holds precompiled headers of LibTorch\n")
  add_library(${target} OBJECT ${PROJECT_BINARY_DIR}/${target}.cpp)
  target_link_libraries(${target} PRIVATE accelerate_flags accelerate::torch)
  target_precompile_headers(${target} PRIVATE ${ARGN})
  # GCC writes other bytes each time it compiles the header. ccache takes these sums instead (CCACHE_PCH_EXTSUM), so that
  # all clones share their objects; flags and folders it knows from the command.
  file(SHA256 ${ACCELERATE_TORCH_FOUND}/include/ATen/core/TensorBody.h torch_sum)
  foreach(extension gch pch)
    file(WRITE ${PROJECT_BINARY_DIR}/CMakeFiles/${target}.dir/cmake_pch.hxx.${extension}.sum
      "${ACCELERATE_TORCH_VERSION} ${torch_sum} ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} ${ARGN}\n")
  endforeach()
endfunction()
if(ACCELERATE_PCH)
  accelerate_precompiled(accelerate_library_pch <ATen/ATen.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp>
    <torch/nn/module.h> <torch/optim/optimizer.h>)
  accelerate_precompiled(accelerate_program_pch <torch/torch.h>)
endif()

# accelerate_uses_torch(<target> [LIBRARY]): flags, LibTorch and the precompiled headers of a program, or of a part of
# libaccelerate.so, which includes less.
function(accelerate_uses_torch target)
  cmake_parse_arguments(arg "LIBRARY" "" "" ${ARGN})
  target_link_libraries(${target} PRIVATE accelerate_flags accelerate::torch)
  if(ACCELERATE_PCH AND arg_LIBRARY)
    target_precompile_headers(${target} REUSE_FROM accelerate_library_pch)
  elseif(ACCELERATE_PCH)
    target_precompile_headers(${target} REUSE_FROM accelerate_program_pch)
  endif()
endfunction()

# accelerate_without_torch(<sources...>): they include nothing of LibTorch, and compile in a tenth of the time alone.
function(accelerate_without_torch)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
