// What products with 2:4 weights take of Hopper beside the shared primitives.

#pragma once

#include "clusters.cuh"
#include "copies.cuh"
#include "warpgroups.cuh"

using Long = unsigned long long;

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace barrier {

__device__ __forceinline__ void wait(Word at, Word parity) {
    Word done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    } while (!done);
}

}  // namespace barrier

__device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// A warp group lets another begin, and that one waits for it, once.
__device__ __forceinline__ void let_group(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(group + 8) : "memory"); }
__device__ __forceinline__ void wait_for_group(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 8) : "memory"); }

// Writes four matrices of 8 x 8 values of 16 bits, of which a lane has two of row lane / 4 each, by columns: lane l gives the
// place of column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(Word to, const Word (&rows)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(rows[0]),
                 "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
                 : "memory");
}

// Says how many came here before. What the calling thread's block has written, and what those before wrote, can be read then.
__device__ __forceinline__ int count_arrival(int* arrivals) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
    return before;
}

// Where a matrix lies in shared memory: rows of 16 bytes in groups of eight (`leading` from one group of columns to the
// next, `stride` from eight rows to the next), or, swizzled, rows of 128 bytes.
__device__ __forceinline__ Long describe(Word address, Word leading, Word stride, Long swizzle) {
    // The address of a block in a cluster has the block's rank in its upper bits.
    return static_cast<Long>((address & 0x3ffff) >> 4) | static_cast<Long>(leading >> 4) << 16 |
           static_cast<Long>(stride >> 4) << 32 | swizzle << 62;
}

// sums[64 rows, TOKENS] = (first ? 0 : sums) + w[64 rows, 64 bytes] * x[TOKENS, 64 bytes]: w is 2:4, with 32 bytes a row.
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define UP_TO_29 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," TEN(1) TEN(2)
#if TOKENS == 256
#define SUMS UP_TO_29 TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) \
    "%120,%121,%122,%123,%124,%125,%126,%127"
#define OPERANDS "%128, %129, %130"
#define ADD "%131"
#define SELECTED "%132"
#elif TOKENS == 192
#define SUMS UP_TO_29 TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95"
#define OPERANDS "%96, %97, %98"
#define ADD "%99"
#define SELECTED "%100"
#elif TOKENS == 128
#define SUMS UP_TO_29 TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63"
#define OPERANDS "%64, %65, %66"
#define ADD "%67"
#define SELECTED "%68"
#elif TOKENS == 64
#define SUMS UP_TO_29 "%30,%31"
#define OPERANDS "%32, %33, %34"
#define ADD "%35"
#define SELECTED "%36"
#endif

#if defined(INT8)
using Sum = int;
#define PRODUCT "n" TEXT(TOKENS) "k64.s32.s8.s8"
#define HELD "+r"
#define REST ""
#elif defined(FP8)
using Sum = float;
#define PRODUCT "n" TEXT(TOKENS) "k64.f32.e4m3.e4m3"
#define HELD "+f"
#define REST ", 1, 1"
#elif defined(BF16)
using Sum = float;
#define PRODUCT "n" TEXT(TOKENS) "k32.f32.bf16.bf16"
#define HELD "+f"
#define REST ", 1, 1, 0, 0"
#else
using Sum = float;
#define PRODUCT "n" TEXT(TOKENS) "k32.f32.f16.f16"
#define HELD "+f"
#define REST ", 1, 1, 0, 0"
#endif

#define HOLD4(i) HELD(sums[i]), HELD(sums[i + 1]), HELD(sums[i + 2]), HELD(sums[i + 3])
#define HOLD16(i) HOLD4(i), HOLD4(i + 4), HOLD4(i + 8), HOLD4(i + 12)
#define HOLD32(i) HOLD16(i), HOLD16(i + 16)
#if TOKENS == 256
#define HOLD HOLD32(0), HOLD32(32), HOLD32(64), HOLD32(96)
#elif TOKENS == 192
#define HOLD HOLD32(0), HOLD32(32), HOLD32(64)
#elif TOKENS == 128
#define HOLD HOLD32(0), HOLD32(32)
#elif TOKENS == 64
#define HOLD HOLD32(0)
#endif

template <int SELECTOR>
__device__ __forceinline__ void multiply(Sum (&sums)[TOKENS / 2], Long w, Long x, Word positions, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"
                 "wgmma.mma_async.sp.sync.aligned.m64" PRODUCT " {" SUMS "}, " OPERANDS ", " SELECTED ", p" REST ";\n}"
                 : HOLD
                 : "l"(w), "l"(x), "r"(positions), "r"(add), "n"(SELECTOR));
}
