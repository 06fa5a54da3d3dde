// w[n, pitch] from mask tiles: tile_decode/unpack.cuh (grid, CTA, shared memory) on the tiles of tiles.cuh, which differ in size.
//
// Macros: WORDS (tile.cuh) and those of unpack.cuh.

#include "tile_decode/unpack.cuh"
#include "tiles.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * kWarpSize) semisparse_ec_csr_unpack_tiles(
    const unsigned char* __restrict__ tiles,   // [units, kUnitBytes]
    const int* __restrict__ tile_starts,       // [row_tiles * column_tiles + 1], in units
    unsigned short* __restrict__ w,            // [n, pitch]; pitch is a multiple of 8
    int n, int pitch, int tile_count, int column_tiles
) {
    extern __shared__ __align__(256) unsigned char shared[];
    unpack(Tiles{tiles, tile_starts}, w, n, pitch, tile_count, column_tiles, shared);
}
