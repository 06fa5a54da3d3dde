// Which chunks each warp multiplies, and how the warps' accumulators of a row tile are added: with one CTA per row tile, or by
// Stream-K among the warps of a CTA. Either way no CTA waits for another, nothing is left in memory between launches, and the
// order of all additions is fixed: results repeat bit for bit.
//
// With SILU_MUL the first half of the weight's rows is the gate, the second half the up projection (fusion.cuh). A CTA has the
// same row tiles of both; half of its warps multiplies each half, and all accumulators meet in shared memory.
//
// With EXPERTS (rows.cuh) a schedule divides one expert's matmul; the caller adds the expert's first chunk to its ranges.
//
// Work is counted in k-tiles of CHUNKS_PER_K_TILE chunks. A k-tile takes the same instructions whatever it keeps, and
// instructions bound the kernel; so k-tiles, not kept groups, are divided evenly.

#pragma once

#include "fusion.cuh"
#include "rows.cuh"
#include "stream.cuh"

constexpr int kTileCells = kRows * TOKENS;  // elements of a row tile's output, [TOKENS, kRows]

template <typename Mma> struct Epilogue {
    const Element* bias;      // [n] or null
    const Element* residual;  // [m, n] with ADD_RESIDUAL
    Element* y;               // [m, n], or [m, n / 2] with SILU_MUL
    Rows rows;
    int m, n;
    const Mma& mma;

    // The output before the residual or SiLU.
    __device__ __forceinline__ float output_of(int row, int token, float accumulator) const {
        return mma.to_output(accumulator, token) + (bias ? to_float(bias[row]) : 0.0f);
    }

    __device__ __forceinline__ void store_cell(int row, int token, float accumulator) const {
        store_cell(row, token, accumulator, residual_of(row, token));
    }

    __device__ __forceinline__ void store_cell(int row, int token, float accumulator, float residual_value) const {
        if (row >= n || token >= m) return;
        float value = output_of(row, token, accumulator);
        if constexpr (ADD_RESIDUAL) value = residual_value + rounded(value);
        store(y + rows.y(token) * n + row, value);
    }

    __device__ __forceinline__ float residual_of(int row, int token) const {
        return ADD_RESIDUAL && row < n && token < m ? to_float(residual[static_cast<long long>(token) * n + row]) : 0.0f;
    }

    __device__ __forceinline__ void store_gated(int row, int token, float gate, float up) const {
        if (row >= n / 2 || token >= m) return;
        const float value = silu_mul(output_of(row, token, gate), output_of(n / 2 + row, token, up));
        store(y + rows.y(token) * (n / 2) + row, value);
    }
};

// Multiplies one k-tile of a row tile. Fragments are double-buffered: while a chunk is multiplied, the next one is loaded.
template <typename Mma>
__device__ __forceinline__ void multiply_k_tile(Mma& mma, WeightStream& stream, int k_tile, int chunks_per_tile,
                                                Word lane_bit) {
    ChunkHeader headers[CHUNKS_PER_K_TILE];
    ChunkFragment chunks[2];
    // After the last k-tile of a row tile comes the first of the next row tile.
    const bool goes_on = (k_tile + 1) * CHUNKS_PER_K_TILE < chunks_per_tile;
    mma.begin_k_tile(k_tile * kKTileColumns, goes_on ? (k_tile + 1) * kKTileColumns : 0);
    stream.next_k_tile(headers, chunks_per_tile - k_tile * CHUNKS_PER_K_TILE);
    stream.load(chunks[0], headers[0], lane_bit);
#pragma unroll
    for (int i = 0; i < CHUNKS_PER_K_TILE; ++i) {
        if (i + 1 < CHUNKS_PER_K_TILE) stream.load(chunks[(i + 1) % 2], headers[i + 1], lane_bit);
        mma.multiply(chunks[i % 2], i, lane_bit);
    }
}

