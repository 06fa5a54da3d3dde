// mma.sync: matrix multiply-accumulate by a warp. The four words of a fragment of a are from rows 0 to 7 and 8 to 15 of the
// first half of the columns, then of the second half.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "word.cuh"

// d[16, 8] += a[16, 16] b[16, 8] in float16 or bfloat16 (the last argument gives the type), summed in float32.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const Word (&a)[4], Word b0, Word b1, const __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const Word (&a)[4], Word b0, Word b1, const __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16, 8] += a[16, 32] b[32, 8]; a is unsigned, b signed 8-bit.
__device__ __forceinline__ void mma_m16n8k32_u8_s8(int (&d)[4], const Word (&a)[4], Word b0, Word b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
