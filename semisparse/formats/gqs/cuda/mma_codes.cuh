// One or two tokens: x in 16 bits times the 4-bit codes themselves (block_diagonal.cuh).
//
// As halves the codes are used in place: the low nibble of a half's low byte is the subnormal number code / 2^24, the high
// nibble 16 times that. Tensor cores multiply subnormals exactly. The mantissa of bfloat16 is too short for that: there a code
// is put into the mantissa of the number 16.

#pragma once

#include "block_diagonal.cuh"
#include "ptx/mma.cuh"

constexpr float kCodeUnit = kHalf ? 0x1p-24f : 1.0f;    // the value of code 1 in the mma, as a low nibble
constexpr float kHighNibbles = kHalf ? 0.0625f : 1.0f;  // scales dot products of high nibbles to kCodeUnit
constexpr float kZeroUnit = 0x1p20f * kCodeUnit;        // scales a zero point, its 8 bits read as a half, to kCodeUnit

// x as 16-bit values.
struct SixteenBitX {
    using Value = unsigned short;
    using Sum = float;

    __device__ __forceinline__ static Word to_bits(float sum) { return __float_as_uint(sum); }
    __device__ __forceinline__ static float from_bits(Word bits) { return __uint_as_float(bits); }
    __device__ __forceinline__ void prepare(const StagedActivations&) {}

    // Reorders pairs of columns as MmaCodes::code_pairs does. Returns the group's sum times kZeroUnit.
    __device__ __forceinline__ float convert(Word (&converted)[2][4], const Word (&words)[8], int) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum += low_element(words[i]) + low_element(words[i] >> 16);
            converted[i / 4][i % 4] = words[kHalf ? i & 4 | i % 2 << 1 | i / 2 % 2 : i];
        }
        return sum * kZeroUnit;
    }
};

struct MmaCodes : BlockDiagonal<SixteenBitX> {
    Word low, high;  // masks of low and high nibbles; in bfloat16 the mask of a code, and 16

    __device__ __forceinline__ MmaCodes(const Activations& activations, Word smem) : BlockDiagonal(activations, smem) {
        low = keep_constant(kHalf ? 0x000f000fu : 0x00780078u, activations.k);
        high = keep_constant(kHalf ? 0x00f000f0u : 0x41804180u, activations.k);
    }

    // Two pairs of a word's 8 columns: as halves the pairs 0 and 2, or 1 and 3; in bfloat16 0 and 1, or 2 and 3.
    __device__ __forceinline__ void code_pairs(Word (&pairs)[2], Word codes, bool second) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int shift = 4 * (2 * second + i) - 3;
            pairs[i] = kHalf ? codes >> 8 * i & (second ? high : low)
                             : ((shift < 0 ? codes << -shift : codes >> shift) & low) | high;
        }
    }

    __device__ __forceinline__ void multiply(const ChunkFragment& chunk, int index, Word lane_bit) {
        const Fragment& x = fragments[index % 2];
        if (index + 1 < CHUNKS_PER_K_TILE) load_fragment(index + 1);
        float dots[2][4] = {};  // dot products of both `code_pairs`: as halves, of low and of high nibbles
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int word = i / 2, second = i % 2;
            Word upper[2], lower[2];
            code_pairs(upper, chunk.codes[0][word], second);
            code_pairs(lower, chunk.codes[1][word], second);
            const Word a[4] = {upper[0], lower[0], upper[1], lower[1]};
            mma_m16n8k16(dots[second], a, x.b[word][2 * second], x.b[word][2 * second + 1], kElement);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            // In bfloat16 16 is added to every code, and so to the zero point: 256 sixteenths.
            const float zero = to_float(element_of(chunk.zero[row] | (kHalf ? 0 : 256), static_cast<const __half*>(nullptr)));
            accumulate(row, chunk, x.minus_sums, lane_bit, [&](int i, float minus_sum) {
                return (dots[1][i] * kHighNibbles + dots[0][i]) + zero * minus_sum;
            });
        }
    }

    __device__ __forceinline__ float to_output(float accumulator, int) const { return accumulator * (1.0f / kCodeUnit); }
};
