# What every test has: a label, a limit, the settings of sanitizers and the places it takes.
#
# `make test` gives ctest two places per core: four on the smallest machine. A test of one process takes two of them, one
# of several processes three. One that waits more than it works takes one and starts early, so that it runs beside others.
set(ACCELERATE_SANITIZER_ENVIRONMENT
  "ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0"
  "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1"
  "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/support/tsan.supp:halt_on_error=1")

# accelerate_test_properties(<name> <unit|multi|slow|cuda|interop> [WAITS] [TIMEOUT <seconds>] [ENVIRONMENT <A=1>...])
function(accelerate_test_properties name label)
  cmake_parse_arguments(arg "WAITS" "TIMEOUT" "ENVIRONMENT" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 900)
  endif()
  set(places 3)
  if(arg_WAITS)
    set(places 1)
    set_tests_properties(${name} PROPERTIES COST 100)
  elseif(label STREQUAL "unit")
    set(places 2)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${arg_TIMEOUT} PROCESSORS ${places}
    ENVIRONMENT "${ACCELERATE_SANITIZER_ENVIRONMENT};${arg_ENVIRONMENT}")
endfunction()
