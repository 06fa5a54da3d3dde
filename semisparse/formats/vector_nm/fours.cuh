// What fours.cu takes of Hopper beside the shared primitives.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "waiting.cuh"
#include "word.cuh"

// Arrives once this thread's copies up to here have come.
__device__ __forceinline__ void arrive_after_copies(Word barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(barrier) : "memory");
}

// Lets products, which read shared memory by another way, see what copies have written: barriers order only this one.
__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

__device__ __forceinline__ void wait_for_own_copies() { asm volatile("cp.async.wait_all;" : : : "memory"); }

// A matrix of columns of 64 tokens, 128 swizzled bytes each: `next` bytes from 64 tokens to the next, `eight` from eight columns
// to the next.
__device__ __forceinline__ unsigned long long describe(Word address, Word next, Word eight) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) | static_cast<unsigned long long>(next >> 4) << 16 |
           static_cast<unsigned long long>(eight >> 4) << 32 | 1ull << 62;
}

#define HOLD8(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
        "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define HOLD64 HOLD8(0), HOLD8(8), HOLD8(16), HOLD8(24), HOLD8(32), HOLD8(40), HOLD8(48), HOLD8(56)

// sums[64 rows, 128 tokens] += w[64 rows, 32 columns] * x[32 columns, 128 tokens]: w is 2:4, 16 of its columns in registers.
#define MULTIPLY(TYPE, SCALAR_TYPE)                                                                                         \
    __device__ __forceinline__ void multiply(float (&sums)[64], const Word (&w)[4], unsigned long long x, Word positions, \
                                             const SCALAR_TYPE*) {                                                         \
        asm volatile(                                                                                                       \
            "wgmma.mma_async.sp.sync.aligned.m64n128k32.f32." TYPE "." TYPE " {"                                           \
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                        \
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                                              \
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                              \
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"                                             \
            " {%64,%65,%66,%67}, %68, %69, 0, 1, 1, 1, 1;"                                                                  \
            : HOLD64 : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(positions));                                  \
    }

MULTIPLY("f16", __half)
MULTIPLY("bf16", __nv_bfloat16)

#undef MULTIPLY
#undef HOLD64
#undef HOLD8
