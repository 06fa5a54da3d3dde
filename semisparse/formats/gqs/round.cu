// y[m] = scale * round(x[m] / scale), scale = max |x[m]| / 127: each token as int8 would keep it, in x's own type, for products
// that take no integers. A thread block a token, which is read twice, the second time from cache.
//
// Macro: SCALAR (type of x and y).

#include "scalars.cuh"

namespace {

constexpr int kWarp = 32, kMostWarps = 32;
constexpr float kLargest = 127.0f, kFloatMax = 3.4028234663852886e38f;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even

// Magnitudes by their bits, which order as they do, with NaN above all: fmaxf would leave it out.
__device__ __forceinline__ float largest_of(const SCALAR* x, int columns) {
    __shared__ unsigned int of_warps[kMostWarps];
    unsigned int largest = 0;
#pragma unroll 4
    for (int column = threadIdx.x; column < columns; column += blockDim.x)
        largest = max(largest, __float_as_uint(fabsf(to_float(x[column]))));
#pragma unroll
    for (int step = kWarp / 2; step; step /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = largest;
    __syncthreads();
    largest = of_warps[0];
    for (int warp = 1; warp < blockDim.x / kWarp; ++warp) largest = max(largest, of_warps[warp]);
    return __uint_as_float(largest);
}

}  // namespace

extern "C" __global__ void semisparse_gqs_round(const SCALAR* x, SCALAR* y, int columns) {
    const long long start = static_cast<long long>(blockIdx.x) * columns;
    float largest = largest_of(x + start, columns);
    largest = largest == 0 ? kLargest : largest;
    const float scale = __fdiv_rn(largest, kLargest), inverse = fminf(__fdiv_rn(kLargest, largest), kFloatMax);
#pragma unroll 4
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        // Products are rounded before sums, as torch does.
        const float code = __fadd_rn(__fadd_rn(__fmul_rn(to_float(x[start + column]), inverse), kMagic), -kMagic);
        store(y + start + column, __fmul_rn(code, scale));
    }
}
