// A warp's product of 16-bit values on tensor cores, summed in float32.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "word.cuh"

// sums[16, 8] += a[16, 16] b[16, 8]; of a the registers are rows 0 to 7 and 8 to 15 of columns 0 to 7, then of 8 to 15.
__device__ __forceinline__ void mma(float (&sums)[4], const Word (&a)[4], Word b0, Word b1, const __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&sums)[4], const Word (&a)[4], Word b0, Word b1, const __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
