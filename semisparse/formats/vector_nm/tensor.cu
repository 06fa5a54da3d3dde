// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] in 16-bit types, on tensor cores.
//
// A block computes TOKENS x ROWS, a warp 16 * PER_WARP x 32 of it by mma.m16n8k16 with tokens as the 16-row operand. k runs
// over slots: each lane of a matrix load says where its row stands, so the columns of x that a group kept are gathered
// from shared memory by the load itself. Sums are float32 in a fixed order: every run gives the same bits.
//
// Compiled for PER_WARP (mma tiles of tokens in a warp), TOKENS, ROWS, THREADS and the macros of staging.cuh.

#include "staging.cuh"

constexpr int kStep = 16;  // slots of an mma
constexpr int kRowsOfWarp = 32;
constexpr int kTokensOfWarp = 16 * PER_WARP;
constexpr int kWarpsAlongTokens = TOKENS / kTokensOfWarp;
constexpr int kShared = LENGTH < kRowsOfWarp ? LENGTH : kRowsOfWarp;  // rows of a warp that share a group
constexpr int kEights = kRowsOfWarp / 8;

static_assert(THREADS == kWarp * kWarpsAlongTokens * (ROWS / kRowsOfWarp), "a warp for each part of the tile");
static_assert(SLOTS % kStep == 0 && LENGTH % 8 == 0, "whole mma steps");

using Sums = float[PER_WARP][kEights][4];

// The weights of 16 slots for the warp's 32 rows: two words for each eight of them.
__device__ __forceinline__ void read_weights(Word (&w)[kRowsOfWarp / 16][4], const Stage& stage, int first_row, int first_slot) {
    const int lane = threadIdx.x % kWarp;
    const int slot = first_slot + lane % 16;
#pragma unroll
    for (int i = 0; i < kRowsOfWarp / 16; ++i) {
        const int row = first_row + i * 16 + lane / 16 * 8;
        load_transposed(w[i], stage.values() + row / kSpan * kGroupPitch + slot * kValuePitch + row % kSpan);
    }
}

__device__ __forceinline__ void multiply(Sums& sums, const Stage& stage, int first_token, int first_row) {
    const int lane = threadIdx.x % kWarp;
    const int token = first_token + lane / 8 % 2 * 8;
    const char* columns = reinterpret_cast<const char*>(stage.columns() + token);
#pragma unroll
    for (int first_slot = 0; first_slot < SLOTS; first_slot += kStep) {
        Word w[kRowsOfWarp / 16][4];
        read_weights(w, stage, first_row, first_slot);
#pragma unroll
        for (int row = 0; row < kRowsOfWarp; row += kShared) {
            const int* offsets = stage.offsets() + (first_row + row) / kSpan * SLOTS;
            const char* column = columns + offsets[first_slot + lane % 8 + lane / 16 * 8];
#pragma unroll
            for (int i = 0; i < PER_WARP; ++i) {
                Word x[4];
                load_transposed(x, column + i * 16 * sizeof(SCALAR));
#pragma unroll
                for (int eight = row / 8; eight < (row + kShared) / 8; ++eight) {
                    mma(sums[i][eight], x, w[eight / 2][eight % 2 * 2], w[eight / 2][eight % 2 * 2 + 1],
                        static_cast<const SCALAR*>(nullptr));
                }
            }
        }
    }
}

__device__ __forceinline__ void write(const Sums& sums, int first_token, int first_row, const SCALAR* bias, SCALAR* y, int m,
                                      int n) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
        const int row = blockIdx.y * ROWS + first_row + eight * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (row + j >= n) continue;
            const float added = bias ? to_float(bias[row + j]) : 0.0f;
#pragma unroll
            for (int i = 0; i < PER_WARP * 2; ++i) {
                const int token = blockIdx.x * TOKENS + first_token + i * 8 + lane / 4;
                if (token < m) store(y + static_cast<long long>(token) * n + row + j, sums[i / 2][eight][i % 2 * 2 + j] + added);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) semisparse_vector_nm_tensor(
    const SCALAR* __restrict__ by_column, const SCALAR* __restrict__ values, const int* __restrict__ columns,
    const int* __restrict__ offsets, const SCALAR* __restrict__ bias, SCALAR* __restrict__ y,
    int m, int n, int pitch, int groups, int total, int stages
) {
    extern __shared__ uint4 shared[];
    const Operands operands{by_column, values, columns, offsets, pitch, groups, total, stages};
    Stager stager(operands, reinterpret_cast<char*>(shared));
    const int warp = threadIdx.x / kWarp;
    const int first_token = warp % kWarpsAlongTokens * kTokensOfWarp;
    const int first_row = warp / kWarpsAlongTokens * kRowsOfWarp;
    Sums sums = {};
    for_each_stage(stager, [&](const Stage& stage) { multiply(sums, stage, first_token, first_row); });
    write(sums, first_token, first_row, bias, y, m, n);
}
