# Installation: commands, headers, libraries and package files, for find_package(accelerate) and pkg-config.
include_guard(GLOBAL)

# What `make install` has to build.
add_custom_target(accelerate_installed DEPENDS
  accelerate accelerate_cli accelerate_torch_cli accelerate_man_pages)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/accelerate)
set_target_properties(accelerate PROPERTIES
  INSTALL_RPATH "\$ORIGIN;${ACCELERATE_TORCH_FOUND}/lib")

install(TARGETS accelerate EXPORT accelerate_targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
# The commands: `accelerate` finds accelerate-torch beside itself, and that finds the library.
file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
set_target_properties(accelerate_torch_cli PROPERTIES
  INSTALL_RPATH "\$ORIGIN/${bin_to_lib};${ACCELERATE_TORCH_FOUND}/lib")
install(TARGETS accelerate_cli accelerate_torch_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
# Python's names for single commands.
foreach(command config launch estimate-memory merge-weights)
  install(CODE "file(CREATE_LINK accelerate
    \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/accelerate-${command}\" SYMBOLIC)")
endforeach()
# A build of single targets has none.
install(DIRECTORY ${PROJECT_BINARY_DIR}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 OPTIONAL)
if(TARGET accelerate_cuda)
  # Opened at run time from beside libaccelerate.so; no program links it.
  add_dependencies(accelerate_installed accelerate_cuda)
  install(TARGETS accelerate_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/accelerate ${PROJECT_BINARY_DIR}/include/accelerate
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/docs/headers.md
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/accelerate RENAME README.md)

install(EXPORT accelerate_targets NAMESPACE accelerate:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/accelerateConfig.cmake.in
  ${PROJECT_BINARY_DIR}/accelerateConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/accelerateConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/accelerateConfig.cmake
  ${PROJECT_BINARY_DIR}/accelerateConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/AccelerateTorch.cmake
  DESTINATION ${package_dir})

# For other build systems. It finds its prefix from where it lies, so the prefix can be moved.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_to_prefix ${CMAKE_INSTALL_PREFIX}/${pc_dir} ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/accelerate.pc.in ${PROJECT_BINARY_DIR}/accelerate.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/accelerate.pc DESTINATION ${pc_dir})
