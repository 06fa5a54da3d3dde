// What the products by codes share: one or two tokens, whose groups keep to columns of their own.
//
// Of the 8 columns of a product, column 2 g + j holds group g of token j, and zeros where the other groups' columns are. So the
// lanes that read a group's codes get the sums of just that group, to which its scale and zero point belong, and no code has to
// become a weight: sum (code - zero) scale x = scale (sum code x - zero sum x). A block adds up x itself before, group by group,
// while its first masks are on their way.

#pragma once

#include "chunk.cuh"

constexpr int kStripGroups = 4 * BATCH;

// Read by lanes that have no x: the chunks that are loaded at once.
__device__ const uint4 zeros[BATCH * kColumns * 2 / 16] = {};

extern __shared__ uint4 shared[];  // the sums of x: [groups, TOKENS]

// Input says what a lane reads of x: Value, as bits, and sum(a group's words) in Number.
template <typename Input> struct Diagonal {
    using Value = typename Input::Value;
    using Number = typename Input::Number;
    static constexpr int kXWords = kSize * sizeof(Value) / 4;

    float sums[4];         // of the lane's groups: rows lane / 4 and 8 more, the tokens
    const Value* place;    // of the lane's group of a token, or zeros
    const Number* totals;  // of x, of the lane's group
    int reads;             // 1 if the lane reads x, else 0

    // Tokens past the last repeat it and are not kept.
    __device__ __forceinline__ Diagonal(const Value* x, int m, int k) {
        const int lane = threadIdx.x % 32, token = lane / 4 % 2;
        const int groups = (k + kStripGroups * kSize - 1) / (kStripGroups * kSize) * kStripGroups;
        Number* all = reinterpret_cast<Number*>(shared);
        for (int i = threadIdx.x; i < groups * TOKENS; i += 32 * WARPS) {
            const int first = i / TOKENS * kSize;
            Word words[kXWords];
            read_x<Value>(words, x + static_cast<long long>(min(i % TOKENS, m - 1)) * k + first, k - first);
            all[i] = Input::sum(words);
        }
        totals = all + lane % 4 * TOKENS;
        reads = lane / 8 == lane % 4 && token < TOKENS;
        place = x + static_cast<long long>(min(token, m - 1)) * k + lane % 4 * kSize;
        if (!reads) place = reinterpret_cast<const Value*>(zeros);
        clear();
        __syncthreads();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
    }

    __device__ __forceinline__ void move(int columns) {
        totals += columns / kSize * TOKENS;
        place += reads * columns;
    }

    // The lane's columns of the chunk that stands `column` columns further; `left` columns from there to k.
    __device__ __forceinline__ void read(Word (&words)[kXWords], int column, int left) const {
        read_x<Value>(words, place + column, reads ? left - static_cast<int>(threadIdx.x % 4) * kSize : 0);
    }

    // Adds the lane's group of one row: sum_of(cell of its products, sum of x), scaled.
    template <typename Of>
    __device__ __forceinline__ void add_row(int row, const Chunk& chunk, int column, Word bit, const Of& sum_of) {
        const float scale = to_float(scalar_of(chunk.scale[row], static_cast<const SCALAR*>(nullptr)));
        const bool kept = chunk.mask[row] & bit;
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const int cell = 2 * row + token;
            const float sum = sum_of(cell, totals[column / kSize * TOKENS + token]);
            if (kept) sums[cell] += scale * sum;
        }
    }

    // What is added up so far, of rows lane / 4 and 8 more and the tokens: four lanes' sums together.
    template <typename Take> __device__ __forceinline__ void each(const Take& take) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i % 2 >= TOKENS) continue;
            float sum = sums[i];
            sum += __shfl_xor_sync(kAll, sum, 1);
            sum += __shfl_xor_sync(kAll, sum, 2);
            if (lane % 4 == 0) take(lane / 4 + i / 2 * 8, i % 2, sum);
        }
    }
};
