// Three to 16 tokens: codes are dequantised, and the weights multiply x in 16 bits. The tokens share the dequantisation.
//
// A chunk takes four mma.m16n8k16 per 8 tokens: the weights are A (16 rows), x is B. Columns may have any order in the
// fragments if A and B have the same, so a lane feeds its own 16 columns and needs no other lane's weights. x is loaded from
// global memory to registers, kPrefetch chunks ahead.

#pragma once

#include "dequantise.cuh"
#include "ptx/mma.cuh"
#include "rows.cuh"

struct MmaDequantised {
    static constexpr int kTokenTiles = (TOKENS + 7) / 8;                // tiles of 8 tokens, n of the mma
    static constexpr int kPrefetch = TOKENS == 16 && !ALIGNED_K ? 1 : 2;  // chunks of x in flight, as registers allow
    static_assert(CHUNKS_PER_K_TILE % kPrefetch == 0, "registers are indexed at compile time");

    struct Activations {
        const Element* x;  // [m, k]
        Rows rows;
        int m, k;

        __device__ __forceinline__ Activations(const Element* x, Rows rows, int m, int k, const Element*)
            : x(x), rows(rows), m(m), k(k) {}
        __device__ __forceinline__ void load_first(float) {}
    };

    float accumulators[kTokenTiles][4];
    const unsigned short* x[kTokenTiles];  // the lane's token, at its columns of chunk 0
    U4Constants constants;
    int k;
    int column, next_column;            // first columns of this k-tile, and of the next one
    Word b[kPrefetch][kTokenTiles][8];  // x of the next chunks

    // Past the last token, the last one is loaded again; its outputs are not stored twice.
    __device__ __forceinline__ MmaDequantised(const Activations& activations, Word)
        : constants(activations.k), k(activations.k) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
            const long long token = activations.rows.x(min(lane / 4 + 8 * tile, activations.m - 1));
            x[tile] = reinterpret_cast<const unsigned short*>(activations.x) + token * k + lane % 4 * kGroupSize;
        }
        clear();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) accumulators[i / 4][i % 4] = 0.0f;
    }

    __device__ __forceinline__ void begin_range(int column) {
#pragma unroll
        for (int i = 0; i < kPrefetch; ++i) load_b(i, column + i * kChunkColumns);
    }

    __device__ __forceinline__ void begin_k_tile(int column, int next_column) {
        this->column = column;
        this->next_column = next_column;
    }

    // Loads x of the chunk that begins at `column`.
    __device__ __forceinline__ void load_b(int i, int column) {
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
            load_x(b[i][tile], x[tile] + column, k - column - static_cast<int>(threadIdx.x % 4) * kGroupSize);
        }
    }

    // Multiplies the k-tile's chunk `index`. A dropped group's scale is 0.
    __device__ __forceinline__ void multiply(const ChunkFragment& chunk, int index, Word lane_bit) {
        const int buffer = index % kPrefetch;
        Word upper[8], lower[8];
        dequantise(upper, chunk.codes[0], chunk.scale[0] * (chunk.mask[0] & lane_bit ? 0x10001u : 0), chunk.zero[0], constants);
        dequantise(lower, chunk.codes[1], chunk.scale[1] * (chunk.mask[1] & lane_bit ? 0x10001u : 0), chunk.zero[1], constants);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const Word a[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]};
#pragma unroll
            for (int tile = 0; tile < kTokenTiles; ++tile)
                mma_m16n8k16(accumulators[tile], a, b[buffer][tile][i], b[buffer][tile][i + 1], kElement);
        }
        const int ahead = index + kPrefetch;
        load_b(buffer, ahead < CHUNKS_PER_K_TILE ? column + ahead * kChunkColumns
                                                 : next_column + (ahead - CHUNKS_PER_K_TILE) * kChunkColumns);
    }

    // Calls take(row, token, accumulator) for rows lane / 4 and lane / 4 + 8, and two tokens of every 8.
    template <typename Take> __device__ __forceinline__ void for_each_accumulator(const Take& take) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) {
            take(lane / 4 + i / 2 % 2 * 8, lane % 4 * 2 + i % 2 + i / 4 * 8, accumulators[i / 4][i % 4]);
        }
    }

    __device__ __forceinline__ float to_output(float accumulator, int) const { return accumulator; }
};
