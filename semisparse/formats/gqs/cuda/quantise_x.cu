// y[m] = scale * round(x[m] / scale), scale = max |x[m]| / 127: each token quantised to int8 and dequantised to x's own type,
// for GEMMs of 16-bit x.
//
// Grid: a CTA per token, of up to 512 threads. Shared memory: 128 bytes, for the reduction. x is read twice, the second time
// from cache. Bound: the launch, some 2 us.
//
// Macro: SCALAR (type of x and y: __half, __nv_bfloat16 or float).

#include "quantise.cuh"
#include "types.cuh"

constexpr float kInt8Max = 127.0f;

extern "C" __global__ void semisparse_gqs_quantise_x(const SCALAR* x, SCALAR* y, int k) {
    const long long start = static_cast<long long>(blockIdx.x) * k;
    unsigned int bits = 0;
#pragma unroll 4
    for (int column = threadIdx.x; column < k; column += blockDim.x) bits = max(bits, abs_bits(to_float(x[start + column])));
    float amax = cta_reduce_max(bits);
    amax = amax == 0 ? kInt8Max : amax;
    const float scale = __fdiv_rn(amax, kInt8Max), inverse = fminf(__fdiv_rn(kInt8Max, amax), kFloatMax);
#pragma unroll 4
    for (int column = threadIdx.x; column < k; column += blockDim.x) {
        // No fused multiply-adds: torch rounds each operation.
        const float code = __fadd_rn(__fadd_rn(__fmul_rn(to_float(x[start + column]), inverse), kMagic), -kMagic);
        store(y + start + column, __fmul_rn(code, scale));
    }
}
