// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for mask tiles and any m, with Hopper's wgmma: expand_gemm/gemm.cuh on the tiles of
// tile.cuh, which differ in size and are copied in bulk (bulk_tiles.cuh).
//
// Macros: WORDS (tile.cuh) and those of gemm.cuh.

#include "expand_gemm/bulk_tiles.cuh"
#include "tile.cuh"

struct Tiles : BulkTiles<kTileBytes> {
    using Stream = TileStream<Tiles, TileExpander>;

    const unsigned char* tiles;
    const int* starts;  // [row_tiles * column_tiles + 1], in units of kUnitBytes
    int column_tiles;

    __device__ __forceinline__ Tiles(const unsigned char* tiles, const int* starts, int column_tiles)
        : tiles(tiles), starts(starts), column_tiles(column_tiles) {}

    __device__ __forceinline__ void produce(const StreamMemory& memory, const WorkRanges& work, int first, int last, int warp,
                                            int lane) const {
        produce_tiles<kTileBytes>(memory, work, first, last, warp, lane, [&](int weight_row, int column) {
            const int* at = starts + static_cast<long long>(weight_row) * column_tiles + column;
            const int begin = at[0];
            return TileBytes{tiles + static_cast<long long>(begin) * kUnitBytes, (at[1] - begin) * kUnitBytes};
        });
    }
};

extern "C" __global__ void __cluster_dims__(kClusterCtas, 1, 1) EXPAND_GEMM_BOUNDS semisparse_ec_csr_gemm(
    const unsigned char* __restrict__ x,        // as permute_x.cu stores it, with BLOCK = 64
    const unsigned char* __restrict__ tiles,    // [units, kUnitBytes]
    const int* __restrict__ tile_starts,        // [row_tiles * column_tiles + 1]
    const SCALAR* __restrict__ bias,            // [n] or null
    SCALAR* __restrict__ y,                     // [m, n]
    float4* partials,                           // [CTAs, kConsumerWarps, kTokenGroups, kWarpSize]
    int* counters,                              // [CTAs, kConsumerWarps], zeros
    int m, int n, int row_tiles, int column_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Tiles weight{tiles, tile_starts, column_tiles};
    expand_gemm(weight, {x, bias, y, {partials, counters}, m, n, row_tiles, column_tiles}, shared);
}
