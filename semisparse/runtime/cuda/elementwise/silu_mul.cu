// out[m, i] = silu(gate[m, i]) * up[m, i], where gate and up are columns of one matrix: the activation of a gated MLP. Both
// factors are rounded to SCALAR first, as transformers rounds them.
//
// Grid: (rows, columns / (256 * VECTOR) rounded up). CTA: 256 threads with VECTOR values each. Bound: memory for many rows.
//
// With PERMUTED the result is stored in the order in which a GEMM reads it (expand_gemm/permuted.cuh): rows from m on are zeros, and
// the GEMM's counters are zeroed. Grid: (rows, column_tiles / 8 rounded up). A warp has a row's column tile, a lane four words of it.
//
// Compiled with SCALAR, VECTOR (values per load; columns, stride and both starts are multiples of it, and gate_up is aligned
// to it) and PERMUTED (0 or 1; with 1, SCALAR has 16 bits and VECTOR is 2: a word).

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"
#include "vector.cuh"

// Returns silu(gate) * up of unit i.
__device__ __forceinline__ Unit activated(Unit gate, const Unit& up) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) gate.set(j, gate.at(j) / (1.0f + expf(-gate.at(j))));
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) gate.set(j, gate.at(j) * up.at(j));
    return gate;
}

#if PERMUTED

#include "expand_gemm/permuted.cuh"
#include "expand_gemm/start_gemm.cuh"

struct alignas(16) FourUnits {
    Unit units[4];
};

extern "C" __global__ void __launch_bounds__(256) semisparse_silu_mul_permuted(
    const SCALAR* gate_up,    // [m, stride]
    unsigned char* permuted,  // [gridDim.x / tile_m, 4 * column_tiles, tile_m, 128 bytes]
    int* counters,            // [counter_count]
    int m, int columns, int stride, int gate_start, int up_start, int column_tiles, int tile_m, int block, int counter_count,
    int early                 // as in permute_x.cu
) {
    wait_and_start_gemm(early);
    const int token = blockIdx.x, cta = blockIdx.y * gridDim.x + token, threads = gridDim.x * gridDim.y * 256;
    for (int i = cta * 256 + threadIdx.x; i < counter_count; i += threads) counters[i] = 0;
    const int column_tile = blockIdx.y * 8 + threadIdx.x / 32, p = threadIdx.x % 32;
    if (column_tile >= column_tiles) return;
    const int first = first_column(column_tile, p, block), end = token < m ? columns : 0;
    const SCALAR* row = gate_up + static_cast<long long>(token) * stride;
    FourUnits gates = {}, ups = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const int column = first + t * block;
        if (column >= end) continue;
        gates.units[t] = load_unit(row + gate_start, column / VECTOR);
        ups.units[t] = load_unit(row + up_start, column / VECTOR);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) gates.units[t] = activated(gates.units[t], ups.units[t]);  // silu(0) * 0 = 0
    reinterpret_cast<FourUnits*>(permuted)[permuted_unit(token, column_tile, p, tile_m, column_tiles)] = gates;
}

#else

extern "C" __global__ void __launch_bounds__(256) semisparse_silu_mul(
    const SCALAR* gate_up,  // [m, stride]
    SCALAR* out,            // [m, columns]
    int columns, int stride, int gate_start, int up_start
) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i * VECTOR >= columns) return;
    const SCALAR* row = gate_up + static_cast<long long>(blockIdx.x) * stride;
    const Unit result = activated(load_unit(row + gate_start, i), load_unit(row + up_start, i));
    store_unit(out + static_cast<long long>(blockIdx.x) * columns, i, result);
}

#endif
