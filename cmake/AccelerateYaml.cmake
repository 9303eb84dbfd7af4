# libyaml, statically: the parser that Python's yaml uses too. (Debian's libyaml-cpp.a is not
# position-independent and cannot go into a shared library.)
include_guard(GLOBAL)

find_path(ACCELERATE_YAML_INCLUDE_DIR yaml.h)
find_library(ACCELERATE_YAML_LIBRARY NAMES libyaml.a yaml)
mark_as_advanced(ACCELERATE_YAML_INCLUDE_DIR ACCELERATE_YAML_LIBRARY)
if(NOT ACCELERATE_YAML_INCLUDE_DIR OR NOT ACCELERATE_YAML_LIBRARY)
  message(FATAL_ERROR "libyaml was not found. Debian: apt-get install libyaml-dev, or `make setup`.")
endif()
add_library(accelerate_yaml INTERFACE)
target_include_directories(accelerate_yaml SYSTEM INTERFACE ${ACCELERATE_YAML_INCLUDE_DIR})
target_link_libraries(accelerate_yaml INTERFACE ${ACCELERATE_YAML_LIBRARY})
