// Quantises each row to 8 bits at its own scale, as quant/symmetric.py does: codes = x * (kLargest / amax), scales = amax / kLargest,
// where amax is the row's largest magnitude.
//
// Grid: a CTA per row, of 32 to 512 threads with VECTOR values each at a time. Shared memory: 128 bytes, for the reduction. x is
// read twice, the second time from cache. Bound: memory for many rows.
//
// Macros: SCALAR (type of x); FP8 (0: codes are int8, 1: fp8 e4m3); VECTOR (values per load: columns is a multiple of it, and x
// is aligned to it).

#include "ptx/cvt.cuh"
#include "ptx/griddepcontrol.cuh"
#include "quantise.cuh"
#include "types.cuh"
#include "vector.cuh"

constexpr float kLargest = FP8 ? 448.0f : 127.0f;

struct alignas(VECTOR) Codes {
    unsigned char values[VECTOR];
};

// The product is rounded before the addition, as torch does.
__device__ __forceinline__ unsigned char code_of(float value, float inverse) {
    const float scaled = __fmul_rn(value, inverse);
#if FP8
    return cvt_e4m3x2(scaled, 0.0f);
#else
    return __float_as_uint(__fadd_rn(scaled, kMagic));
#endif
}

extern "C" __global__ void semisparse_quantise_rows(
    const SCALAR* x,  // [rows, columns]
    Codes* codes,     // [rows, columns]
    float* scales,    // [rows]
    int columns
) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int units = columns / VECTOR;
    const long long start = static_cast<long long>(blockIdx.x) * units;
    const SCALAR* row = x + start * VECTOR;
    unsigned int bits = 0;
    for (int i = threadIdx.x; i < units; i += blockDim.x) {
        const Unit unit = load_unit(row, i);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) bits = max(bits, abs_bits(unit.at(j)));
    }
    const float amax = cta_reduce_max(bits), largest = amax == 0 ? kLargest : amax;
    const float inverse = fminf(__fdiv_rn(kLargest, largest), kFloatMax);
    if (threadIdx.x == 0) scales[blockIdx.x] = __fdiv_rn(largest, kLargest);
    for (int i = threadIdx.x; i < units; i += blockDim.x) {
        const Unit unit = load_unit(row, i);
        Codes rounded;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) rounded.values[j] = code_of(unit.at(j), inverse);
        codes[start + i] = rounded;
    }
}
