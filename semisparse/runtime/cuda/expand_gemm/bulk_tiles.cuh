// Weights of gemm.cuh whose tiles are contiguous in global memory and are expanded as they are stored: one bulk copy per tile, issued
// by a producer lane of its own for each consumer warp.

#pragma once

#include "expand_gemm/gemm.cuh"

// A tile in global memory; `bytes` and the address are multiples of 16.
struct TileBytes {
    const unsigned char* from;
    int bytes;
};

// What gemm.cuh asks of a format's Weights, except `produce`, which calls produce_tiles, and Stream, a TileStream.
template <int tile_bytes>
struct BulkTiles {
    static constexpr int kTileBytes = tile_bytes;  // of a stage in shared memory
    static constexpr int kExtraBytes = 0;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kProducers = kConsumerWarps;
};

// Copies the tiles of one consumer warp, spread over all producer warps. With one thread for all consumer warps, a 32:64 weight
// takes 98.8 us instead of 82.0 (28672 x 8192, 32 tokens, H200; results/h200/sweeps/few-tokens.csv). find(weight_row, column)
// returns a TileBytes; it is called an iteration ahead, since it may load from memory.
template <int tile_bytes, typename Find>
__device__ __forceinline__ void produce_tiles(const StreamMemory& memory, const WorkRanges& work, int first, int last, int warp,
                                              int lane, const Find& find) {
    const int consumer = lane * kProducerWarps + warp;
    if (consumer >= kConsumerWarps || first >= last) return;
    TileCursor cursor(work, first, consumer);
    TileBytes next = find(cursor.weight_row, cursor.column);
    PipelineState<STAGES> state;
#pragma unroll 1
    for (int iteration = first; iteration < last; ++iteration, state.advance()) {
        const TileBytes now = next;
        cursor.advance();
        if (iteration + 1 < last) next = find(cursor.weight_row, cursor.column);
        const Word full = memory.pipeline.full(state.stage);
        mbarrier_wait_parity(memory.pipeline.empty(state.stage), state.parity ^ 1);
        mbarrier_arrive_expect_tx(full, now.bytes);
        cp_async_bulk(memory.tiles + (state.stage * kConsumerWarps + consumer) * tile_bytes, now.from, now.bytes, full);
    }
}

// A consumer warp's tiles: the type Stream of gemm.cuh. Expander is made of a tile's address in shared memory and the lane.
template <typename Weights, typename Expander>
struct TileStream {
    static constexpr int kTileBytes = Weights::kTileBytes;
    Pipeline pipeline;
    Word tiles;  // shared-memory address of this warp's tile in stage 0
    int lane;
    PipelineState<STAGES> state;

    __device__ __forceinline__ TileStream(const Weights&, const StreamMemory& memory, const WorkRanges&, int, int, int warp,
                                          int lane)
        : pipeline(memory.pipeline), tiles(memory.tiles + warp * kTileBytes), lane(lane) {}
    __device__ __forceinline__ Expander acquire(int) const {
        mbarrier_wait_parity(pipeline.full(state.stage), state.parity);
        return Expander(tiles + state.stage * kConsumerWarps * kTileBytes, lane);
    }
    __device__ __forceinline__ void release(int) {
        mbarrier_arrive_warp(pipeline.empty(state.stage), lane);
        state.advance();
    }
};
