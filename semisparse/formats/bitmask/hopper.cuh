// How Hopper's tensor cores take a tile's weights, out of registers; and blocks that wait for one another.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "clusters.cuh"
#include "pairs.cuh"
#include "tiled.cuh"
#include "waiting.cuh"
#include "warpgroups.cuh"

// A matrix in shared memory whose rows of 128 bytes have their 16-byte units exchanged in groups of 8 rows: the low half of
// what wgmma is told, which moves on by 1 for 16 bytes; the high half is always the same. In a cluster the address has the
// block's rank in its upper bits.
__device__ __forceinline__ Word describe(Word address) { return (address & 0x3ffff) >> 4 | 1u << 16; }

constexpr Word kSwizzled = 64 | 1u << 30;  // 1,024 bytes from 8 rows to the next 8; 128-byte swizzle

#define SUMS_OF_8(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
        "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define SUMS_OF_16(i) SUMS_OF_8(i), SUMS_OF_8(i + 8)
#define SUMS_OF_32(i) SUMS_OF_16(i), SUMS_OF_16(i + 16)
#define SUMS_OF_64(i) SUMS_OF_32(i), SUMS_OF_32(i + 32)
#define SUMS_OF_96(i) SUMS_OF_64(i), SUMS_OF_32(i + 64)
#define SUMS_OF_128(i) SUMS_OF_64(i), SUMS_OF_64(i + 64)

#define NAMES_FROM_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_FROM_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_FROM_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
        ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_FROM_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
        ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_FROM_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
        ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// sums += w * x for 64 rows and as many tokens as twice the sums of a lane; `w` is the fragment that mma.m16n8k16 takes, of a
// warp's 16 rows. COUNT is the number of sums, then come the numbers of the operands after them.
#define MULTIPLY(TYPE, SCALAR_TYPE, COUNT, TOKENS_WIDE, NAMES, SUMS, W0, W1, W2, W3, X, ADDS, HIGH)                        \
    __device__ __forceinline__ void multiply_async(float (&sums)[COUNT], const Word (&w)[4], Word x, int adds,            \
                                                   const SCALAR_TYPE*) {                                                  \
        asm volatile("{\n.reg .pred adds;\n.reg .b64 x;\nsetp.ne.b32 adds, %" ADDS ", 0;\nmov.b64 x, {%" X ", %" HIGH "};\n" \
            "wgmma.mma_async.sync.aligned.m64n" TOKENS_WIDE "k16.f32." TYPE "." TYPE " {" NAMES "}, {%" W0 ",%" W1 ",%" W2    \
            ",%" W3 "}, x, adds, 1, 1, 0;\n}"                                                                              \
            : SUMS(0) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x), "r"(adds), "n"(kSwizzled));                      \
    }
#define MULTIPLY_ALL(TYPE, SCALAR_TYPE)                                                                                    \
    MULTIPLY(TYPE, SCALAR_TYPE, 16, "32", NAMES_FROM_0, SUMS_OF_16, "16", "17", "18", "19", "20", "21", "22")           \
    MULTIPLY(TYPE, SCALAR_TYPE, 32, "64", NAMES_FROM_0 NAMES_FROM_16, SUMS_OF_32, "32", "33", "34", "35", "36", "37",   \
             "38")                                                                                                         \
    MULTIPLY(TYPE, SCALAR_TYPE, 64, "128", NAMES_FROM_0 NAMES_FROM_16 NAMES_FROM_32, SUMS_OF_64, "64", "65", "66",      \
             "67", "68", "69", "70")                                                                                       \
    MULTIPLY(TYPE, SCALAR_TYPE, 96, "192", NAMES_FROM_0 NAMES_FROM_16 NAMES_FROM_32 NAMES_FROM_64,                         \
             SUMS_OF_96, "96", "97", "98", "99", "100", "101", "102")                                 \
    MULTIPLY(TYPE, SCALAR_TYPE, 128, "256", NAMES_FROM_0 NAMES_FROM_16 NAMES_FROM_32 NAMES_FROM_64 NAMES_FROM_96,          \
             SUMS_OF_128, "128", "129", "130", "131", "132", "133", "134")

MULTIPLY_ALL("f16", __half)
MULTIPLY_ALL("bf16", __nv_bfloat16)

#undef MULTIPLY_ALL
#undef MULTIPLY
#undef NAMES_FROM_0
#undef NAMES_FROM_16
#undef NAMES_FROM_32
#undef NAMES_FROM_64
#undef NAMES_FROM_96
#undef SUMS_OF_8
#undef SUMS_OF_16
#undef SUMS_OF_32
#undef SUMS_OF_64
#undef SUMS_OF_96
#undef SUMS_OF_128

// Two sums in one word, the first in its low half; `pair_of` compiles to other code in two builds of tiled_gemm.cu.
template <typename Scalar>
__device__ __forceinline__ Word pack(float low, float high) {
    Scalar values[2];
    store(values, low), store(values + 1, high);
    return *reinterpret_cast<const Word*>(values);
}

// Counts this block in, once its threads have met after writing.
__device__ __forceinline__ void count_in(int* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" : : "l"(counter) : "memory");
}

// Waits until so many blocks have been counted in.
__device__ __forceinline__ void wait_for_blocks(const int* counter, int blocks) {
    int found;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    while (found < blocks);
}
