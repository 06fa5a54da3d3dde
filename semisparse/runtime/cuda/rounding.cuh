// Rounding a token to 8 bits, by a thread block that finds its scale. Magnitudes are compared by their bits, which order as they
// do, with NaN above all: fmaxf would leave it out.

#pragma once

constexpr int kMostWarps = 32;  // of a block
constexpr float kFloatMax = 3.4028234663852886e38f;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even and leaves the integer in the low bits

__device__ __forceinline__ unsigned int magnitude(float value) { return __float_as_uint(fabsf(value)); }

// The largest of all threads, in every thread.
__device__ __forceinline__ float largest_of_block(unsigned int largest) {
    __shared__ unsigned int of_warps[kMostWarps];
#pragma unroll
    for (int step = 16; step; step /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = of_warps[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) largest = max(largest, of_warps[warp]);
    return __uint_as_float(largest);
}
