// src/core/for_each_processor.h - functions that are compiled for several generations of
// processors.
#pragma once

// In front of a function with loops: it is compiled for each, and the first call picks one.
// Sanitizers are not set up yet when that happens. Only what is inlined into such a function is
// compiled for its processor.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define ACCELERATE_FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define ACCELERATE_FOR_EACH_PROCESSOR
#endif
