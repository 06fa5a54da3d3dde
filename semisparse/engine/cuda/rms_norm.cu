// out[m, :] = rms_norm(x[m, :] + delta[m, :]) * weight, and sum[m, :] = x[m, :] + delta[m, :]: a decoder layer's residual addition
// with the norm that follows.
//
// Grid: a CTA per row. Shared memory: the row in float32, then a word per warp. The sum, the normalised row and the result are rounded
// to SCALAR, as transformers rounds them. The kernel is bound by latency for few rows, by memory for many.
//
// Compiled for SCALAR.

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"

extern __shared__ float shared[];

__device__ __forceinline__ SCALAR rounded(float value) {
    SCALAR result;
    store(&result, value);
    return result;
}

extern "C" __global__ void __launch_bounds__(1024) semisparse_engine_rms_norm(
    const SCALAR* x,       // [m, columns]
    const SCALAR* delta,   // [m, columns] or null
    const SCALAR* weight,  // [columns]
    SCALAR* sum,           // [m, columns]; not written without delta
    SCALAR* out,           // [m, columns]
    int columns, float epsilon
) {
    const long long row = static_cast<long long>(blockIdx.x) * columns;
    float* of_warps = shared + columns;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    float squares = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float value = to_float(x[row + i]);
        if (delta) {
            const SCALAR total = rounded(value + to_float(delta[row + i]));
            sum[row + i] = total;
            value = to_float(total);
        }
        shared[i] = value;
        squares += value * value;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) squares += of_warps[warp];
    const float scale = rsqrtf(squares / columns + epsilon);
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        store(out + row + i, to_float(weight[i]) * to_float(rounded(shared[i] * scale)));
}
