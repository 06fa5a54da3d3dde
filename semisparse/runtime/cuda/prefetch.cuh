// Prefetching weights to L2 before griddepcontrol.wait, while the preceding kernel still runs. It reads nothing into registers or
// shared memory, so it is harmless even where that kernel writes the weights.

#pragma once

#include "ptx/cp_async_bulk.cuh"

constexpr int kPrefetchBytes = 4096;  // of one instruction

// The threads of the CTA prefetch `bytes` from `from` on, without what is left of the last 16.
__device__ __forceinline__ void prefetch_L2(const void* from, long long bytes) {
    const char* begin = reinterpret_cast<const char*>(reinterpret_cast<unsigned long long>(from) & ~15ull);
    for (long long at = static_cast<long long>(threadIdx.x) * kPrefetchBytes; at < bytes; at += blockDim.x * kPrefetchBytes) {
        const long long left = bytes - at;
        const Word piece = static_cast<Word>(left < kPrefetchBytes ? left : kPrefetchBytes) & ~15u;
        if (piece) cp_async_bulk_prefetch_L2(begin + at, piece);
    }
}
