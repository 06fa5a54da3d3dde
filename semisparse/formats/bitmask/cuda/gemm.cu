// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a bitmask weight in the layout `tiles` and any m, with Hopper's wgmma:
// expand_gemm/gemm.cuh on the tiles of decode.cu, which a producer warp copies in bulk.
//
// Bound at 28672 x 8192, m = 256, by the tensor cores at the card's power limit (79 % busy, 1.55 GHz); at m = 64 nothing is
// full (issue 53 %, ALU 47 %, DRAM 55 %). README.md has the figures.
//
// Compiled with KEEP (values per block) and the macros of gemm.cuh.

#include "expand_gemm/gemm.cuh"
#include "tile.cuh"

struct Tiles {
    static constexpr int kTileBytes = ::kTileBytes;
    static constexpr int kExtraBytes = kOverrun;
    static constexpr bool kBulk = true;
    using Stream = BulkStream<Tiles, TileExpander>;

    const unsigned char* tiles;
    int column_tiles;

    __device__ __forceinline__ void copy_bulk(Word to, int row_tile, int column, Word mbarrier) const {
        const long long index = static_cast<long long>(row_tile) * column_tiles + column;
        cp_async_bulk(to, tiles + index * kTileBytes, kTileBytes, mbarrier);
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_bitmask_gemm(
    const unsigned char* __restrict__ x,        // as permute_x.cu stores it, with BLOCK = 64
    const unsigned char* __restrict__ tiles,    // [row_tiles, column_tiles, kTileBytes]
    const SCALAR* __restrict__ bias,            // [n] or null
    SCALAR* __restrict__ y,                     // [m, n]
    float4* partials,                           // [CTAs, kConsumerWarps, kTokenGroups, kWarpSize]
    int* counters,                              // [CTAs, kConsumerWarps], zeros
    int m, int n, int row_tiles, int column_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    expand_gemm(Tiles{tiles, column_tiles}, {x, bias, y, {partials, counters}, m, n, row_tiles, column_tiles}, shared);
}
