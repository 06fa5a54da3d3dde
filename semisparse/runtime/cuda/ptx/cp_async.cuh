// cp.async: a thread's asynchronous copies from global to shared memory (Ampere and later).

#pragma once

#include "word.cuh"

// Copies 16 bytes, bypassing L1: `source_bytes` from the source, then zeros.
__device__ __forceinline__ void cp_async_16(Word to, const void* from, int source_bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(source_bytes) : "memory");
}

// Copies 16 bytes at a compile-time offset from both addresses. As an immediate it costs no 64-bit addition.
template <int offset>
__device__ __forceinline__ void cp_async_16_at(Word to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0+%2], [%1+%2], 16;" : : "r"(to), "l"(from), "n"(offset) : "memory");
}

// Copies 16 bytes, bypassing L1, and prefetches their 128-byte line to L2: other threads read the rest soon.
__device__ __forceinline__ void cp_async_16_prefetch_128(Word to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}

// Copies 4 or 8 bytes, through L1.
template <int bytes>
__device__ __forceinline__ void cp_async(Word to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(to), "l"(from), "n"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits for all but this thread's `pending` most recent groups.
template <int pending>
__device__ __forceinline__ void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory"); }

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" : : : "memory"); }

// Arrives on an mbarrier once this thread's copies so far have completed; the arrival is one of the mbarrier's expected count.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(Word mbarrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(mbarrier) : "memory");
}

// Makes generic-proxy writes to shared memory visible to the async proxy (wgmma and bulk copies).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
