// What the products by codes share: one or two tokens, whose groups keep to columns of their own.
//
// Of the 8 columns of a product, column 2 g + j holds group g of token j, and zeros where the other groups' columns are. So the
// lanes that read a group's codes get the sums of just that group, to which its scale and zero point belong, and no code has to
// become a weight: sum (code - zero) scale x = scale (sum code x - zero sum x). While its first groups are on their way, a block
// puts zeros, x as products want it, and the sums of its groups [groups, TOKENS] into shared memory, after the warps' streams.

#pragma once

#include "stream.cuh"

constexpr Word kNothing[4] = {};

// Input says what x becomes: Value, `prepare` by the whole block, and `stage`, which reorders a group's words and adds them up.
template <typename Input> struct Diagonal {
    using Value = typename Input::Value;
    using Number = typename Input::Number;
    static constexpr int kXWords = kSize * sizeof(Value) / 4;
    static constexpr int kZerosBytes = kStripColumns * sizeof(Value);

    // Groups of x that a thread asks for before anything else: behind copies of the weight they would come last.
    static constexpr int kHeld = WHOLE ? 2 : 0;

    __device__ __forceinline__ static int groups_of(int k) { return (k + kStripColumns - 1) / kStripColumns * (kStripColumns / kSize); }

    // The groups of x that this thread puts into shared memory, one of each 32 * WARPS, token after token.
    struct Asked {
        const SCALAR* x;
        int m, k;
        Word held[kHeld + 1][kSize / 2];

        __device__ __forceinline__ Asked(const SCALAR* x, int m, int k) : x(x), m(m), k(k) {
#pragma unroll
            for (int j = 0; j < kHeld; ++j) {
                if (number(j) < TOKENS * groups_of(k)) read(held[j], number(j));
            }
        }

        __device__ __forceinline__ static int number(int j) { return threadIdx.x + j * 32 * WARPS; }
        __device__ __forceinline__ int token_of(int i) const { return TOKENS > 1 && i >= groups_of(k); }
        __device__ __forceinline__ int group_of(int i) const { return i - token_of(i) * groups_of(k); }

        // Tokens past the last repeat it and are not kept.
        __device__ __forceinline__ void read(Word (&words)[kSize / 2], int i) const {
            const long long row = static_cast<long long>(min(token_of(i), m - 1)) * k;
            const int column = group_of(i) * kSize;
            read_x(words, reinterpret_cast<const unsigned short*>(x) + row + column, k - column);
        }

        // take(a group's words, the group, its token).
        template <typename Take> __device__ __forceinline__ void each(const Take& take) const {
            const int count = TOKENS * groups_of(k);
#pragma unroll
            for (int j = 0; j < kHeld; ++j) {
                if (number(j) < count) take(held[j], group_of(number(j)), token_of(number(j)));
            }
#pragma unroll 1
            for (int i = number(kHeld); i < count; i += 32 * WARPS) {
                Word words[kSize / 2];
                read(words, i);
                take(words, group_of(i), token_of(i));
            }
        }
    };

    Input input;
    float sums[4];              // of the lane's groups: rows lane / 4 and 8 more, the tokens
    Word place, first_place;    // in shared memory, of the lane's group of a token, or of zeros: of the strip, of column 0
    Word totals, first_totals;  // likewise, of minus the sums of x of the lane's group
    int step;                   // bytes of a column; 0 if the lane does not read x

    // Of a chunk: the lane's columns, and minus the sums of its group by tokens.
    struct X {
        Word words[kXWords / 4][4];
        Number totals[TOKENS];
    };
    X x[2];

    // `at` is free shared memory.
    __device__ __forceinline__ Diagonal(const Asked& asked, Word at) {
        const int lane = threadIdx.x % 32, token = lane / 4 % 2, groups = groups_of(asked.k), columns = groups * kSize;
        const Word x_at = at + kZerosBytes, totals_at = x_at + TOKENS * columns * sizeof(Value);
#pragma unroll 1
        for (int i = threadIdx.x; i < kZerosBytes / 16; i += 32 * WARPS) st_shared_v4(at + 16 * i, kNothing);
        input.prepare(asked);
        asked.each([&](const Word (&words)[kSize / 2], int group, int token) {
            Word staged[kXWords / 4][4];
            const Number sum = input.stage(staged, words, token);
            const Word to = x_at + (token * groups + group) * (4 * kXWords);
#pragma unroll
            for (int j = 0; j < kXWords / 4; ++j) st_shared_v4(to + 16 * j, staged[j]);
            st_shared(totals_at + 4 * (group * TOKENS + token), Input::bits(-sum));
        });
        first_totals = totals_at + lane % 4 * TOKENS * 4;
        const bool reads = lane / 8 == lane % 4 && token < TOKENS;
        step = static_cast<int>(pinned(reads ? static_cast<Word>(sizeof(Value)) : 0u));
        first_place = reads ? x_at + (token * columns + lane % 4 * kSize) * static_cast<int>(sizeof(Value)) : at;
        clear();
        __syncthreads();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
    }

    __device__ __forceinline__ void begin_run(int) {}

    __device__ __forceinline__ void begin_strip(int column, int) {
        place = opaque(first_place + step * column);
        totals = opaque(first_totals + column / kSize * TOKENS * 4);
        read(0);
    }

    // Of the strip's chunk `i`.
    __device__ __forceinline__ void read(int i) {
#pragma unroll
        for (int j = 0; j < kXWords / 4; ++j) ld_shared_ordered(x[i % 2].words[j], place + i * kColumns * static_cast<int>(sizeof(Value)) + 16 * j);
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            x[i % 2].totals[token] = Input::number(ld_shared_ordered(totals + (i * (kColumns / kSize) * TOKENS + token) * 4));
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
