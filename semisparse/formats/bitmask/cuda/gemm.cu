// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a bitmask weight in the layout `tiles` and any m, with Hopper's wgmma:
// expand_gemm/gemm.cuh on the tiles of decode.cu, which one producer thread copies in bulk.
//
// Bound at 28672 x 8192, m = 256, by the tensor cores at the card's power limit (79 % busy, 1.55 GHz); at m = 64 no unit is
// saturated (issue 53 %, ALU 47 %, DRAM 55 %). README.md has the figures.
//
// Macros: KEEP (values or codes per block), BITS (per code; 0 for values), EXPERTS, and those of gemm.cuh.

#include "expand_gemm/gemm.cuh"
#include "tile.cuh"

struct TileStream;

struct Tiles {
    static constexpr int kTileBytes = ::kTileBytes;
    static constexpr int kExtraBytes = 0;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kProducers = 1;
    using Stream = TileStream;

    const unsigned char* tiles;  // [row_tiles, column_tiles, kTileBytes]
    int column_tiles;

    // One bulk copy per consumer warp and iteration; past the last row tile, that tile again.
    __device__ __forceinline__ void produce(const StreamMemory& memory, const WorkRanges& work, int first, int last, int warp,
                                            int lane) const {
        constexpr int kStageBytes = kConsumerWarps * kTileBytes;
        if (warp > 0 || lane > 0) return;
        PipelineState<STAGES> state;
        for (int iteration = first; iteration < last; ++iteration, state.advance()) {
            const int tile = work.tile(iteration), column = work.column(iteration);
            const Word full = memory.pipeline.full(state.stage);
            mbarrier_wait_parity(memory.pipeline.empty(state.stage), state.parity ^ 1);
            mbarrier_arrive_expect_tx(full, kStageBytes);
#pragma unroll 1
            for (int i = 0; i < kConsumerWarps; ++i) {
                const long long index = static_cast<long long>(work.weight_row(tile, i)) * column_tiles + column;
                cp_async_bulk(memory.tiles + state.stage * kStageBytes + i * kTileBytes, tiles + index * kTileBytes, kTileBytes,
                              full);
            }
        }
    }
};

struct TileStream {
    Pipeline pipeline;
    Word tiles;  // shared-memory address of this warp's tile in stage 0
    int lane;
    PipelineState<STAGES> state;

    __device__ __forceinline__ TileStream(const Tiles&, const StreamMemory& memory, const WorkRanges&, int, int, int warp, int lane)
        : pipeline(memory.pipeline), tiles(memory.tiles + warp * kTileBytes), lane(lane) {}
    __device__ __forceinline__ TileExpander acquire(int) const {
        mbarrier_wait_parity(pipeline.full(state.stage), state.parity);
        return TileExpander(tiles + state.stage * kConsumerWarps * kTileBytes, lane);
    }
    __device__ __forceinline__ void release(int) {
        mbarrier_arrive_warp(pipeline.empty(state.stage), lane);
        state.advance();
    }
};

#if EXPERTS
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) EXPAND_GEMM_BOUNDS semisparse_bitmask_experts_gemm(
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
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) EXPAND_GEMM_BOUNDS semisparse_bitmask_gemm(
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
