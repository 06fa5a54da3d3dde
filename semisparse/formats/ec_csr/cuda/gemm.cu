// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for mask tiles and any m, with Hopper's wgmma: expand_gemm/gemm.cuh on the tiles of
// tile.cuh, which differ in size. A producer lane per consumer warp copies that warp's tiles in bulk.
//
// Macros: WORDS (tile.cuh) and those of gemm.cuh.

#include "expand_gemm/gemm.cuh"
#include "tile.cuh"

struct TileStream;

// Where a tile begins and ends, in units of kUnitBytes.
struct Units {
    int begin, end;
};

struct Tiles {
    static constexpr int kTileBytes = ::kTileBytes;
    static constexpr int kExtraBytes = 0;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kProducers = kConsumerWarps;
    using Stream = TileStream;

    const unsigned char* tiles;
    const int* starts;  // [row_tiles * column_tiles + 1], in units of kUnitBytes
    int column_tiles;

    // Those of a consumer warp; past the last row tile, that tile again.
    __device__ __forceinline__ Units units(const WorkRanges& work, int iteration, int warp) const {
        const int* at = starts + static_cast<long long>(work.weight_row(work.tile(iteration), warp)) * column_tiles +
                        work.column(iteration);
        return {at[0], at[1]};
    }

    // Lane i copies the tiles of consumer warp i. It loads where the next one begins while it waits for the stage.
    __device__ __forceinline__ void produce(const StreamMemory& memory, const WorkRanges& work, int first, int last, int warp,
                                            int lane) const {
        if (warp > 0 || lane >= kConsumerWarps || first >= last) return;
        PipelineState<STAGES> state;
        Units next = units(work, first, lane);
        for (int iteration = first; iteration < last; ++iteration, state.advance()) {
            const Units now = next;
            if (iteration + 1 < last) next = units(work, iteration + 1, lane);
            const Word full = memory.pipeline.full(state.stage);
            const int bytes = (now.end - now.begin) * kUnitBytes;
            mbarrier_wait_parity(memory.pipeline.empty(state.stage), state.parity ^ 1);
            mbarrier_arrive_expect_tx(full, bytes);
            cp_async_bulk(memory.tiles + (state.stage * kConsumerWarps + lane) * kTileBytes,
                          tiles + static_cast<long long>(now.begin) * kUnitBytes, bytes, full);
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

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) EXPAND_GEMM_BOUNDS semisparse_ec_csr_gemm(
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
