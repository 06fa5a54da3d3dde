// A warp's lanes, and sums over them.

#pragma once

constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xffffffffu;

// The sum over all lanes, in every lane.
__device__ __forceinline__ float warp_sum(float sum) {
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
    return sum;
}
