// out[m, :] = rms_norm(x[m, :] + delta[m, :]) * weight, and sum[m, :] = x[m, :] + delta[m, :]: a decoder layer's residual
// addition and the norm that follows.
//
// Grid: a CTA per row. CTA: up to 1,024 threads. Shared memory: the row and the weight, alternating in units of VECTOR values.
// The sum, the normalised row and the result are rounded to SCALAR, as transformers rounds them. Bound: latency for few rows,
// memory for many.
//
// Compiled with SCALAR and VECTOR (values per load; columns are a multiple of it, and every row is aligned to it).

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"
#include "vector.cuh"

struct Kept {
    Unit row, weight;
};

extern "C" __global__ void __launch_bounds__(1024) semisparse_engine_rms_norm(
    const SCALAR* x,       // [m, columns]
    const SCALAR* delta,   // [m, columns] or null
    const SCALAR* weight,  // [columns]
    SCALAR* sum,           // [m, columns]; not written without delta
    SCALAR* out,           // [m, columns]
    int columns, float epsilon
) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float warp_squares[32];
    Kept* kept = reinterpret_cast<Kept*>(shared);
    const long long row = static_cast<long long>(blockIdx.x) * columns;
    const int units = columns / VECTOR;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    float squares = 0;
    for (int i = threadIdx.x; i < units; i += blockDim.x) {
        Unit value = load_unit(x + row, i), added;
        if (delta) added = load_unit(delta + row, i);
        kept[i].weight = load_unit(weight, i);
        if (delta) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) value.set(j, value.at(j) + added.at(j));
            store_unit(sum + row, i, value);
        }
        kept[i].row = value;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) squares += value.at(j) * value.at(j);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    if (threadIdx.x % 32 == 0) warp_squares[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) squares += warp_squares[warp];
    const float scale = rsqrtf(squares / columns + epsilon);
    for (int i = threadIdx.x; i < units; i += blockDim.x) {
        Unit value = kept[i].row;
        const Unit factor = kept[i].weight;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) value.set(j, value.at(j) * scale);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) value.set(j, factor.at(j) * value.at(j));
        store_unit(out + row, i, value);
    }
}
