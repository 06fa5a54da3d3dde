// Rounds x to 8 bits, a scale a token as `quant.symmetric` does, and multiplies it by 4-bit codes (W4A8), exactly in integers up
// to the scales. See diagonal.cuh.

#pragma once

#include "diagonal.cuh"

constexpr float kAnchor = 12582912.0f;  // its last place is 1, with room for 2^22 on both sides
constexpr int kAnchorBits = 0x4b400000;

struct Input {
    using Value = signed char;
    using Number = int;

    float scale[TOKENS], inverse[TOKENS];

    // Registers have no numbers.
    __device__ __forceinline__ static float of_token(const float (&values)[TOKENS], int token) {
        return token == 0 ? values[0] : values[TOKENS - 1];
    }

    __device__ __forceinline__ static Word bits(int value) { return value; }
    __device__ __forceinline__ static int number(Word bits) { return bits; }

    // Finds the tokens' largest magnitudes.
    template <typename Asked> __device__ __forceinline__ void prepare(const Asked& asked) {
        __shared__ Word largest[TOKENS][WARPS];
        Word high[TOKENS] = {};  // bits of a SCALAR, in the upper half
        asked.each([&](const Word (&words)[kSize / 2], int, int token) {
            Word found = 0;
#pragma unroll
            for (int i = 0; i < kSize / 2; ++i) found = max(found, max(words[i] & 0x7fff0000u, words[i] << 16 & 0x7fff0000u));
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                if (i == token) high[i] = max(high[i], found);
            }
        });
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            high[token] = max_of_warp(high[token]);
            if (threadIdx.x % 32 == 0) largest[token][threadIdx.x / 32] = high[token];
        }
        __syncthreads();
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            Word high = 0;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) high = max(high, largest[token][i]);
            const float found = to_float(scalar_of(high >> 16, static_cast<const SCALAR*>(nullptr)));
            const float magnitude = found == 0.0f ? 127.0f : found;
            scale[token] = __fdiv_rn(magnitude, 127.0f);
            inverse[token] = min(__fdiv_rn(127.0f, magnitude), 3.4028234663852886e38f);
        }
    }

    // Of each eight columns 0, 4, 1, 5, as codes have them in low nibbles; then 2, 6, 3, 7, as in high ones.
    __device__ __forceinline__ int stage(Word (&staged)[1][4], const Word (&words)[8], int token) const {
        const SCALAR* tag = nullptr;
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int word = i % 2 * 4 + i / 2;  // of columns 0 and 1, or 2 and 3
            Word bytes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float value = to_float(scalar_of(words[word + j % 2 * 2] >> j / 2 * 16, tag));
                // Adding 1.5 * 2^23 rounds half to even and leaves the integer in the low bits.
                bytes[j] = __float_as_uint(__fadd_rn(__fmul_rn(value, of_token(inverse, token)), kAnchor));
            }
            staged[0][i] = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
            sum = __dp4a(static_cast<int>(staged[0][i]), 0x01010101, sum);
        }
        return sum;
    }
};

struct Product : Diagonal<Input> {
    using Diagonal::Diagonal;

    __device__ __forceinline__ void add(const Chunk& chunk, int index, Word bit) {
        const X& x = this->x[index % 2];
        if (index + 1 < BATCH) read(index + 1);
        int found[2][4] = {{0, 0, 0, 0}, {kAnchorBits, kAnchorBits, kAnchorBits, kAnchorBits}};
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            // Low nibbles as they are, high ones as 16 times their code.
            const Word nibbles = second ? 0xf0f0f0f0u : 0x0f0f0f0fu;
            const Word rows[4] = {
                chunk.codes[0][0] & nibbles, chunk.codes[1][0] & nibbles, chunk.codes[0][1] & nibbles, chunk.codes[1][1] & nibbles
            };
            mma_m16n8k32_u8_s8(found[second], rows, x.words[0][2 * second], x.words[0][2 * second + 1]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            add_row(row, chunk, x.totals, bit, [&](int cell, int total) {
                // In sixteenths of a code; below 2^20.
                const int sum = 16 * found[0][cell] + found[1][cell] + static_cast<int>(chunk.zero[row]) * total;
                return __int_as_float(sum) - kAnchor;
            });
        }
    }

    __device__ __forceinline__ float final(float sum, int token) const {
        return sum * (Input::of_token(input.scale, token) * 0.0625f);
    }
};
