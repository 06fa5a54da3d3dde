// Having L2 bring memory. No answer comes of that, so whoever still writes it may.

#pragma once

#include "word.cuh"

__device__ __forceinline__ void prefetch_line(const void* place) { asm volatile("prefetch.global.L2 [%0];" : : "l"(place)); }

// What a place holds, or held: only good for saying what L2 shall bring.
__device__ __forceinline__ Word hint_of(const void* place) {
    Word value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}

// A multiple of 16 bytes from a multiple of 16 on (Hopper and later).
__device__ __forceinline__ void prefetch_lines(const void* place, Word bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(place), "r"(bytes));
#endif
}
