# Every public header compiles alone: one tiny translation unit each, without the precompiled header. They take a quarter
# of an hour, so no build has them: tools/tidy.sh compiles those that have changed, `make tidy` all.
# Entry points and their parts; what is in detail/ belongs to those.
file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include/accelerate
  ${PROJECT_SOURCE_DIR}/include/accelerate/*.h)
list(FILTER headers EXCLUDE REGEX "^detail/")
list(APPEND headers version.h)
set(units "")
foreach(name IN LISTS headers)
  if(name STREQUAL "mpi.h")  # needs MPI's own header; its test compiles it
    continue()
  endif()
  set(unit ${CMAKE_CURRENT_BINARY_DIR}/headers/${name}.cpp)
  file(CONFIGURE OUTPUT ${unit} CONTENT "#include \"accelerate/@name@\"  // IWYU pragma: keep\n" @ONLY)
  list(APPEND units ${unit})
endforeach()
add_library(accelerate_headers OBJECT EXCLUDE_FROM_ALL ${units})
set_target_properties(accelerate_headers PROPERTIES UNITY_BUILD OFF)
target_link_libraries(accelerate_headers PRIVATE accelerate_flags accelerate::torch)
target_compile_options(accelerate_headers PRIVATE -O0 -g0)
