// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for mask tiles and m of 1 to TILE_M: tile_decode/decode.cuh (grid, CTA, shared memory) on
// the tiles of tiles.cuh, which differ in size.
//
// Macros: WORDS (tile.cuh) and those of decode.cuh.

#include "tile_decode/decode.cuh"
#include "tiles.cuh"

extern "C" __global__ void __launch_bounds__(WARPS_N * kRowTileThreads, 1) semisparse_ec_csr_decode_tiles(
    // x and residual are not __restrict__: loads through const __restrict__ pointers may be moved before griddepcontrol.wait.
    const SCALAR* x,                          // [m, k]
    const unsigned char* __restrict__ tiles,  // [units, kUnitBytes]
    const int* __restrict__ tile_starts,      // [row_tiles * column_tiles + 1], in units
    const SCALAR* bias,                       // [n] or null
    const SCALAR* norm_weight,                // [k], aligned to 16 bytes, with RMS_NORM
    const SCALAR* residual,                   // [m, n] with ADD_RESIDUAL
    SCALAR* y,                                // [m, n], or [m, n / 2] with SILU_MUL
    int m, int n, int k, int row_tiles, int column_tiles,
    int x_aligned,                            // whether every row of x begins at a multiple of 16 bytes
    float epsilon
) {
    extern __shared__ __align__(256) unsigned char shared[];
    decode<Tiles>({x, {tiles, tile_starts}, bias, norm_weight, residual, y, {}, m, n, k, row_tiles, column_tiles, x_aligned, epsilon, false},
                  shared);
}
