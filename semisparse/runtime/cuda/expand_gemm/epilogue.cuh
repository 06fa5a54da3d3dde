// The accumulators of a consumer warp of gemm.cuh, 16 rows of w by TILE_M tokens, and how it stores them to y: bias, rounding,
// transposition.

#pragma once

#include "ptx/ldmatrix.cuh"
#include "rows.cuh"
#include "types.cuh"

constexpr int kConsumerWarps = WARPGROUPS * 4;  // 16 rows each
constexpr int kTokenGroups = TILE_M / 8;

// For each group of eight tokens, lane 4 * g + t holds tokens 2 t and 2 t + 1 of row g, then of row g + 8.
using Accumulators = float[TILE_M / 2];

__device__ __forceinline__ float4 token_group(const Accumulators& accumulators, int group) {
    const float* first = accumulators + 4 * group;
    return float4{first[0], first[1], first[2], first[3]};
}

__device__ __forceinline__ void add(Accumulators& accumulators, int group, float4 more) {
    accumulators[4 * group] += more.x, accumulators[4 * group + 1] += more.y;
    accumulators[4 * group + 2] += more.z, accumulators[4 * group + 3] += more.w;
}

// Rounds two floats to one word, the first in its low half. Not pack2 of types.cuh, which compiles to different code in two
// variants of a format's gemm.cu and has not been timed there.
template <typename Scalar>
__device__ __forceinline__ Word pack(float low, float high) {
    Scalar values[2];
    store(values, low), store(values + 1, high);
    return *reinterpret_cast<const Word*>(values);
}

struct WarpOutput {
    SCALAR* y;             // at the warp's first token and row; with EXPERTS at the row of pair 0
    const int* pairs;      // with EXPERTS: of the job, -1 for none
    int tokens, rows, n;   // tokens and rows from these to the end of y; n is y's pitch
    float upper, lower;    // bias of rows g and g + 8

    __device__ __forceinline__ WarpOutput(SCALAR* y, const SCALAR* bias, const int* pairs, int first_token, int first_row, int m,
                                          int n, int lane)
        : y(y + (EXPERTS ? 0 : static_cast<long long>(first_token) * n) + first_row), pairs(pairs + (EXPERTS ? first_token : 0)),
          tokens(m - first_token), rows(n - first_row), n(n),
          upper(bias && lane / 4 < rows ? to_float(bias[first_row + lane / 4]) : 0.0f),
          lower(bias && lane / 4 + 8 < rows ? to_float(bias[first_row + lane / 4 + 8]) : 0.0f) {}

    // Stores eight tokens. After the transposition a lane has rows `row`, `row` + 1, `row` + 8 and `row` + 9 of one token. If n is
    // a multiple of 4, two neighbouring lanes exchange a pair of rows, so that each has four consecutive ones and a warp's store
    // fills whole 32-byte sectors.
    __device__ __forceinline__ void store(float4 accumulated, int group, int lane) const {
        const int token = group * 8 + lane / 4, row = lane % 4 * 2;
        const Word transposed[2] = {movmatrix_trans(pack<SCALAR>(accumulated.x + upper, accumulated.y + upper)),
                                    movmatrix_trans(pack<SCALAR>(accumulated.z + lower, accumulated.w + lower))};
        const int to_row = EXPERTS ? pairs[token] : token;
        const bool exists = EXPERTS ? to_row >= 0 : token < tokens;
        SCALAR* to = y + static_cast<long long>(to_row) * n;
        if (n % 4 == 0) {
            const int odd = lane & 1;
            const Word other = __shfl_xor_sync(0xffffffffu, odd ? transposed[0] : transposed[1], 1);
            const int first = row / 4 * 4 + 8 * odd;
            const uint2 four{odd ? other : transposed[0], odd ? transposed[1] : other};
            if (exists && first < rows) *reinterpret_cast<uint2*>(to + first) = four;
            return;
        }
        if (!exists) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const SCALAR* values = reinterpret_cast<const SCALAR*>(transposed + half);
            const int at = row + 8 * half;
            if (at < rows) to[at] = values[0];
            if (at + 1 < rows) to[at + 1] = values[1];
        }
    }
};
