// Reading memory once, and a thread's asynchronous copies to shared memory.

#pragma once

#include "word.cuh"

__device__ __forceinline__ Word shared_address(const void* place) {
    return static_cast<Word>(__cvta_generic_to_shared(place));
}

// 16 bytes that are read once: they take no place in L1.
__device__ __forceinline__ uint4 read_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Starts to copy 16 bytes, of which `bytes` are read and the others zero.
__device__ __forceinline__ void copy_async(Word to, const void* from, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(bytes) : "memory");
}

// Starts to copy 4 or 8 bytes.
template <int bytes>
__device__ __forceinline__ void copy_few_async(Word to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(to), "l"(from), "n"(bytes) : "memory");
}

// Closes a group of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits for all but the `open` groups of copies that this thread closed last.
template <int open>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(open) : "memory"); }
