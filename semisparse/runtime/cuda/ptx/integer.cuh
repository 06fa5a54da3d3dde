// Integer instructions that the compiler would not choose by itself, and elect.sync.

#pragma once

#include "word.cuh"

// prmt.b32: unlike __byte_perm, a selector nibble's highest bit replicates the sign of the selected byte.
__device__ __forceinline__ Word prmt(Word low, Word high, Word selector) {
    Word d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
    return d;
}

// mad.lo.u32: a * b + c on the FMA pipe, where the compiler would shift on the busier ALU pipe.
__device__ __forceinline__ Word mad_lo(Word a, Word b, Word c) {
    Word d;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// mad.wide.u32: pointer + a * b in one instruction.
__device__ __forceinline__ const char* mad_wide(Word a, Word b, const char* pointer) {
    unsigned long long d;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(pointer));
    return reinterpret_cast<const char*>(d);
}

// Returns `value`, but hides from the compiler how it was computed, so that it is not computed again at each use.
__device__ __forceinline__ Word opaque(Word value) {
    asm("" : "+r"(value));
    return value;
}

// Returns true in one lane of the warp: the one that elect.sync picks; lane 0 before Hopper.
__device__ __forceinline__ bool elect_sync() {
#if __CUDA_ARCH__ >= 900
    Word elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected;
#else
    return threadIdx.x % 32 == 0;
#endif
}
