// bar: the CTA's named barriers 0 to 15; __syncthreads is number 0.

#pragma once

// Arrives, and waits until `threads` threads have arrived.
template <int threads>
__device__ __forceinline__ void bar_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" : : "r"(barrier), "n"(threads) : "memory");
}

// Arrives without waiting.
template <int threads>
__device__ __forceinline__ void bar_arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "n"(threads) : "memory");
}
