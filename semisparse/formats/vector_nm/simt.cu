// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] in float32, on CUDA cores.
//
// A block computes TOKENS x ROWS, a warp 8 * PER_THREAD x 32 of it, a thread PER_THREAD tokens of 8 rows. A lane is one of
// eight `a`, which hold the tokens 4 a to 4 a + 3 of every 32, so that a warp reads one column of x without a conflict, and one
// of four `b`, which hold 8 rows of one group: a warp's 32 rows are one group from 32 rows a vector on, and its lanes share
// the column. Sums are float32 in the order of the slots: every run gives the same bits.
//
// Compiled for PER_THREAD (4, 8 or 16), TOKENS, ROWS, THREADS and the macros of staging.cuh; SCALAR is float.

#include "values.cuh"

constexpr int kRowsOfThread = 8;
constexpr int kRowsOfWarp = 32;
constexpr int kTokensOfWarp = 8 * PER_THREAD;
constexpr int kWarpsAlongTokens = TOKENS / kTokensOfWarp;
constexpr int kHalf = LENGTH < kRowsOfWarp ? (LENGTH < 8 ? 4 : LENGTH / 2) : kRowsOfWarp / 2;  // between a thread's two fours
constexpr int kOwn = LENGTH < 8 ? 2 : 1;  // groups that a thread's rows belong to

static_assert(THREADS == kWarp * kWarpsAlongTokens * (ROWS / kRowsOfWarp), "a warp for each part of the tile");

// Where a thread works inside its block's tile.
struct Place {
    int token, row;  // its first of each

    __device__ __forceinline__ Place() {
        const int warp = threadIdx.x / kWarp;
        const int lane = threadIdx.x % kWarp;
        constexpr int lanes = kHalf / 4;  // that share a group
        // Lanes 1 apart share tokens, lanes 2 apart share rows: 16-byte loads of both then take half the wavefronts (2 to 3 %).
        const int a = lane / 2 % 8, b = lane % 2 + lane / 16 * 2;
        token = warp % kWarpsAlongTokens * kTokensOfWarp + a * 4;
        row = warp / kWarpsAlongTokens * kRowsOfWarp + b / lanes * 2 * kHalf + b % lanes * 4;
    }

    // Its four rows number `four`.
    __device__ __forceinline__ int rows(int four) const { return row + four * kHalf; }
};

using Sums = float[PER_THREAD][kRowsOfThread];

__device__ __forceinline__ void read4(float* to, const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
}

__device__ __forceinline__ void multiply(Sums& sums, const Stage& stage, const Place& place) {
    const char* columns = reinterpret_cast<const char*>(stage.columns() + place.token);
    const float* values[2];
    const int* offsets[kOwn];
#pragma unroll
    for (int four = 0; four < 2; ++four) {
        const int group = place.rows(four) / kSpan;
        values[four] = stage.values() + group * kGroupPitch + place.rows(four) % kSpan;
        if (four < kOwn) offsets[four] = stage.offsets() + group * SLOTS;
    }
#pragma unroll(SLOTS % 8 == 0 ? 8 : 4)
    for (int slot = 0; slot < SLOTS; ++slot) {
        float w[kRowsOfThread];
#pragma unroll
        for (int four = 0; four < 2; ++four) read4(w + 4 * four, values[four] + slot * kValuePitch);
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const float* column = reinterpret_cast<const float*>(columns + offsets[own][slot]);
            float x[PER_THREAD];
#pragma unroll
            for (int i = 0; i < PER_THREAD; i += 4) read4(x + i, column + i / 4 * 32);
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
#pragma unroll
                for (int j = own * 4; j < (own + 1) * kRowsOfThread / kOwn; ++j) sums[i][j] += x[i] * w[j];
            }
        }
    }
}

__device__ __forceinline__ void write(const Sums& sums, const Place& place, const float* bias, float* y, int m, int n,
                                      bool vectors) {
#pragma unroll
    for (int four = 0; four < 2; ++four) {
        const int row = blockIdx.y * ROWS + place.rows(four);
        float added[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) added[j] = bias && row + j < n ? bias[row + j] : 0.0f;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int token = blockIdx.x * TOKENS + place.token + i / 4 * 32 + i % 4;
            if (token >= m) continue;
            float* to = y + static_cast<long long>(token) * n + row;
            float out[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) out[j] = sums[i][4 * four + j] + added[j];
            if (vectors && row + 3 < n) {
                *reinterpret_cast<float4*>(to) = float4{out[0], out[1], out[2], out[3]};
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (row + j < n) to[j] = out[j];
            }
        }
    }
}

// Sixteen warps a processor at 64 sums a thread: left to itself the compiler takes a few registers too many for that. The
// lists of packed stages and a second group of rows do not fit beside them: they spill on some cards.
constexpr int kThreadsOfProcessor = PER_THREAD == 16 || PACKED || kOwn == 2 ? 256 : 512;

extern "C" __global__ void __launch_bounds__(THREADS, kThreadsOfProcessor / THREADS) semisparse_vector_nm_simt(
    const float* __restrict__ by_column, const float* __restrict__ values, const int* __restrict__ columns,
    const int* __restrict__ offsets, const float* __restrict__ bias, float* __restrict__ y,
    int m, int n, int pitch, int groups, int total, int stages,
    int vectors  // whether every row of y is 16-byte aligned
) {
    extern __shared__ uint4 shared[];
    const Operands operands{by_column, values, columns, offsets, pitch, groups, total, stages};
    ColumnStager of_columns(operands);
    ValueStager of_values(operands);
    const Place place;
    Sums sums = {};
    for_each_stage<kStageBytes>(
        stages, reinterpret_cast<char*>(shared),
        [&](char* buffer, bool last) {
            const Stage to{buffer};
            of_columns.copy(to.columns());
            of_values.copy(to);
            if (!last) of_columns.look_ahead();
        },
        [&](char* buffer) { multiply(sums, Stage{buffer}, place); });
    write(sums, place, bias, y, m, n, vectors != 0);
}
