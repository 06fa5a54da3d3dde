// out[m, :] = rms_norm(x[m, :] + delta[m, :]) * weight, and sum[m, :] = x[m, :] + delta[m, :]: a decoder layer's residual
// addition and the norm that follows.
//
// Grid: a CTA per row. CTA: up to 1,024 threads. Shared memory: the row and the weight.
// The sum, the normalised row and the result are rounded to SCALAR, as transformers rounds them. Bound: latency for few rows,
// memory for many.
//
// With PERMUTED the result is stored in the order in which a GEMM reads it (expand_gemm/permuted.cuh): rows from m on are zeros, and
// the GEMM's counters are zeroed.
//
// Compiled with SCALAR, VECTOR (values per load; columns are a multiple of it, and every row is aligned to it) and PERMUTED (0 or 1;
// with 1, SCALAR has 16 bits and VECTOR is 8).

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"
#include "vector.cuh"

// Loads the weight to shared memory, behind the row. No kernel writes it, so it is read before griddepcontrol.wait: it comes from
// DRAM, the row from L2.
__device__ __forceinline__ void load_factors(const SCALAR* weight, Unit* kept, int units) {
    for (int i = threadIdx.x; i < units; i += blockDim.x) kept[units + i] = load_unit(weight, i);
}

// Adds delta, if there is one, to a row, stores the sum, and calls put(i, unit) with each unit of the normalised row. The row and the
// weight are in shared memory meanwhile, in twice `units` units; every thread has loaded its units of the weight.
template <typename Put>
__device__ __forceinline__ void normalise(const SCALAR* x, const SCALAR* delta, SCALAR* sum, Unit* kept, int units, int columns,
                                          float epsilon, Put put) {
    __shared__ float warp_squares[32];
    const Unit* factors = kept + units;
    float squares = 0;
    for (int i = threadIdx.x; i < units; i += blockDim.x) {
        Unit value = load_unit(x, i), added;
        if (delta) added = load_unit(delta, i);
        if (delta) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) value.set(j, value.at(j) + added.at(j));
            store_unit(sum, i, value);
        }
        kept[i] = value;
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
        Unit value = kept[i];
        const Unit factor = factors[i];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) value.set(j, value.at(j) * scale);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) value.set(j, factor.at(j) * value.at(j));
        put(i, value);
    }
}

#if PERMUTED

#include "expand_gemm/permuted.cuh"
#include "expand_gemm/start_gemm.cuh"

extern "C" __global__ void __launch_bounds__(1024) semisparse_engine_rms_norm_permuted(
    const SCALAR* x,          // [m, columns]
    const SCALAR* delta,      // [m, columns] or null
    const SCALAR* weight,     // [columns]
    SCALAR* sum,              // [m, columns]; not written without delta
    unsigned char* permuted,  // [gridDim.x / tile_m, 4 * column_tiles, tile_m, 128 bytes]
    int* counters,            // [counter_count]
    int m, int columns, int column_tiles, int tile_m, int block, int counter_count, float epsilon,
    int early                 // as in permute_x.cu
) {
    extern __shared__ __align__(16) unsigned char shared[];
    Unit* kept = reinterpret_cast<Unit*>(shared);
    const int token = blockIdx.x;
    if (token < m) load_factors(weight, kept, columns / VECTOR);
    wait_and_start_gemm(early);
    for (int i = token * blockDim.x + threadIdx.x; i < counter_count; i += gridDim.x * blockDim.x) counters[i] = 0;
    if (token < m) {
        const long long row = static_cast<long long>(token) * columns;
        normalise(x + row, delta ? delta + row : nullptr, sum + row, kept, columns / VECTOR, columns, epsilon,
                  [&](int i, const Unit& unit) { kept[i] = unit; });
        __syncthreads();
    }
    const int end = token < m ? columns : 0;
    const SCALAR* values = kept->values;
    for (int i = threadIdx.x; i < 32 * column_tiles; i += blockDim.x) {
        const int column_tile = i / 32, p = i % 32, first = first_column(column_tile, p, block);
        Word words[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int column = first + t * block;
            words[t] = column < end ? *reinterpret_cast<const Word*>(values + column) : 0;
        }
        reinterpret_cast<uint4*>(permuted)[permuted_unit(token, column_tile, p, tile_m, column_tiles)] =
            uint4{words[0], words[1], words[2], words[3]};
    }
}

#else

extern "C" __global__ void __launch_bounds__(1024) semisparse_engine_rms_norm(
    const SCALAR* x,       // [m, columns]
    const SCALAR* delta,   // [m, columns] or null
    const SCALAR* weight,  // [columns]
    SCALAR* sum,           // [m, columns]; not written without delta
    SCALAR* out,           // [m, columns]
    int columns, float epsilon
) {
    extern __shared__ __align__(16) unsigned char shared[];
    Unit* kept = reinterpret_cast<Unit*>(shared);
    const long long row = static_cast<long long>(blockIdx.x) * columns;
    griddepcontrol_launch_dependents();
    load_factors(weight, kept, columns / VECTOR);
    griddepcontrol_wait();
    normalise(x + row, delta ? delta + row : nullptr, sum + row, kept, columns / VECTOR, columns, epsilon,
              [&](int i, const Unit& unit) { store_unit(out + row, i, unit); });
}

#endif