// One CTA per row tile; its warps share the k-tiles evenly.
template <typename Mma> struct TilePerCta {
    using Partials = float[WARPS][kTileCells];

    int chunks_per_tile;
    int begin, end;              // k-tiles of this warp
    int first_chunk, end_chunk;  // of this warp, counted over the weight

    __device__ __forceinline__ TilePerCta(int chunks_per_tile, int, int, int, float*) : chunks_per_tile(chunks_per_tile) {
        const int k_tiles = (chunks_per_tile + CHUNKS_PER_K_TILE - 1) / CHUNKS_PER_K_TILE, warp = warp_id();
        begin = k_tiles * warp / WARPS;
        end = k_tiles * (warp + 1) / WARPS;
        first_chunk = blockIdx.x * chunks_per_tile + begin * CHUNKS_PER_K_TILE;
        end_chunk = blockIdx.x * chunks_per_tile +
                    (ALIGNED_K ? end * CHUNKS_PER_K_TILE : min(end * CHUNKS_PER_K_TILE, chunks_per_tile));
    }

    __device__ __forceinline__ void run(WeightStream& stream, Mma& mma, const Epilogue<Mma>& epilogue,
                                        Partials& partials) const {
        const int warp = warp_id();
        const Word lane_bit = keep_in_register(1u << threadIdx.x % 32);
        const int first_cell = threadIdx.x;
        const float first_residual = epilogue.residual_of(blockIdx.x * kRows + first_cell % kRows, first_cell / kRows);
        mma.begin_range(begin * kKTileColumns);
#pragma unroll 1
        for (int k_tile = begin; k_tile < end; ++k_tile) multiply_k_tile(mma, stream, k_tile, chunks_per_tile, lane_bit);
        mma.for_each_accumulator([&](int row, int token, float sum) { partials[warp][token * kRows + row] = sum; });
        __syncthreads();
#pragma unroll 1
        for (int cell = threadIdx.x; cell < kRows * epilogue.m; cell += kThreads) {
            float sum = partials[0][cell];
#pragma unroll
            for (int i = 1; i < WARPS; ++i) sum += partials[i][cell];
            const int row = blockIdx.x * kRows + cell % kRows, token = cell / kRows;
            epilogue.store_cell(row, token, sum, cell == first_cell ? first_residual : epilogue.residual_of(row, token));
        }
    }
};

