// What the warps of this format's kernels do beside the shared primitives.

#pragma once

#include "mma.cuh"
#include "scalars.cuh"

// Whether this warp is the last of others + 1 to come here; what all of them wrote before is then to be seen. Leaves 0.
__device__ __forceinline__ bool is_last(int* arrivals, int others) {
    int before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
        if (before == others) *arrivals = 0;
    }
    return __shfl_sync(0xffffffffu, before, 0) == others;
}

// Keeps a number that is used in a loop from being made anew at each use: the assembler cannot see through a shuffle.
__device__ __forceinline__ void keep_in_register(Word& value) {
    value = __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}
