# Finds LibTorch and defines accelerate::torch, without find_package(Torch).
#
# find_package(Torch) of a CUDA build demands nvcc and takes 7 s. All we need is two libraries and
# their headers, so we make the imported target ourselves; a program may still call
# find_package(Torch), before or after us. Looked at, in this order:
#   1. ACCELERATE_TORCH_DIR    the folder that holds include/ and lib/
#   2. find_package(Torch) that has already run (TORCH_INSTALL_PREFIX)
#   3. Torch_DIR, CMAKE_PREFIX_PATH
#   4. where this package was built against (installed packages only)
#   5. the torch package of python3
#
# Inside find_package(accelerate) what is wrong makes the package not found; elsewhere it is an error.

function(accelerate_find_torch result)
  set(candidates "")
  if(ACCELERATE_TORCH_DIR)
    list(APPEND candidates "${ACCELERATE_TORCH_DIR}")
  endif()
  if(TORCH_INSTALL_PREFIX)
    list(APPEND candidates "${TORCH_INSTALL_PREFIX}")
  endif()
  if(Torch_DIR)
    get_filename_component(from_config "${Torch_DIR}/../../.." ABSOLUTE)
    list(APPEND candidates "${from_config}")
  endif()
  set(prefixes ${CMAKE_PREFIX_PATH})
  if(DEFINED ENV{CMAKE_PREFIX_PATH})
    string(REPLACE ":" ";" from_environment "$ENV{CMAKE_PREFIX_PATH}")
    list(APPEND prefixes ${from_environment})
  endif()
  foreach(prefix IN LISTS prefixes)
    # `torch.utils.cmake_prefix_path` is <torch>/share/cmake.
    get_filename_component(above "${prefix}/../.." ABSOLUTE)
    list(APPEND candidates "${prefix}" "${prefix}/torch" "${prefix}/libtorch" "${above}")
  endforeach()
  if(ACCELERATE_BUILT_WITH_TORCH)
    list(APPEND candidates "${ACCELERATE_BUILT_WITH_TORCH}")
  endif()
  foreach(candidate IN LISTS candidates)
    if(EXISTS "${candidate}/lib/libtorch_cpu.so" AND EXISTS "${candidate}/include/ATen/ATen.h")
      set(${result} "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endforeach()

  find_program(ACCELERATE_PYTHON3 python3)
  mark_as_advanced(ACCELERATE_PYTHON3)
  if(ACCELERATE_PYTHON3)
    # find_spec reads no code of torch: importing it would take seconds.
    execute_process(
      COMMAND ${ACCELERATE_PYTHON3} -c
        "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE candidate OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(candidate AND EXISTS "${candidate}/lib/libtorch_cpu.so")
      set(${result} "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endif()
  set(${result} "" PARENT_SCOPE)
endfunction()

# A macro, so that it returns from this file.
macro(accelerate_torch_is_unfit message)
  if(CMAKE_FIND_PACKAGE_NAME)
    set(${CMAKE_FIND_PACKAGE_NAME}_FOUND FALSE)
    set(${CMAKE_FIND_PACKAGE_NAME}_NOT_FOUND_MESSAGE "${message}")
    return()
  endif()
  message(FATAL_ERROR "${message}")
endmacro()

if(NOT TARGET accelerate::torch)
  accelerate_find_torch(ACCELERATE_TORCH_FOUND)
  if(NOT ACCELERATE_TORCH_FOUND)
    accelerate_torch_is_unfit("LibTorch was not found. Run `make setup`, or give the folder that \
holds its include/ and lib/ as -DACCELERATE_TORCH_DIR=..., -DTorch_DIR=... or in CMAKE_PREFIX_PATH.")
  endif()

  set(ACCELERATE_TORCH_VERSION "")
  if(EXISTS "${ACCELERATE_TORCH_FOUND}/include/torch/headeronly/version.h")
    set(version_header "${ACCELERATE_TORCH_FOUND}/include/torch/headeronly/version.h")
  else()
    set(version_header "${ACCELERATE_TORCH_FOUND}/include/torch/version.h")
  endif()
  if(EXISTS "${version_header}")
    foreach(part MAJOR MINOR PATCH)
      file(STRINGS "${version_header}" line REGEX "^#define TORCH_VERSION_${part} ")
      string(REGEX MATCH "[0-9]+" number "${line}")
      list(APPEND ACCELERATE_TORCH_VERSION "${number}")
    endforeach()
    list(JOIN ACCELERATE_TORCH_VERSION "." ACCELERATE_TORCH_VERSION)
  endif()
  # LibTorch keeps no ABI between minor versions: another one would link, or not, and then misbehave.
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" found_minor "${ACCELERATE_TORCH_VERSION}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" built_minor "${ACCELERATE_BUILT_WITH_TORCH_VERSION}")
  if(found_minor AND built_minor AND NOT found_minor STREQUAL built_minor)
    accelerate_torch_is_unfit("This accelerate was built with LibTorch ${built_minor} and works with no \
other; ${ACCELERATE_TORCH_FOUND} is LibTorch ${ACCELERATE_TORCH_VERSION}. Give a LibTorch \
${built_minor} as -DACCELERATE_TORCH_DIR=..., or build accelerate with this one.")
  endif()
  if(ACCELERATE_TORCH_VERSION AND ACCELERATE_TORCH_VERSION VERSION_LESS "2.11.0")
    accelerate_torch_is_unfit("LibTorch ${ACCELERATE_TORCH_VERSION} in ${ACCELERATE_TORCH_FOUND} is \
too old: 2.11 or newer is needed. `make setup` installs one that fits.")
  endif()
  message(STATUS "LibTorch ${ACCELERATE_TORCH_VERSION} in ${ACCELERATE_TORCH_FOUND}")

  add_library(accelerate::c10 SHARED IMPORTED GLOBAL)
  set_target_properties(accelerate::c10 PROPERTIES
    IMPORTED_LOCATION "${ACCELERATE_TORCH_FOUND}/lib/libc10.so")
  add_library(accelerate::torch SHARED IMPORTED GLOBAL)
  set_target_properties(accelerate::torch PROPERTIES
    IMPORTED_LOCATION "${ACCELERATE_TORCH_FOUND}/lib/libtorch_cpu.so"
    IMPORTED_LINK_DEPENDENT_LIBRARIES ""
    INTERFACE_LINK_LIBRARIES accelerate::c10)
  target_include_directories(accelerate::torch SYSTEM INTERFACE
    "${ACCELERATE_TORCH_FOUND}/include"
    "${ACCELERATE_TORCH_FOUND}/include/torch/csrc/api/include")
  # NDEBUG in every configuration: some headers have members that exist only without it, and the
  # released library would disagree with us about the layout of those classes.
  target_compile_definitions(accelerate::torch INTERFACE NDEBUG USE_DISTRIBUTED USE_C10D_GLOO)
  target_compile_features(accelerate::torch INTERFACE cxx_std_20)
  # The wheel's libtorch_cpu.so finds its CUDA companions by its own run path; the linker does not.
  target_link_options(accelerate::torch INTERFACE "LINKER:--allow-shlib-undefined")
endif()
