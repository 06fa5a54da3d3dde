// y[m] = scale * round(x[m] / scale), scale = max |x[m]| / 127: each token as int8 would keep it, in x's own type, for products
// that take no integers. A thread block a token, which is read twice, the second time from cache.
//
// Macro: SCALAR (type of x and y).

#include "quantise.cuh"
#include "types.cuh"

namespace {

constexpr float kLargest = 127.0f;

__device__ __forceinline__ float largest_of(const SCALAR* x, int columns) {
    unsigned int largest = 0;
#pragma unroll 4
    for (int column = threadIdx.x; column < columns; column += blockDim.x)
        largest = max(largest, abs_bits(to_float(x[column])));
    return cta_reduce_max(largest);
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
