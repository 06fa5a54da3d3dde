// Having memory brought to L2.

#pragma once

#include "word.cuh"

constexpr int kLine = 128;  // bytes

// One thread's request for some units of 16 bytes, on Hopper and later; none where there are no bytes.
__device__ __forceinline__ void prefetch_bulk(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    if (bytes > 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes) : "memory");
#endif
}

// The line of a place.
__device__ __forceinline__ void prefetch_line(const void* place) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" : : "l"(place) : "memory");
#endif
}
