// Expands one tile that fills all of the shared memory. Grid: one CTA of 32 threads. Shared memory: kTileBytes.
//
// Macros: TILE_HEADER (the path of tile.cuh), SCALAR, KEEP and BITS.

#include "tile_decode/copy_tile.cuh"
#include TILE_HEADER

template <int step = 0>
__device__ void expand(TileExpander& tile, Word* fragments, int lane) {
    const uint2 upper = tile.upper.template expand<step>(), lower = tile.lower.template expand<step>();
    const Word words[4] = {upper.x, lower.x, upper.y, lower.y};
    for (int i = 0; i < 4; ++i) fragments[(step * 4 + i) * 32 + lane] = words[i];
    if constexpr (step + 1 < kSteps) expand<step + 1>(tile, fragments, lane);
}

extern "C" __global__ void expand_tile(const unsigned char* tiles, Word* fragments) {
    extern __shared__ __align__(256) unsigned char shared[];
    const int lane = threadIdx.x;
    copy_tile<kTileBytes>(smem_address(shared), tiles, lane);
    cp_async_commit_group();
    wait_tiles<0>();
    TileExpander tile(smem_address(shared), lane);
    expand(tile, fragments, lane);
}
