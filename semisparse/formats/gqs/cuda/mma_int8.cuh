// W4A8, one or two tokens: every CTA quantises x to int8, with one scale per token as in `quant.symmetric`, and multiplies it
// with the 4-bit codes in integers, which is exact (block_diagonal.cuh).

#pragma once

#include "block_diagonal.cuh"
#include "ptx/mma.cuh"
#include "quantise.cuh"

// The bits of kMagic, a float whose ulp is 1: adding an integer below 2^22 to the bits adds it to the float.
constexpr int kMagicBits = 0x4b400000;

// x as int8.
struct Int8X {
    using Value = signed char;
    using Sum = int;

    float scale[TOKENS], inverse[TOKENS];

    // values[token]: registers cannot be indexed at run time.
    __device__ __forceinline__ static float of_token(const float (&values)[TOKENS], int token) {
        return token == 0 ? values[0] : values[TOKENS - 1];
    }

    __device__ __forceinline__ static Word to_bits(int sum) { return sum; }
    __device__ __forceinline__ static int from_bits(Word bits) { return bits; }

    // Computes the tokens' scales from their largest magnitudes, whose bits are compared as integers.
    __device__ __forceinline__ void prepare(const StagedActivations& activations) {
        __shared__ Word largest[TOKENS][WARPS];
        Word high[TOKENS] = {};  // an Element's bits in the upper half
        activations.for_each_group([&](const Word (&words)[kGroupSize / 2], int, int token) {
            Word group = 0;
#pragma unroll
            for (int i = 0; i < kGroupSize / 2; ++i)
                group = max(group, max(words[i] & 0x7fff0000u, words[i] << 16 & 0x7fff0000u));
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                if (i == token) high[i] = max(high[i], group);
            }
        });
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            high[token] = __reduce_max_sync(kAllLanes, high[token]);
            if (threadIdx.x % 32 == 0) largest[token][threadIdx.x / 32] = high[token];
        }
        __syncthreads();
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            Word high = 0;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) high = max(high, largest[token][i]);
            const float amax = low_element(high >> 16);
            const float magnitude = amax == 0.0f ? 127.0f : amax;
            scale[token] = __fdiv_rn(magnitude, 127.0f);
            inverse[token] = min(__fdiv_rn(127.0f, magnitude), kFloatMax);
        }
    }

    // Quantises a group to int8, in the order of the codes' nibbles: first columns 0, 4, 1, 5 of both eights of columns (low
    // nibbles), then 2, 6, 3, 7 of both (high nibbles). Returns the group's sum.
    __device__ __forceinline__ int convert(Word (&converted)[1][4], const Word (&words)[8], int token) const {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int word = i % 2 * 4 + i / 2;  // columns 0 and 1, or 2 and 3, of one of the eights
            Word bytes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float value = low_element(words[word + j % 2 * 2] >> j / 2 * 16);
                bytes[j] = __float_as_uint(__fadd_rn(__fmul_rn(value, of_token(inverse, token)), kMagic));
            }
            const Word low = __byte_perm(bytes[0], bytes[1], 0x0040), high = __byte_perm(bytes[2], bytes[3], 0x0040);
            converted[0][i] = __byte_perm(low, high, 0x5410);
            sum = __dp4a(static_cast<int>(converted[0][i]), 0x01010101, sum);
        }
        return sum;
    }
};

struct MmaInt8 : BlockDiagonal<Int8X> {
    using BlockDiagonal::BlockDiagonal;

    __device__ __forceinline__ void multiply(const ChunkFragment& chunk, int index, Word lane_bit) {
        const Fragment& x = fragments[index % 2];
        if (index + 1 < CHUNKS_PER_K_TILE) load_fragment(index + 1);
        // Dot products of low nibbles, and of high nibbles plus kMagicBits.
        int dots[2][4] = {{0, 0, 0, 0}, {kMagicBits, kMagicBits, kMagicBits, kMagicBits}};
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            // High nibbles are not shifted: they are 16 times their code.
            const Word nibbles = second ? 0xf0f0f0f0u : 0x0f0f0f0fu;
            const Word a[4] = {chunk.codes[0][0] & nibbles, chunk.codes[1][0] & nibbles,
                               chunk.codes[0][1] & nibbles, chunk.codes[1][1] & nibbles};
            mma_m16n8k32_u8_s8(dots[second], a, x.b[0][2 * second], x.b[0][2 * second + 1]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            accumulate(row, chunk, x.minus_sums, lane_bit, [&](int i, int minus_sum) {
                // kMagicBits plus the sum in sixteenths of a code, below 2^20: as a float, kMagic plus the sum.
                const int sum = 16 * dots[0][i] + dots[1][i] + static_cast<int>(chunk.zero[row]) * minus_sum;
                return __int_as_float(sum) - kMagic;
            });
        }
    }

    __device__ __forceinline__ float to_output(float accumulator, int token) const {
        return accumulator * (Int8X::of_token(format.scale, token) * 0.0625f);
    }
};
