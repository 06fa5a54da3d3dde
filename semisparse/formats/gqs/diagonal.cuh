// What the products by codes share: one or two tokens, whose groups keep to columns of their own.
//
// Of the 8 columns of a product, column 2 g + j holds group g of token j, and zeros where the other groups' columns are. So the
// lanes that read a group's codes get the sums of just that group, to which its scale and zero point belong, and no code has to
// become a weight: sum (code - zero) scale x = scale (sum code x - zero sum x). While its first groups are on their way, a block
// puts zeros, x as products want it, and the sums of its groups [groups, TOKENS] into shared memory, after the warps' streams.

#pragma once

#include "stream.cuh"

constexpr int kStripColumns = BATCH * kColumns;
constexpr Word kNothing[4] = {};

// Input says what x becomes: Value, `prepare` by the whole block, and `stage`, which reorders a group's words and adds them up.
template <typename Input> struct Diagonal {
    using Value = typename Input::Value;
    using Number = typename Input::Number;
    static constexpr int kXWords = kSize * sizeof(Value) / 4;
    static constexpr int kZerosBytes = kStripColumns * sizeof(Value);

    Input input;
    float sums[4];  // of the lane's groups: rows lane / 4 and 8 more, the tokens
    Word place;     // in shared memory, of the lane's group of a token, or of zeros
    Word totals;    // likewise, of minus the sums of x of the lane's group
    int step;       // bytes of a column; 0 if the lane does not read x

    // `at` is free shared memory. Tokens past the last repeat it and are not kept.
    __device__ __forceinline__ Diagonal(const SCALAR* x, Word at, int m, int k) {
        const int lane = threadIdx.x % 32, token = lane / 4 % 2;
        const int columns = (k + kStripColumns - 1) / kStripColumns * kStripColumns, groups = columns / kSize;
        const Word x_at = at + kZerosBytes, totals_at = x_at + TOKENS * columns * sizeof(Value);
#pragma unroll 1
        for (int i = threadIdx.x; i < kZerosBytes / 16; i += 32 * WARPS) write_shared(at + 16 * i, kNothing);
        input.prepare(x, m, k);
#pragma unroll 1
        for (int token = 0; token < TOKENS; ++token) {
            const unsigned short* row = reinterpret_cast<const unsigned short*>(x) + static_cast<long long>(min(token, m - 1)) * k;
            const Word to = x_at + token * columns * sizeof(Value);
#pragma unroll 1
            for (int i = threadIdx.x; i < groups; i += 32 * WARPS) {
                Word words[kSize / 2], staged[kXWords / 4][4];
                read_x(words, row + i * kSize, k - i * kSize);
                const Number sum = input.stage(staged, words, token);
#pragma unroll
                for (int j = 0; j < kXWords / 4; ++j) write_shared(to + i * (4 * kXWords) + 16 * j, staged[j]);
                write_shared(totals_at + 4 * (i * TOKENS + token), Input::bits(-sum));
            }
        }
        totals = totals_at + lane % 4 * TOKENS * 4;
        const bool reads = lane / 8 == lane % 4 && token < TOKENS;
        step = static_cast<int>(pinned(reads ? static_cast<Word>(sizeof(Value)) : 0u));
        place = reads ? x_at + (token * columns + lane % 4 * kSize) * static_cast<int>(sizeof(Value)) : at;
        clear();
        __syncthreads();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
    }

    __device__ __forceinline__ void move(int columns) {
        totals += columns / kSize * TOKENS * 4;
        place += step * columns;
    }

    // Of a chunk: the lane's columns, and minus the sums of its group by tokens.
    struct X {
        Word words[kXWords / 4][4];
        Number totals[TOKENS];
    };

    // Of the chunk that stands `column` columns further.
    __device__ __forceinline__ void read(X& x, int column, int) const {
#pragma unroll
        for (int i = 0; i < kXWords / 4; ++i) read_shared(x.words[i], place + column * static_cast<int>(sizeof(Value)) + 16 * i);
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            x.totals[token] = Input::number(read_shared_word(totals + (column / kSize * TOKENS + token) * 4));
        }
    }

    // Adds the lane's group of one row: sum_of(cell of its products, minus the sum of x), scaled.
    template <typename Of>
    __device__ __forceinline__ void add_row(int row, const Chunk& chunk, const Number (&totals)[TOKENS], Word bit, const Of& sum_of) {
        const float scale = to_float(scalar_of(chunk.scale[row], static_cast<const SCALAR*>(nullptr)));
        const bool kept = chunk.mask[row] & bit;
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const int cell = 2 * row + token;
            const float sum = sum_of(cell, totals[token]);
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
