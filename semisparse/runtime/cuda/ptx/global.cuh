// Global memory: cache hints, and the loads and atomics by which CTAs signal one another.

#pragma once

#include "word.cuh"

// ld.global.nc.L1::no_allocate: 16 bytes that are read once.
__device__ __forceinline__ uint4 ld_global_nc_v4(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

__device__ __forceinline__ void prefetch_global_L2(const void* from) { asm volatile("prefetch.global.L2 [%0];" : : "l"(from)); }

// ld.relaxed.gpu: reads an address that a preceding kernel may still write. The value may be stale: use it only to prefetch.
__device__ __forceinline__ Word ld_relaxed_gpu(const void* from) {
    Word value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ int ld_acquire_gpu(const int* from) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Adds 1 once this thread's writes, and those that a barrier ordered before it, are visible to the GPU.
__device__ __forceinline__ void red_release_gpu_increment(int* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" : : "l"(counter) : "memory");
}

// Adds 1 and returns the value before, with acquire and release order.
__device__ __forceinline__ int atom_acq_rel_gpu_increment(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
