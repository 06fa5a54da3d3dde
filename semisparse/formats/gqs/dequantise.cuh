// From the codes of a group of 16 to its weights in SCALAR, 4 or 8 BITS.

#pragma once

#include "chunk.cuh"

// Where four-bit codes stand in a word, and what they are put into; see dequantise4.
struct Constants {
    Word nibbles, magic;

    __device__ __forceinline__ explicit Constants(int positive) {
        const bool half = is_half(static_cast<const SCALAR*>(nullptr));
        nibbles = kept_constant(half ? 0x00f000f0u : 0x00780078u, positive);
        magic = kept_constant(half ? 0x54005400u : 0x41804180u, positive);
    }
};

__device__ __forceinline__ __half2 half_pair(Word bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ __forceinline__ __nv_bfloat162 bfloat_pair(Word bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

// Four pairs of columns from eight 4-bit codes: (code - zero) is exact in both dtypes, and its product with the scale is
// rounded once, as `unpack` does. 0x5400 is 64 as a half, whose last place is 1/16; 0x4180 is 16 in bfloat16.
__device__ __forceinline__ void dequantise4(Word (&pairs)[4], Word codes, Word scale, Word zero, const Constants& constants, const __half*) {
    const __half2 point = half_pair(__byte_perm(zero, constants.magic, 0x5050));
    const Word shifted[4] = {codes << 4, codes, codes >> 4, codes >> 8};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2 code = half_pair((shifted[i] & constants.nibbles) | constants.magic);
        pairs[i] = bits_of(__hmul2(__hsub2(code, point), half_pair(scale)));
    }
}

__device__ __forceinline__ void dequantise4(Word (&pairs)[4], Word codes, Word scale, Word zero, const Constants& constants, const __nv_bfloat16*) {
    const __nv_bfloat162 point = __float2bfloat162_rn(static_cast<float>(zero) * 0.0625f);
    const __nv_bfloat162 sixteen = bfloat_pair(0x41804180u);
    const Word shifted[4] = {codes << 3, codes >> 1, codes >> 5, codes >> 9};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 code = __hsub2(bfloat_pair((shifted[i] & constants.nibbles) | constants.magic), sixteen);
        pairs[i] = bits_of(__hmul2(__hsub2(code, point), bfloat_pair(scale)));
    }
}

// Two pairs of columns from four 8-bit codes, which stand as the columns 0, 2, 4, 6 or 1, 3, 5, 7 of eight.
__device__ __forceinline__ Word dequantise8(Word even, Word odd, int i, Word scale, Word zero, const __half*) {
    const Word code = __byte_perm(__byte_perm(even, odd, i | (i + 4) << 4), 0x64646464u, 0x4140);  // 1024 + code
    const __half2 point = half_pair(0x64006400u | zero * 0x10001u);
    return bits_of(__hmul2(__hsub2(half_pair(code), point), half_pair(scale)));
}

__device__ __forceinline__ Word dequantise8(Word even, Word odd, int i, Word scale, Word zero, const __nv_bfloat16*) {
    const float step = to_float(bfloat_pair(scale).x);
    const float first = static_cast<float>(static_cast<int>(even >> 8 * i & 255) - static_cast<int>(zero)) * step;
    const float second = static_cast<float>(static_cast<int>(odd >> 8 * i & 255) - static_cast<int>(zero)) * step;
    return bits_of(__floats2bfloat162_rn(first, second));
}

__device__ __forceinline__ void dequantise(Word (&pairs)[8], const Word (&codes)[kWords], Word scale, Word zero, const Constants& constants) {
    const SCALAR* tag = nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#if BITS == 4
        Word part[4];
        dequantise4(part, codes[half], scale, zero, constants, tag);
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[4 * half + i] = part[i];
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[4 * half + i] = dequantise8(codes[2 * half], codes[2 * half + 1], i, scale, zero, tag);
        }
#endif
    }
}
