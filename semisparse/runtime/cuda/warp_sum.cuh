// The sum over the lanes of a warp.

#pragma once

// Returns the sum over all lanes, in every lane. All of them call it.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}
