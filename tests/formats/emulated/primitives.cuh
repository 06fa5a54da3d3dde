// Stands in for gqs's primitives.cuh.

#pragma once

#include "mma.cuh"
#include "scalars.cuh"

inline void keep_in_register(Word&) {}

inline bool is_last(int* arrivals, int others) {
    __syncwarp();
    int before = 0;
    if (threadIdx.x % 32 == 0) {
        before = std::exchange(*arrivals, *arrivals + 1);
        if (before == others) *arrivals = 0;
    }
    return __shfl_sync(~0u, before, 0) == others;
}