// Stream-K among the warps of a CTA: the k-tiles of its row tiles, in order, are cut into equal ranges, one per warp. A warp
// stores each row tile that lies entirely in its range. Of a row tile that begins before its range or ends after it, it leaves
// partial accumulators in shared memory; the fix-up adds these in the order of the warps.
template <typename Mma> struct StreamK {
    using Partials = float[WARPS][2][kTileCells];
    static constexpr int kHalves = SILU_MUL ? 2 : 1;        // of the weight's rows: gate and up
    static constexpr int kRangeWarps = WARPS / kHalves;     // warps that share the row tiles of a half

    int chunks_per_tile, k_tiles_per_tile;
    int half, warp;              // this warp's half of the weight, and its index among the warps of that half
    float* whole;                // [kHalves, row tiles of this CTA, kTileCells], with SILU_MUL: accumulators of the row tiles
                                 // that one warp computed entirely
    int begin, end;              // k-tiles of this CTA, counted over a half of the weight
    int first_k_tile, k_tiles;   // of this warp: its first k-tile, and how many
    int first_chunk, end_chunk;  // of this warp, counted over the weight

    // A CTA has `tiles_per_cta` row tiles (of each half), the first `ctas_with_extra` CTAs one more. The weight has `chunks`
    // chunks.
    __device__ __forceinline__ StreamK(int chunks_per_tile, int tiles_per_cta, int ctas_with_extra, int chunks, float* whole)
        : chunks_per_tile(chunks_per_tile),
          k_tiles_per_tile((chunks_per_tile + CHUNKS_PER_K_TILE - 1) / CHUNKS_PER_K_TILE),
          half(SILU_MUL ? warp_id() / kRangeWarps : 0),
          warp(SILU_MUL ? warp_id() % kRangeWarps : warp_id()),
          whole(whole) {
        const int cta = blockIdx.x;
        begin = (cta * tiles_per_cta + min(cta, ctas_with_extra)) * k_tiles_per_tile;
        end = begin + (tiles_per_cta + (cta < ctas_with_extra)) * k_tiles_per_tile;
        first_k_tile = range_begin(warp);
        k_tiles = range_begin(warp + 1) - first_k_tile;
        first_chunk = chunk_of(first_k_tile) + half * (chunks / 2);
        end_chunk = chunk_of(first_k_tile + k_tiles) + half * (chunks / 2);
    }

    __device__ __forceinline__ int chunk_of(int k_tile) const {
        if (ALIGNED_K) return k_tile * CHUNKS_PER_K_TILE;
        const int tile = k_tile / k_tiles_per_tile;
        return tile * chunks_per_tile + (k_tile - tile * k_tiles_per_tile) * CHUNKS_PER_K_TILE;
    }

    __device__ __forceinline__ int range_begin(int warp) const { return begin + (end - begin) * warp / kRangeWarps; }

    // The last warp whose range begins at `k_tile` or before: the largest with (end - begin) * warp / kRangeWarps <=
    // k_tile - begin.
    __device__ __forceinline__ int warp_of(int k_tile) const {
        return ((k_tile - begin + 1) * kRangeWarps - 1) / (end - begin);
    }

    // Where `whole` has the accumulators of a row tile.
    __device__ __forceinline__ float* whole_tile(int half, int tile) const {
        return whole + (half * (end - begin) + tile * k_tiles_per_tile - begin) / k_tiles_per_tile * kTileCells;
    }

    __device__ __forceinline__ void run(WeightStream& stream, Mma& mma, const Epilogue<Mma>& epilogue,
                                        Partials& partials) const {
        multiply_range(partials[warp_id()], stream, mma, epilogue);
        __syncthreads();
        for (int tile = begin / k_tiles_per_tile + warp_id(); tile * k_tiles_per_tile < end; tile += WARPS)
            fix_up(tile, partials, epilogue);
    }

    // Multiplies the warp's range. partials[0] gets the accumulators of a row tile that begins before the range (zeros if the
    // range is empty), partials[1] those of a row tile that begins in the range and ends after it.
    __device__ __forceinline__ void multiply_range(float (&partials)[2][kTileCells], WeightStream& stream, Mma& mma,
                                                   const Epilogue<Mma>& epilogue) const {
        int tile = first_k_tile / k_tiles_per_tile, k_tile = first_k_tile - tile * k_tiles_per_tile, left = k_tiles;
        const Word lane_bit = keep_in_register(1u << threadIdx.x % 32);
        mma.begin_range(k_tile * kKTileColumns);
        if (left == 0) mma.for_each_accumulator([&](int row, int token, float) { partials[0][token * kRows + row] = 0.0f; });
        while (left > 0) {
            const int until = min(k_tile + left, k_tiles_per_tile);
            const bool begins = k_tile == 0, ends = until == k_tiles_per_tile;
            left -= until - k_tile;
            for (; k_tile < until; ++k_tile) multiply_k_tile(mma, stream, k_tile, chunks_per_tile, lane_bit);
            if (begins && ends && !SILU_MUL) {
                mma.for_each_accumulator(
                    [&](int row, int token, float sum) { epilogue.store_cell(tile * kRows + row, token, sum); });
            } else if (begins && ends) {
                float* cells = whole_tile(half, tile);
                mma.for_each_accumulator([&](int row, int token, float sum) { cells[token * kRows + row] = sum; });
            } else {
                float* partial = partials[begins];
                mma.for_each_accumulator([&](int row, int token, float sum) { partial[token * kRows + row] = sum; });
            }
            mma.clear();
            k_tile = 0;
            ++tile;
        }
    }

    // Adds the warps' partials of a row tile and stores it, one lane per element. A row tile that one warp computed is stored
    // already or, with SILU_MUL, in `whole`.
    __device__ __forceinline__ void fix_up(int tile, const Partials& partials, const Epilogue<Mma>& epilogue) const {
        const int first_warp = warp_of(tile * k_tiles_per_tile), last_warp = warp_of((tile + 1) * k_tiles_per_tile - 1);
        if (first_warp == last_warp && !SILU_MUL) return;
#pragma unroll 1
        for (int cell = threadIdx.x % 32; cell < kTileCells; cell += 32) {
            float sums[kHalves];
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                sums[h] = first_warp == last_warp ? whole_tile(h, tile)[cell] : partials[h * kRangeWarps + first_warp][1][cell];
                for (int i = first_warp + 1; i <= last_warp; ++i) sums[h] += partials[h * kRangeWarps + i][0][cell];
            }
            const int row = tile * kRows + cell % kRows, token = cell / kRows;
            if constexpr (SILU_MUL) epilogue.store_gated(row, token, sums[0], sums[kHalves - 1]);
            else epilogue.store_cell(row, token, sums[0]);
        }
    }
};
