// Prefetching weights to L2 before griddepcontrol.wait, while the preceding kernel still runs. It reads nothing into registers or
// shared memory, so it is harmless even where that kernel writes the weights.

#pragma once

#include "ptx/cp_async_bulk.cuh"

constexpr int kPrefetchBytes = 4096;  // of one instruction

// `threads` threads prefetch `bytes` from `from` on, without what is left of the last 16; this is thread `thread`.
__device__ __forceinline__ void prefetch_L2(const void* from, long long bytes, int thread, int threads) {
    const char* begin = reinterpret_cast<const char*>(reinterpret_cast<unsigned long long>(from) & ~15ull);
    for (long long at = static_cast<long long>(thread) * kPrefetchBytes; at < bytes; at += threads * kPrefetchBytes) {
        const long long left = bytes - at;
        const Word piece = static_cast<Word>(left < kPrefetchBytes ? left : kPrefetchBytes) & ~15u;
        if (piece) cp_async_bulk_prefetch_L2(begin + at, piece);
    }
}

// The threads of the CTA prefetch them.
__device__ __forceinline__ void prefetch_L2(const void* from, long long bytes) {
    prefetch_L2(from, bytes, threadIdx.x, blockDim.x);
}
