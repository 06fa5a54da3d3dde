// Stands in for ptx/global.cuh.

#pragma once

#include "../machine.cuh"

inline uint4 ld_global_nc_v4(const void* from) {
    check_aligned(from, 16);
    return *static_cast<const uint4*>(from);
}

inline void prefetch_global_L2(const void*) {}

// The worst value that a thread may see if it reads too early.
inline Word ld_relaxed_gpu(const void*) { return 0xfffffff7; }

// Runs the other threads first, so that a loop that polls does not block them.
inline int ld_acquire_gpu(const int* from) {
    pause_thread();
    return *from;
}

inline void red_release_gpu_increment(int* counter) { ++*counter, ++progress; }
inline int atom_acq_rel_gpu_increment(int* counter) { ++progress; return (*counter)++; }
