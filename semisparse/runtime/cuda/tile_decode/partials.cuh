// The accumulators of a warp of decode.cuh. The warps of a row tile each have a slice of K: their accumulators are added in shared
// memory, in the order of the slices, and stored to y.

#pragma once

#include "fusion.cuh"
#include "rows.cuh"
#include "tile_decode/x_tile.cuh"
#include "types.cuh"

constexpr int kChains = TILE_M > 16 ? 1 : 2;  // accumulators per output: two hide mma latency at few tokens

using Accumulators = float[kChains][kTokenGroups][4];

using Partial = float[TILE_M][kTileRows];  // a warp's accumulators in shared memory

// Lane 4 * g + t holds rows g and g + 8 of tokens 2 t and 2 t + 1.
__device__ __forceinline__ void store_partial(Partial& partial, const Accumulators& accumulators, int m, int lane) {
#pragma unroll
    for (int i = 0; i < 4 * kTokenGroups; ++i) {
        const int token = lane % 4 * 2 + i % 2 + i / 4 * 8;
        const float sum = accumulators[0][i / 4][i % 4] + (kChains > 1 ? accumulators[kChains - 1][i / 4][i % 4] : 0.0f);
        if (token < m) partial[token][lane / 4 + i / 2 % 2 * 8] = sum;
    }
}

// The `index`-th row tile in the order in which CTAs take them: with SILU_MUL the two tiles of a pair follow each other.
__device__ __forceinline__ int row_tile_of(int index, int row_tiles) {
    return SILU_MUL ? index / 2 + index % 2 * (row_tiles / 2) : index;
}

// What ADD_RESIDUAL adds to output `i` of a row tile.
__device__ __forceinline__ float residual_at(const SCALAR* residual, int i, int m, int n, int first_row) {
    const int token = i / kTileRows, row = first_row + i % kTileRows;
    return ADD_RESIDUAL && token < m && row < n ? to_float(residual[static_cast<long long>(token) * n + row]) : 0.0f;
}

// Adds the partials of the K slices of a row tile, or of a pair of row tiles, and stores y. `index` numbers this thread among
// the `threads` that share the outputs; `first_residual` is the residual of its first output, which was loaded early.
__device__ __forceinline__ void reduce_slices(const Partial* partials, const SCALAR* bias, const SCALAR* residual,
                                              float first_residual, SCALAR* y, Rows y_rows, int m, int n, int first_row,
                                              int index, int threads) {
    const int rows = SILU_MUL ? n / 2 : n;
#pragma unroll 1
    for (int i = index; i < m * kTileRows; i += threads) {
        const int row = first_row + i % kTileRows;
        if (row >= rows) continue;
        const long long at = y_rows.y(i / kTileRows) * rows + row;
        float sum = bias ? to_float(bias[row]) : 0.0f, up = SILU_MUL && bias ? to_float(bias[rows + row]) : 0.0f;
        const float added = i == index ? first_residual : residual_at(residual, i, m, n, first_row);
#pragma unroll
        for (int slice = 0; slice < WARPS_K; ++slice) {
            sum += partials[slice][i / kTileRows][i % kTileRows];
            if (SILU_MUL) up += partials[WARPS_K + slice][i / kTileRows][i % kTileRows];
        }
        if (SILU_MUL) sum = silu_mul(sum, up);
        if (ADD_RESIDUAL) sum = added + rounded(sum);
        store(y + at, sum);
    }
}
