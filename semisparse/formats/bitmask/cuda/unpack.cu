// w[n, pitch] from a bitmask weight in the layout `tiles`: tile_decode/unpack.cuh (grid, CTA, shared memory) on the tiles of
// tile.cuh.
//
// Macros: KEEP (values or codes per block), BITS (per code; 0 for values), and those of unpack.cuh.

#include "tile_decode/unpack.cuh"
#include "tiles.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * kWarpSize) semisparse_bitmask_unpack(
    const unsigned char* __restrict__ tiles,            // [row tiles, column_tiles, kTileBytes]
    unsigned short* __restrict__ w,                     // [n, pitch]; pitch is a multiple of 8
    int n, int pitch, int tile_count, int column_tiles
) {
    extern __shared__ __align__(256) unsigned char shared[];
    unpack(Tiles{tiles}, w, n, pitch, tile_count, column_tiles, shared);
}
