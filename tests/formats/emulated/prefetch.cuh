// Stands in for the shared prefetch.cuh.

#pragma once

#include "machine.cuh"
#include "word.cuh"

inline void prefetch_line(const void*) {}

// The worst that it may be.
inline Word hint_of(const void*) { return 0xfffffff7; }

inline void prefetch_lines(const void* place, Word bytes) {
    if (reinterpret_cast<uintptr_t>(place) % 16) fail("a prefetch is not aligned");
    if (bytes % 16) fail("a prefetch's length is not aligned");
}
