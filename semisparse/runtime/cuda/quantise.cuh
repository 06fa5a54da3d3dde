// Quantising a token to 8 bits with a CTA: the scale follows from the largest magnitude, a CTA-wide reduction. Magnitudes are
// compared as the integers of their bits: the order is the same, with NaN above all; fmaxf would drop a NaN.

#pragma once

#include "types.cuh"

constexpr int kMaxWarps = 32;  // per CTA
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even and leaves the integer in the low bits

__device__ __forceinline__ unsigned int abs_bits(float value) { return __float_as_uint(fabsf(value)); }

// Returns the largest `bits` of all threads, as a float, to every thread.
__device__ __forceinline__ float cta_reduce_max(unsigned int bits) {
    __shared__ unsigned int warp_max[kMaxWarps];
#pragma unroll
    for (int step = 16; step; step /= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = bits;
    __syncthreads();
    bits = warp_max[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) bits = max(bits, warp_max[warp]);
    return __uint_as_float(bits);
}
