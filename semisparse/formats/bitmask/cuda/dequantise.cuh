// Codes of 8 or 4 bits to weights: (code - zero) * scale, rounded once to SCALAR, as in `Packed.unpack`; two per word.
//
// A code becomes the low byte of a 16-bit number of known exponent: 0x64 as the high byte of a half makes 1024 + code, 0x43 that
// of a bfloat16 128 + code, if code is below 128. Less an offset it is code - zero, exactly.

#pragma once

#include "ptx/integer.cuh"
#include "types.cuh"

__device__ __forceinline__ __half2 as_pair(Word bits, const __half*) { return *reinterpret_cast<__half2*>(&bits); }
__device__ __forceinline__ __nv_bfloat162 as_pair(Word bits, const __nv_bfloat16*) {
    return *reinterpret_cast<__nv_bfloat162*>(&bits);
}

constexpr const SCALAR* kScalar = nullptr;  // selects overloads
using Pair = decltype(as_pair(0, kScalar));

__device__ constexpr Word high_byte_of(const __half*) { return 0x64; }
__device__ constexpr Word high_byte_of(const __nv_bfloat16*) { return 0x43; }
constexpr Word kHighByte = high_byte_of(kScalar);
constexpr bool kHalf = kHighByte == 0x64;
constexpr Word kHighBytes = kHighByte * 0x01000100u;

// A constant that ptxas does not know to be one, so that it stays in a register. `address` is one in shared memory: below 2^31.
__device__ __forceinline__ Word in_register(Word constant, Word address) { return constant + (address >> 31); }

// The scale of both weights of a pair; `half` says which half of the word it is.
__device__ __forceinline__ Pair scale_of(Word scales, int half) {
    return as_pair(prmt(scales, scales, half ? 0x3232 : 0x1010), kScalar);
}

// (biased - offset) * scale, where biased - offset is code - zero.
__device__ __forceinline__ Word scaled(Word biased, Word offset, Pair scale) {
    const Pair weight = __hmul2(__hsub2(as_pair(biased, kScalar), as_pair(offset, kScalar)), scale);
    return *reinterpret_cast<const Word*>(&weight);
}
