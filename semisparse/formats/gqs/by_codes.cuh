// Multiplies 16-bit x by 4-bit codes. See diagonal.cuh.
//
// As halves, codes are taken as they stand: the bits of a word's low nibbles are subnormal numbers, code / 2^24, and those of
// its high nibbles 16 of these. Tensor cores multiply them exactly. bfloat16 has no such room: there 16 is added to a code.

#pragma once

#include "diagonal.cuh"

constexpr bool kHalf = is_half(static_cast<const SCALAR*>(nullptr));
constexpr float kUnit = kHalf ? 0x1p-24f : 1.0f;   // what a code is multiplied by
constexpr float kSecond = kHalf ? 0.0625f : 1.0f;  // what makes codes of the second product's
constexpr float kZeroUnit = 0x1p20f * kUnit;       // what makes a zero point, its bits those of a half, one of codes

struct Input {
    using Value = unsigned short;
    using Number = float;

    __device__ __forceinline__ static Word bits(float value) { return __float_as_uint(value); }
    __device__ __forceinline__ static float number(Word bits) { return __uint_as_float(bits); }
    template <typename Asked> __device__ __forceinline__ void prepare(const Asked&) {}

    // Pairs in the order in which products take them.
    __device__ __forceinline__ float stage(Word (&staged)[2][4], const Word (&words)[8], int) const {
        const SCALAR* tag = nullptr;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum += to_float(scalar_of(words[i], tag)) + to_float(scalar_of(words[i] >> 16, tag));
            staged[i / 4][i % 4] = words[kHalf ? i & 4 | i % 2 << 1 | i / 2 % 2 : i];
        }
        return sum * kZeroUnit;
    }
};

struct Product : Diagonal<Input> {
    Word low, high;

    __device__ __forceinline__ Product(const Asked& asked, Word at) : Diagonal(asked, at) {
        low = kept_constant(kHalf ? 0x000f000fu : 0x00780078u, asked.k);
        high = kept_constant(kHalf ? 0x00f000f0u : 0x41804180u, asked.k);
    }

    // Two pairs of a word's 8 columns; as halves the pairs 0 and 2 or 1 and 3, else 0 and 1 or 2 and 3.
    __device__ __forceinline__ void pairs_of(Word (&pairs)[2], Word codes, bool second) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int shift = 4 * (2 * second + i) - 3;
            pairs[i] = kHalf ? codes >> 8 * i & (second ? high : low)
                             : ((shift < 0 ? codes << -shift : codes >> shift) & low) | high;
        }
    }

    __device__ __forceinline__ void add(const Chunk& chunk, int index, Word bit) {
        const X& x = this->x[index % 2];
        if (index + 1 < BATCH) read(index + 1);
        float found[2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int word = i / 2, second = i % 2;
            Word upper[2], lower[2];
            pairs_of(upper, chunk.codes[0][word], second);
            pairs_of(lower, chunk.codes[1][word], second);
            const Word rows[4] = {upper[0], lower[0], upper[1], lower[1]};
            mma_m16n8k16(found[second], rows, x.words[word][2 * second], x.words[word][2 * second + 1], static_cast<const SCALAR*>(nullptr));
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            // The sixteenths of a code are the bits of a subnormal half.
            const float zero = to_float(scalar_of(chunk.zero[row] | (kHalf ? 0 : 256), static_cast<const __half*>(nullptr)));
            add_row(row, chunk, x.totals, bit, [&](int cell, float total) {
                return (found[1][cell] * kSecond + found[0][cell]) + zero * total;
            });
        }
    }

    __device__ __forceinline__ float final(float sum, int) const { return sum * (1.0f / kUnit); }
};
