// Dequantises a group of 16 codes in 4 or 8 bits: (code - zero) * scale in Element, two weights per word.

#pragma once

#include "chunk.cuh"
#include "warp.cuh"

// Constants of dequantise_u4 for float16: the mask of two codes in a word, and the two numbers into whose mantissas codes are put.
struct U4Constants {
    Word mask, magic;

    __device__ __forceinline__ explicit U4Constants(int parameter) {
        mask = keep_constant(0x00f000f0u, parameter);
        magic = keep_constant(0x54005400u, parameter);
    }
};

__device__ __forceinline__ Word bits_of(__half2 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ __half2 half2_of(Word bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ __forceinline__ __nv_bfloat162 bfloat162_of(Word bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

// Dequantises eight 4-bit codes to four pairs of columns; the codes of pair i are nibble i of each half of `codes`. (code -
// zero) is exact in both types, and its product with the scale is rounded once, as in `Packed.unpack`. 0x5400 is 64 as a half,
// with an ulp of 1/16. In bfloat16 (gemm_dequantise.cuh) 0x7f00 is 2^127, 0x7d00 2^123 and 0x4280 64, which the scale is multiplied by.
__device__ __forceinline__ void dequantise_u4(Word (&pairs)[4], Word codes, Word scale, Word zero, const U4Constants& constants,
                                              const __half*) {
    const __half2 zero_point = half2_of(__byte_perm(zero, constants.magic, 0x5050));
    const Word shifted[4] = {codes << 4, codes, codes >> 4, codes >> 8};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2 code = half2_of((shifted[i] & constants.mask) | constants.magic);
        pairs[i] = bits_of(__hmul2(__hsub2(code, zero_point), half2_of(scale)));
    }
}

__device__ __forceinline__ void dequantise_u4(Word (&pairs)[4], Word codes, Word scale, Word zero, const U4Constants&,
                                              const __nv_bfloat16*) {
    const __nv_bfloat162 minus_zero = __hmul2(__low2bfloat162(bfloat162_of(zero)), bfloat162_of(0xfd00fd00u));
    const __nv_bfloat162 wide = __hmul2(bfloat162_of(scale), bfloat162_of(0x42804280u));
    const Word shifted = codes >> 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 code = bfloat162_of((i < 2 ? codes : shifted) & (i % 2 ? 0x00f000f0u : 0x000f000fu));
        const __nv_bfloat162 difference = __hfma2(code, bfloat162_of(i % 2 ? 0x7d007d00u : 0x7f007f00u), minus_zero);
        pairs[i] = bits_of(__hmul2(difference, wide));
    }
}

// Dequantises columns 2 i and 2 i + 1 of eight, whose 8-bit codes are one word for the even columns and one for the odd ones.
__device__ __forceinline__ Word dequantise_u8(Word even, Word odd, int i, Word scale, Word zero, const __half*) {
    const Word code = __byte_perm(__byte_perm(even, odd, i | (i + 4) << 4), 0x64646464u, 0x4140);  // 1024 + code
    const __half2 zero_point = half2_of(0x64006400u | zero * 0x10001u);
    return bits_of(__hmul2(__hsub2(half2_of(code), zero_point), half2_of(scale)));
}

__device__ __forceinline__ Word dequantise_u8(Word even, Word odd, int i, Word scale, Word zero, const __nv_bfloat16*) {
    const float factor = to_float(bfloat162_of(scale).x);
    const float first = static_cast<float>(static_cast<int>(even >> 8 * i & 255) - static_cast<int>(zero)) * factor;
    const float second = static_cast<float>(static_cast<int>(odd >> 8 * i & 255) - static_cast<int>(zero)) * factor;
    return bits_of(__floats2bfloat162_rn(first, second));
}

// Dequantises a group's 16 codes to eight pairs of columns, in order. `scale` has the scale in both halves.
__device__ __forceinline__ void dequantise(Word (&pairs)[8], const Word (&codes)[kCodeWords], Word scale, Word zero,
                                           const U4Constants& constants) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if constexpr (BITS == 4) {
            Word part[4];
            dequantise_u4(part, codes[half], scale, zero, constants, kElement);
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[4 * half + i] = part[i];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[4 * half + i] = dequantise_u8(codes[2 * half], codes[2 * half + 1], i, scale, zero, kElement);
        }
    }
}
