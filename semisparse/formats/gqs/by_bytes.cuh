// Multiplies x in 8 bits by 4-bit codes (W4A8), exactly in integers up to the scales. See diagonal.cuh.

#pragma once

#include "diagonal.cuh"

constexpr float kAnchor = 12582912.0f;  // its last place is 1, with room for 2^22 on both sides
constexpr int kAnchorBits = 0x4b400000;

struct Input {
    using Value = signed char;
    using Number = int;

    __device__ __forceinline__ static int sum(const Word (&words)[4]) {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = __dp4a(static_cast<int>(words[i]), 0x01010101, sum);
        return sum;
    }
};

struct Product : Diagonal<Input> {
    using X = signed char;

    using Diagonal::Diagonal;

    __device__ __forceinline__ void add(const Chunk& chunk, int column, int left, Word bit) {
        Word words[4];
        read(words, column, left);
        int found[2][4] = {{0, 0, 0, 0}, {kAnchorBits, kAnchorBits, kAnchorBits, kAnchorBits}};
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            // Low nibbles as they are, high ones as 16 times their code.
            const Word nibbles = second ? 0xf0f0f0f0u : 0x0f0f0f0fu, order = second ? 0x7362 : 0x5140;
            const Word rows[4] = {
                chunk.codes[0][0] & nibbles, chunk.codes[1][0] & nibbles, chunk.codes[0][1] & nibbles, chunk.codes[1][1] & nibbles
            };
            mma(found[second], rows, __byte_perm(words[0], words[1], order), __byte_perm(words[2], words[3], order));
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            add_row(row, chunk, column, bit, [&](int cell, int total) {
                // In sixteenths of a code; below 2^20.
                const int sum = 16 * found[0][cell] + found[1][cell] - static_cast<int>(chunk.zero[row]) * total;
                return __int_as_float(sum) - kAnchor;
            });
        }
    }

    __device__ __forceinline__ static float final(float sum, const float* x_scale, int token) {
        return sum * (x_scale[token] * 0.0625f);
    }
};
