// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a bitmask weight in the layout `tiles` and m of 1 to TILE_M: tile_decode/decode.cuh (grid,
// CTA, shared memory) on the tiles of tile.cuh.
//
// Bound by latency at one or two tiles per warp (4096 x 4096, m = 1; ncu: DRAM 42 %, ALU 45 %, issue slots 46 %; 8.2 us,
// its bytes take 4.4 at the measured bandwidth), by memory at 28672 x 8192 (DRAM 78 % by ncu; by time .82 to .92 of the
// measured bandwidth, in two sets of runs). README.md and docs/kernels/bitmask.md have the figures.
//
// With EXPERTS (rows.cuh) the weight is a stack of experts. blockIdx.y is the expert or, if TILE_M is 1, the pair of a token
// and an expert; blockIdx.x is as above, over the expert's row tiles. CTAs of an expert that no token chose end at once. If an
// expert has more than TILE_M pairs, its CTAs multiply them TILE_M at a time. A kernel without SILU_MUL copies its first weights
// before griddepcontrol.wait if `complete`: the choice of experts was complete before the kernel could start.
//
// Macros: KEEP (values or codes per block of 64 columns), BITS (per code; 0 for values), and those of decode.cuh.

#include "tile_decode/decode.cuh"
#include "tiles.cuh"

#if EXPERTS
extern "C" __global__ void __launch_bounds__(WARPS_N * kRowTileThreads, 1) semisparse_bitmask_experts(
    const SCALAR* x,                          // [pairs / pairs_per_x, k]
    const unsigned char* __restrict__ tiles,  // [experts * row_tiles, column_tiles, kTileBytes]
    const SCALAR* bias,                       // [experts * n] or null
    SCALAR* y,                                // [pairs, n], or [pairs, n / 2] with SILU_MUL
    const long long* chosen,                  // [pairs], the expert of each pair
    int pairs, int pairs_per_x, int experts,
    int n, int k, int row_tiles, int column_tiles,  // of an expert
    int x_aligned,                                  // whether every row of x begins at a multiple of 16 bytes
    int complete                                    // whether `chosen` was complete before this kernel could start
) {
    extern __shared__ __align__(256) unsigned char shared[];
    const bool weights_first = complete && !kFused;
    if (!weights_first) {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    }
    const Pairs<TILE_M> step{chosen, pairs, pairs_per_x, experts};
    const long long expert = step.expert();
    Operands<Tiles> operands{x, {tiles + expert * row_tiles * column_tiles * kTileBytes}, bias ? bias + expert * n : nullptr, nullptr,
                      nullptr, y, {}, 1, n, k, row_tiles, column_tiles, x_aligned, 0.0f, weights_first};
    if constexpr (TILE_M == 1) {
        if (expert < 0 || expert >= experts) return;
        operands.rows = step.own();
        decode(operands, shared);
    } else {
        __shared__ int x_rows[TILE_M], y_rows[TILE_M];
        operands.rows.of_x = x_rows, operands.rows.of_y = y_rows;
        for (int begin = 0;; begin += TILE_M) {
            const int found = step.find(begin, x_rows, y_rows);
            if (found <= 0) return;
            operands.m = min(found, TILE_M);
            decode(operands, shared);
            if (found <= TILE_M) return;
            operands.weights_first = false;
            cp_async_wait_group<0>();
            __syncthreads();
        }
    }
}
#else
extern "C" __global__ void __launch_bounds__(WARPS_N * kRowTileThreads, 1) semisparse_bitmask_decode(
    // x and residual are not __restrict__: loads through const __restrict__ pointers may be moved before griddepcontrol.wait.
    const SCALAR* x,                          // [m, k]
    const unsigned char* __restrict__ tiles,  // [row_tiles, column_tiles, kTileBytes]
    const SCALAR* bias,                       // [n] or null
    const SCALAR* norm_weight,                // [k], aligned to 16 bytes, with RMS_NORM
    const SCALAR* residual,                   // [m, n] with ADD_RESIDUAL
    SCALAR* y,                                // [m, n], or [m, n / 2] with SILU_MUL
    int m, int n, int k, int row_tiles, int column_tiles,
    int x_aligned,                            // whether every row of x begins at a multiple of 16 bytes
    float epsilon
) {
    extern __shared__ __align__(256) unsigned char shared[];
    decode<Tiles>({x, {tiles}, bias, norm_weight, residual, y, {}, m, n, k, row_tiles, column_tiles, x_aligned, epsilon, false},
           shared);
}
#endif
