// The weight of gemm_wgmma.cu if no group is dropped: only codes, scales and zero points are read, because the address of a group
// follows from its row and column.
//
// A tile is as in wgmma_tile.cuh, without headers. Its chunks are contiguous in global memory. N is a multiple of 16, so all chunks
// have 16 rows, and every tile begins at a multiple of 16 bytes of each tensor.
//
//   tile      | codes, kFullCodesBytes | scale, kFullScaleBytes | zero, 64 kChunks |

#pragma once

#include "expand_gemm/gemm.cuh"
#include "ptx/integer.cuh"
#include "warp.cuh"
#include "wgmma_tile.cuh"

constexpr int kFullCodesBytes = kMaxGroups * kGroupBytes;
constexpr int kFullScaleBytes = kMaxGroups * 2;
constexpr int kFullTileBytes = kFullCodesBytes + kFullScaleBytes + kMaxGroups;

// Expands a tile, four columns of both rows per k-step.
struct FullTileExpander {
    Word tile, row, column;  // the tile's address in shared memory; the lane's first row, and its group of each chunk, 0 to 3
    int left;                // groups of a row from the tile's first on
    Word part, code_mask;    // as in TileExpander
    Slice slices[2];         // one is expanded while the other is read

    __device__ __forceinline__ FullTileExpander(Word tile, Word row, Word column, int left, Word part, Word code_mask)
        : tile(tile), row(row), column(column), left(left), part(part), code_mask(code_mask) {
        read<0>();
    }

    // Past the row's last group, where x is 0, lanes read another group of the tile.
    template <int number>
    __device__ __forceinline__ void read() {
        constexpr int chunk = number / kSlicesPerGroup, slice = number % kSlicesPerGroup;
        const Word width = max(min(left - 4 * chunk, 4), 0), first = width ? chunk * 64 : 0;
        const Word group = first + mad_lo(row, width, min(column, max(width, 1u) - 1));
        Slice& to = slices[number % 2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Word at = group + 8 * half * width;
            read_codes(to.codes[half], tile + at * kGroupBytes + (part * kSlicesPerGroup + slice) * kSliceBytes);
            to.scale[half] = ld_shared_ordered_u16(tile + kFullCodesBytes + at * 2);
            to.zero[half] = ld_shared_ordered_u8(tile + kFullCodesBytes + kFullScaleBytes + at);
        }
    }

    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        constexpr int number = step / kStepsPerSlice, unit = step % kStepsPerSlice / 2, pair = step % 2 * 2;
        const Slice& slice = slices[number % 2];
        if constexpr (step % kStepsPerSlice == 0 && number + 1 < kTileSlices) read<number + 1>();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const ScaleZero group = prepare(slice.scale[half], slice.zero[half], kElement);
            fragment[half] = dequantise_pair(slice.codes[half], unit, pair, group, code_mask, kElement);
            fragment[2 + half] = dequantise_pair(slice.codes[half], unit, pair + 1, group, code_mask, kElement);
        }
    }
};

struct FullStream;

// The type Weights of expand_gemm/gemm.cuh.
struct FullGroups {
    static constexpr int kTileBytes = kFullTileBytes;
    static constexpr int kExtraBytes = 0;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kProducers = kConsumerWarps;
    using Stream = FullStream;

    const char* codes;  // [n * groups, kGroupBytes]
    const char* scale;  // [n * groups], an Element each
    const char* zero;   // [n * groups]
    int groups;         // per row

    __device__ __forceinline__ void produce(const StreamMemory& memory, const WorkRanges& work, int first, int last, int warp,
                                            int lane) const {
        const int consumer = lane * kProducerWarps + warp;
        if (consumer >= kConsumerWarps) return;
        const Word tiles = memory.tiles + consumer * kTileBytes;
        const int count = (last + kParts - 1) / kParts - first / kParts;
        TileCursor cursor(work, first / kParts * kParts, consumer);
        PipelineState<STAGES> state;
#pragma unroll 1
        for (int i = 0; i < count; ++i, state.advance()) {
            const int before = cursor.column / kParts * (4 * kChunks);
            const long long begin = 16ll * (static_cast<long long>(cursor.weight_row) * groups + before);
            const int copied = 16 * min(4 * kChunks, groups - before);
            const Word to = tiles + state.stage * kConsumerWarps * kTileBytes, full = memory.pipeline.full(state.stage);
            mbarrier_wait_parity(memory.pipeline.empty(state.stage), state.parity ^ 1);
            mbarrier_arrive_expect_tx(full, copied * (kGroupBytes + 3));
            cp_async_bulk(to, codes + begin * kGroupBytes, copied * kGroupBytes, full);
            cp_async_bulk(to + kFullCodesBytes, scale + begin * 2, copied * 2, full);
            cp_async_bulk(to + kFullCodesBytes + kFullScaleBytes, zero + begin, copied, full);
#pragma unroll
            for (int part = 0; part < kParts; ++part) cursor.advance();
        }
    }
};

// A consumer warp's tiles: the type Stream of expand_gemm/gemm.cuh.
struct FullStream {
    Pipeline pipeline;
    Word tiles, row, column, code_mask;  // the warp's tiles, an address in shared memory; then as in FullTileExpander
    int groups, last, lane;              // last: end of the iterations, exclusive
    int tile_column, column_tiles;       // of the next iteration; of a row
    PipelineState<STAGES> state;
    bool waited = false;                 // whether the tile has arrived

    __device__ __forceinline__ FullStream(const FullGroups& weight, const StreamMemory& memory, const WorkRanges& work, int first,
                                          int last, int warp, int lane)
        : pipeline(memory.pipeline), tiles(memory.tiles + warp * kFullTileBytes), row(keep_in_register(lane / 4)),
          column(keep_in_register(lane % 4)), code_mask(keep_constant(::code_mask(kElement), weight.groups)),
          groups(weight.groups), last(last), lane(lane), tile_column(work.column(first)), column_tiles(work.column_tiles) {}

    __device__ __forceinline__ FullTileExpander acquire(int) {
        if (kParts == 1 || !waited) mbarrier_wait_parity(pipeline.full(state.stage), state.parity);
        waited = true;
        return FullTileExpander(tiles + state.stage * kConsumerWarps * kFullTileBytes, row, column,
                                groups - tile_column / kParts * (4 * kChunks), tile_column % kParts, code_mask);
    }

    __device__ __forceinline__ void release(int iteration) {
        const bool shared = tile_column % kParts != kParts - 1 && iteration + 1 != last;
        tile_column = tile_column + 1 == column_tiles ? 0 : tile_column + 1;
        if (shared) return;
        mbarrier_arrive_warp(pipeline.empty(state.stage), lane);
        state.advance();
        waited = false;
    }
};
