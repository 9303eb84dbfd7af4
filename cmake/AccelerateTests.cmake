# What every test has: a label, a limit, the settings of sanitizers and the places it takes.
#
# `make test` gives ctest two places per core: four on the smallest machine. A test takes two of them: also one of several
# processes, which keeps little more than a core busy, since it mostly starts them. BUSY takes three: several cores, or a
# clock is looked at. What WAITS more than it works takes one. Both start early, so that they run side by side.
#
# Of the address sanitizer's settings the last two are for CUDA, and for a library that a test preloads.
set(ACCELERATE_SANITIZER_ENVIRONMENT
  "ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:handle_sigbus=0:protect_shadow_gap=0:verify_asan_link_order=0"
  "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1"
  "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/support/tsan.supp:halt_on_error=1")

# accelerate_test_properties(<name> <unit|multi|slow|cuda|interop> [BUSY|WAITS] [TIMEOUT <seconds>] [ENVIRONMENT <A=1>...])
function(accelerate_test_properties name label)
  cmake_parse_arguments(arg "BUSY;WAITS" "TIMEOUT" "ENVIRONMENT" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 900)
  endif()
  set(places 2)
  if(arg_BUSY)
    set(places 3)
    set_tests_properties(${name} PROPERTIES COST 200)
  elseif(arg_WAITS)
    set(places 1)
    set_tests_properties(${name} PROPERTIES COST 100)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${arg_TIMEOUT} PROCESSORS ${places}
    ENVIRONMENT "${ACCELERATE_SANITIZER_ENVIRONMENT};${arg_ENVIRONMENT}")
endfunction()
