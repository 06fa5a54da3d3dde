// Dequantises codes of 8 or 4 bits: (code - zero) * scale, rounded once to SCALAR, as in `Packed.unpack`; two weights per word.
//
// A code becomes the low byte of a 16-bit number of known exponent. With the high byte 0x64, a half is 1024 + code; with 0x43, a
// bfloat16 is 128 + code, for codes below 128. Minus an offset, the number is code - zero, exactly.

#pragma once

#include "ptx/integer.cuh"
#include "types.cuh"

__device__ __forceinline__ __half2 as_pair(Word bits, const __half*) { return *reinterpret_cast<__half2*>(&bits); }
__device__ __forceinline__ __nv_bfloat162 as_pair(Word bits, const __nv_bfloat16*) {
    return *reinterpret_cast<__nv_bfloat162*>(&bits);
}

constexpr const SCALAR* kScalar = nullptr;  // selects overloads by type
using Pair = decltype(as_pair(0, kScalar));

__device__ constexpr Word high_byte_of(const __half*) { return 0x64; }
__device__ constexpr Word high_byte_of(const __nv_bfloat16*) { return 0x43; }
constexpr Word kHighByte = high_byte_of(kScalar);
constexpr bool kHalf = kHighByte == 0x64;
constexpr Word kHighBytes = kHighByte * 0x01000100u;

// Returns `constant` such that ptxas does not know that it is constant, and keeps it in a register. `address` is any address in
// shared memory, so below 2^31.
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
