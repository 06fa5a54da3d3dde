// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a bitmask weight in the layout `tiles` and any m, with Hopper's wgmma:
// expand_gemm/gemm.cuh on the tiles of decode.cu, which are copied in bulk (bulk_tiles.cuh).
//
// Bound at 28672 x 8192, m = 256, by the tensor cores at the card's power limit (79 % busy, 1.55 GHz); at m = 64 no unit is
// saturated (issue 53 %, ALU 47 %, DRAM 55 %). README.md has the figures.
//
// Macros: KEEP (values or codes per block), BITS (per code; 0 for values), EXPERTS, and those of gemm.cuh.

#include "expand_gemm/bulk_tiles.cuh"
#include "tile.cuh"

struct Tiles : BulkTiles<kTileBytes> {
    using Stream = TileStream<Tiles, TileExpander>;

    const unsigned char* tiles;  // [row_tiles, column_tiles, kTileBytes]
    int column_tiles;

    __device__ __forceinline__ Tiles(const unsigned char* tiles, int column_tiles) : tiles(tiles), column_tiles(column_tiles) {}

    __device__ __forceinline__ void produce(const StreamMemory& memory, const WorkRanges& work, int first, int last, int warp,
                                            int lane) const {
        produce_tiles<kTileBytes>(memory, work, first, last, warp, lane, [&](int weight_row, int column) {
            return TileBytes{tiles + (static_cast<long long>(weight_row) * column_tiles + column) * kTileBytes, kTileBytes};
        });
    }
};

#if EXPERTS
extern "C" __global__ void __cluster_dims__(kClusterCtas, 1, 1) EXPAND_GEMM_BOUNDS semisparse_bitmask_experts_gemm(
    const unsigned char* __restrict__ x,        // as permute_x.cu stores it, with BLOCK = 64
    const unsigned char* __restrict__ tiles,    // [experts * row_tiles, column_tiles, kTileBytes]
    const SCALAR* __restrict__ bias,            // [experts * n] or null
    SCALAR* __restrict__ y,                     // [pairs, n]
    float4* partials,                           // [CTAs, kConsumerWarps, kTokenGroups, kWarpSize]
    int* counters,                              // [CTAs, kConsumerWarps], zeros
    const int* job_count, const int* job_experts, const int* job_pairs,  // the struct Jobs of expand_gemm/stream_k.cuh
    int n, int row_tiles, int column_tiles      // of an expert
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Tiles weight{tiles, column_tiles};
    expand_gemm(weight, {x, bias, y, {partials, counters}, 0, n, row_tiles, column_tiles, {job_count, job_experts, job_pairs}},
                shared);
}
#else
extern "C" __global__ void __cluster_dims__(kClusterCtas, 1, 1) EXPAND_GEMM_BOUNDS semisparse_bitmask_gemm(
    const unsigned char* __restrict__ x,        // as permute_x.cu stores it, with BLOCK = 64
    const unsigned char* __restrict__ tiles,    // [row_tiles, column_tiles, kTileBytes]
    const SCALAR* __restrict__ bias,            // [n] or null
    SCALAR* __restrict__ y,                     // [m, n]
    float4* partials,                           // [CTAs, kConsumerWarps, kTokenGroups, kWarpSize]
    int* counters,                              // [CTAs, kConsumerWarps], zeros
    int m, int n, int row_tiles, int column_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Tiles weight{tiles, column_tiles};
    expand_gemm(weight, {x, bias, y, {partials, counters}, m, n, row_tiles, column_tiles}, shared);
}
#endif
