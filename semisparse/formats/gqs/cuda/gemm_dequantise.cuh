// Dequantises 8 columns of a group in 2, 3, 4 or 8 bits: (code - zero) * scale in Element, bit for bit as `Packed.unpack` does.
//
// Codes are put into the mantissas of 16-bit numbers, two at a time. code - zero is less than 256 units of 2^(BITS - 8), so it is
// exact in both types. Its product with the scale is rounded once. In bfloat16 of up to 4 bits 64 scale has to be finite.

#pragma once

#include "element.cuh"
#include "ptx/word.cuh"

__device__ __forceinline__ Word bits_of(__half2 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ __half2 half2_of(Word bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ __forceinline__ __nv_bfloat162 bfloat162_of(Word bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

// Scale and zero point of a group, converted for dequantise_pair: in both halves of a word, or (bfloat16 in 8 bits) as floats. In
// bfloat16 of fewer bits 64 times the scale, and the zero point over -64.
struct ScaleZero {
    Word scale, zero;
};

// 2^(BITS + 2) as a half: its ulp is 2^(BITS - 8), the unit of zero points, so a zero point's 8 bits as its lowest ones add it.
constexpr Word kHalfAnchor = (17u + BITS << 10) * 0x10001u;
constexpr Word kHalfMask = ((1u << BITS) - 1 << 8 - BITS) * 0x10001u;
// Bits below 256 are, as a bfloat16, their value times 2^-133: subnormal, or of the least exponent. So codes need no shift where
// they lie in the low byte of a half, and one fused multiply-add subtracts the zero point and brings them to 2^-6 of their value.
constexpr Word kBfloatMask = ((1u << BITS) - 1) * 0x10001u;  // of the first pair
constexpr int kPairsInPlace = BITS == 2 ? 4 : 2;             // of a unit; the others need a shift
__device__ __forceinline__ constexpr Word bfloat_power(int exponent) { return (exponent + 127u << 7) * 0x10001u; }
constexpr Word kFloatAnchor = 0x4b000000u;  // 2^23: its ulp is 1

__device__ __forceinline__ constexpr Word code_mask(const __half*) { return kHalfMask; }
__device__ __forceinline__ constexpr Word code_mask(const __nv_bfloat16*) { return kBfloatMask; }

__device__ __forceinline__ ScaleZero prepare(Word scale, Word zero, const __half*) {
    return {scale * 0x10001u, kHalfAnchor | zero * 0x10001u};
}

// The low half of a word times a pair.
__device__ __forceinline__ Word twice(Word low, Word factors) {
    return bits_of(__hmul2(__low2bfloat162(bfloat162_of(low)), bfloat162_of(factors)));
}

__device__ __forceinline__ ScaleZero prepare(Word scale, Word zero, const __nv_bfloat16*) {
    if constexpr (BITS == 8) return {scale << 16, kFloatAnchor | zero};
    return {twice(scale, bfloat_power(6)), twice(zero, bfloat_power(119 + BITS) | 0x80008000u)};
}

// The codes of one of a lane's units, for BITS < 8: the even columns from bit 0 of the low half on, the odd ones from bit 0 of
// the high half on.
template <int words>
__device__ __forceinline__ Word spread(const Word (&codes)[words], int unit) {
    if constexpr (BITS == 2) return __byte_perm(codes[unit / 2], 0, unit % 2 ? 0x4342 : 0x4140);
    if constexpr (BITS == 3) {
        const int word = 3 * unit / 4, byte = 3 * unit % 4;
        const Word next = codes[word + 1 < words ? word + 1 : word];
        const Word code_bits = byte ? __funnelshift_r(codes[word], next, 8 * byte) : codes[word];
        return (code_bits & 0xfff) | (code_bits << 4 & 0xfff0000);
    }
    return codes[unit];
}

// Shifts pair `i` of `spread` codes to bit `to` of each half; the caller masks other bits.
__device__ __forceinline__ Word shift_pair(Word codes, int i, int to) {
    const int left = to - BITS * i;
    return left >= 0 ? codes << left : codes >> -left;
}

// Dequantises pair `i` of a unit, columns 2 i and 2 i + 1. `mask` is `code_mask(kElement)`, which a caller may keep in a
// register: with the anchor, an instruction would have two constants.
template <int words>
__device__ __forceinline__ Word dequantise_pair(const Word (&codes)[words], int unit, int i, ScaleZero group, Word mask,
                                                const __half*) {
    Word code;
    if constexpr (BITS == 8) {  // 0x64: the high byte of the anchor
        const Word both = __byte_perm(codes[2 * unit], codes[2 * unit + 1], i | (i + 4) << 4);
        code = __byte_perm(both, 0x64646464u, 0x4140);
    } else {
        code = (shift_pair(spread(codes, unit), i, 8 - BITS) & mask) | kHalfAnchor;
    }
    return bits_of(__hmul2(__hsub2(half2_of(code), half2_of(group.zero)), half2_of(group.scale)));
}

template <int words>
__device__ __forceinline__ Word dequantise_pair(const Word (&codes)[words], int unit, int i, ScaleZero group, Word,
                                                const __nv_bfloat16*) {
    if constexpr (BITS == 8) {
        const float zero = __uint_as_float(group.zero), scale = __uint_as_float(group.scale);
        const Word even = __byte_perm(codes[2 * unit], kFloatAnchor, 0x7440 | i);
        const Word odd = __byte_perm(codes[2 * unit + 1], kFloatAnchor, 0x7440 | i);
        return pack2((__uint_as_float(even) - zero) * scale, (__uint_as_float(odd) - zero) * scale, kElement);
    } else {
        const int place = i % kPairsInPlace * BITS;
        const Word code = (spread(codes, unit) >> (i / kPairsInPlace * kPairsInPlace * BITS)) & kBfloatMask << place;
        const __nv_bfloat162 difference =
            __hfma2(bfloat162_of(code), bfloat162_of(bfloat_power(127 - place)), bfloat162_of(group.zero));
        return bits_of(__hmul2(difference, bfloat162_of(group.scale)));
    }
}

// Dequantises a unit to four pairs of columns.
template <int words>
__device__ __forceinline__ void dequantise(Word (&pairs)[4], const Word (&codes)[words], int unit, ScaleZero group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = dequantise_pair(codes, unit, i, group, code_mask(kElement), kElement);
}
